"""A beam search whose hypotheses are requests that share blocks. Knows no mlx."""

from collections.abc import Callable
from typing import Any

from mlx_paged.engine.beams import BeamGroup, Candidates, Survivor
from mlx_paged.engine.pipeline import Choice, Runner
from mlx_paged.outputs import Beam
from mlx_paged.request import FinishReason, Request
from mlx_paged.scheduler.scheduler import Scheduler


class BeamRequests:
    """The live hypotheses of one beam search.

    They advance together: one that has its candidates rests until the others have theirs. The
    first survivor of a hypothesis is the same request, the others are forks of it, so hypotheses
    share the blocks of all that they have in common.

    Args:
        root: the prompt; its id is the search's.
        make_request: given tokens and their log-probabilities, the request of a new hypothesis.
    """

    def __init__(
        self,
        root: Request,
        group: BeamGroup,
        make_request: Callable[[list[int], list[float]], Request],
    ) -> None:
        self.root = root
        self.group = group
        self.live = [root]
        self._make_request = make_request
        self._offers: dict[int, tuple[tuple[int, float], ...]] = {}

    def offer(self, choice: Choice) -> bool:
        """Take in one hypothesis' candidates; whether all have theirs now."""
        self._offers[choice.request.id] = choice.top[: self.root.params.logprobs]
        return len(self._offers) == len(self.live)

    @property
    def done(self) -> bool:
        return self.group.done

    @property
    def finish_reason(self) -> FinishReason:
        """Of the best hypothesis; STOP if no continuation is possible at all."""
        best = self.group.best(1)
        return best[0].finish_reason if best else FinishReason.STOP

    def beams(self, text_of: Callable[[list[int]], str]) -> tuple[Beam, ...]:
        """The finished hypotheses, best first."""
        return tuple(
            Beam(h.tokens, text_of(h.tokens), h.logprobs, h.score, h.finish_reason)
            for h in self.group.best()
        )

    def end(self, scheduler: Scheduler, runner: Runner[Any]) -> None:
        """Drop all hypotheses; the root becomes the best one of those that finished, if any."""
        for request in self.live:
            scheduler.complete(request)
            runner.drop(request)
        best = self.group.best(1)
        self.root.tokens[self.root.num_prompt :] = best[0].tokens if best else []
        self.root.logprobs = best[0].logprobs if best else []

    def advance(self, scheduler: Scheduler, runner: Runner[Any]) -> None:
        """Let the best hypotheses live on, fork those with several heirs, prune the rest."""
        offers = [self._offers[request.id] for request in self.live]
        self._offers.clear()
        candidates = Candidates(
            [[token for token, _ in offer] for offer in offers],
            [[logprob for _, logprob in offer] for offer in offers],
        )
        survivors = self.group.advance(self.live, candidates)
        heirs: dict[int, Survivor] = {}  # by parent: who goes on as the same request
        for survivor in survivors:
            heirs.setdefault(survivor.parent, survivor)
        live = [
            self.live[s.parent] if heirs[s.parent] is s else self._fork(s, scheduler, runner)
            for s in survivors
        ]
        for index, request in enumerate(self.live):
            if index in heirs:
                request.tokens.append(heirs[index].token)
                request.logprobs.append(heirs[index].logprob)
                scheduler.resume(request)
            else:
                scheduler.complete(request)
                runner.drop(request)
        self.live = live

    def _fork(self, survivor: Survivor, scheduler: Scheduler, runner: Runner[Any]) -> Request:
        parent = self.live[survivor.parent]
        child = self._make_request(
            [*parent.tokens, survivor.token], [*parent.logprobs, survivor.logprob]
        )
        scheduler.fork(parent, child)
        runner.fork(parent, child)
        return child
