"""How often the guesses of a drafter are right, by depth. Knows no mlx."""

FIRST_GUESS = 0.6  # share of right drafts before the first one
PRIOR = 8.0  # weight of all requests' drafts beside a request's own, in drafts
FORGETTING = 0.95  # weight of a request's draft relative to its next one
OVERALL_FORGETTING = 0.995  # the same of all requests together
RETURN_RATE = 0.002  # rate at which drafts that are not tried are forgotten


class DepthShares:
    """Shares of drafts that were right at each depth, of those whose drafts before were right.

    Attributes:
        right, tried: numbers of drafts by depth; old ones count less.
    """

    def __init__(self, depths: int, forgetting: float, right: float = 0.0, tried: float = 0.0):
        self._kept, self._right, self._tried = forgetting, right, tried
        self.right, self.tried = [right] * depths, [tried] * depths

    def add(self, drafted: int, accepted: int) -> None:
        """Count the drafts of a request in a step."""
        for depth in range(min(drafted, accepted + 1)):
            self.right[depth] = self._kept * self.right[depth] + (depth < accepted)
            self.tried[depth] = self._kept * self.tried[depth] + 1

    def fade(self, rate: float) -> None:
        """Move a little towards the first values."""
        self.right = [each + rate * (self._right - each) for each in self.right]
        self.tried = [each + rate * (self._tried - each) for each in self.tried]


class Acceptance:
    """The probability that a request's next guess is right at each depth: the share of its own
    drafts, with those of all requests as a prior.

    Args:
        depths: guesses of a request in a step at most.
    """

    def __init__(self, depths: int) -> None:
        self._depths = depths
        self._own: dict[int, DepthShares] = {}  # by request id
        self._overall = DepthShares(depths, OVERALL_FORGETTING, FIRST_GUESS * PRIOR, PRIOR)

    def likelihood(self, request_id: int) -> tuple[float, ...]:
        """By depth, each if all guesses before it are right."""
        own = self._own.get(request_id)
        if own is None:
            own = self._own[request_id] = DepthShares(self._depths, FORGETTING)
        own.fade(RETURN_RATE)
        overall, found = self._overall, list[float]()
        for depth in range(self._depths):
            prior = PRIOR * overall.right[depth] / overall.tried[depth]
            found.append((own.right[depth] + prior) / (own.tried[depth] + PRIOR))
        return tuple(found)

    def add(self, request_id: int, drafted: int, accepted: int) -> None:
        """Count the drafts of a request in a step."""
        self._overall.add(drafted, accepted)
        if request_id in self._own:
            self._own[request_id].add(drafted, accepted)

    def rested(self) -> None:
        """No guess was wanted in a plan."""
        self._overall.fade(RETURN_RATE)

    def drop(self, request_id: int) -> None:
        """Forget an ended request."""
        self._own.pop(request_id, None)
