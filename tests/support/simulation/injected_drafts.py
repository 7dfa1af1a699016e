"""Drafts that are right as often as a random stream decides."""

import random
from collections.abc import Container
from functools import partial

from mlx_paged.options import MAX_DRAFTS
from mlx_paged.request import Request
from mlx_paged.runner.head_drafter import HeadDrafter
from mlx_paged.scheduler.pace import Pace
from tests.support.models.architectures import VOCAB
from tests.support.simulation.solo_runs import SoloModel, solo_run


class InjectedDrafter:
    """Drafts from requests' runs alone, some of them replaced by random tokens.

    Args:
        share: how many of them are right, on average.

    Attributes:
        never: ids of requests that get none, because they must fail at a certain length.
    """

    num_tokens, chunk = MAX_DRAFTS, 0
    takes_time, seconds, pace = False, 0.0, Pace()

    def __init__(self, rng: random.Random, model: SoloModel, share: float = 0.7) -> None:
        self.rng = rng
        self.share = share
        self._model = model
        self.never: Container[int] = ()
        self._right: dict[int, list[int]] = {}
        self.verified_drafts = 0

    def likelihood(self, request: Request) -> tuple[float, ...]:
        return () if request.id in self.never else self.rng.choice(((), (0.99,), (0.999,)))

    def num_unread(self, request: Request) -> int:
        return 0

    def rested(self) -> None: ...

    def propose(self, requests: list[Request], depths: list[int]) -> list[list[int]]:
        pairs = zip(requests, depths, strict=True)
        return [self._drafts(request, self.rng.randint(0, depth)) for request, depth in pairs]

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted
        self.verified_drafts += drafted

    def drop(self, request: Request) -> None:
        self._right.pop(request.id, None)

    def recover(self) -> None:
        self._right.clear()

    def _drafts(self, request: Request, depth: int) -> list[int]:
        if request.id not in self._right:
            prompt = request.keys[: request.num_prompt]
            solo = solo_run(self._model, prompt, request.params, request.seed, request.salt)
            self._right[request.id] = solo.tokens
        done = request.num_generated
        right = self._right[request.id][done : done + depth]
        right += [0] * (depth - len(right))
        wrong = self.rng.randrange
        return [t if self.rng.random() < self.share else wrong(self._model.vocab) for t in right]


class HeadWithRightDrafts(InjectedDrafter):
    """A head that guesses for each request; some of its guesses are then replaced by right ones.

    Attributes:
        head: the engine's own :class:`HeadDrafter`.
    """

    def __init__(
        self, rng: random.Random, model: SoloModel, share: float, head: HeadDrafter
    ) -> None:
        super().__init__(rng, model, share)
        self.head, self.num_tokens = head, head.num_tokens

    def propose(self, requests: list[Request], depths: list[int]) -> list[list[int]]:
        guesses = self.head.propose(requests, depths)
        assert not self.head._has_failed
        right = super().propose(requests, depths)
        pairs = zip(guesses, right, strict=True)
        return [b if self.rng.random() < self.share else a for a, b in pairs]

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        super().verified(request, drafted, accepted)
        self.head.verified(request, drafted, accepted)

    def drop(self, request: Request) -> None:
        super().drop(request)
        self.head.drop(request)

    def recover(self) -> None:
        super().recover()
        self.head.recover()


def every_guess(speculation, likely):
    """For ``Speculation._depths``: drafts for whoever has a guess, however fast the machine is."""
    most = min(6, speculation.drafters[0].num_tokens)
    left = {r: r.params.max_tokens - r.num_generated - 1 for r, p in likely.items() if p}
    return {request: min(most, count) for request, count in left.items() if count > 0}


def take_every_guess(speculation):
    """Let no clock decide how many drafts a step takes."""
    speculation._depths = partial(every_guess, speculation)


class HalfRight:
    """Drafts whose first token is right; the others are right every second time."""

    num_tokens, chunk, takes_time, seconds, pace = 3, 0, False, 0.0, Pace()

    def __init__(self, right: dict[int, list[int]], vocab: int = VOCAB) -> None:
        self.right = right  # tokens of a completion by length of its prompt
        self.vocab = vocab
        self.rounds = 0

    def likelihood(self, request) -> tuple[float, ...]:
        return (0.999,)

    def num_unread(self, request) -> int:
        return 0

    def rested(self) -> None: ...

    def propose(self, requests, depths):
        self.rounds += 1
        return [self._drafts(*pair) for pair in zip(requests, depths, strict=True)]

    def _drafts(self, request, depth):
        first, *others = self.right[request.num_prompt][request.num_generated :][:depth] or [0]
        return [first, *((token + self.rounds % 2) % self.vocab for token in others)]

    def verified(self, request, drafted, accepted) -> None: ...

    def drop(self, request) -> None: ...

    def recover(self) -> None: ...
