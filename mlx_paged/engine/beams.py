"""Which hypotheses of a beam search live on, and which are the answer. Knows no mlx."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mlx_paged.outputs import Beam
from mlx_paged.request import FinishReason, Request
from mlx_paged.sampling_params import is_real
from mlx_paged.scheduler.runner_protocol import Runner, SampledToken
from mlx_paged.scheduler.scheduler import Scheduler


class Hypothesis(Protocol):
    """What is used of a live hypothesis; a `Request` is one."""

    @property
    def generated(self) -> Sequence[int]:
        """Its tokens so far, without the prompt."""

    @property
    def logprobs(self) -> Sequence[float]:
        """The logprob of each of them."""


class Candidates(NamedTuple):
    """The likeliest next tokens of H live hypotheses, K of each, in any order.

    Logprobs are of the whole vocabulary's distribution; one that is not finite is no
    candidate.
    """

    tokens: npt.ArrayLike  # [H, K] int
    logprobs: npt.ArrayLike  # [H, K] float


class Survivor(NamedTuple):
    """A live hypothesis after a step: one from before it and the token that continues it."""

    parent: int  # index among the hypotheses given to `advance`
    token: int
    logprob: float  # of that token


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """A finished hypothesis. A stop token that ended it is its last token."""

    tokens: list[int]
    logprobs: list[float]  # one per token
    sum_logprob: float
    score: float  # sum_logprob / len(tokens) ** length_penalty
    finish_reason: FinishReason  # STOP or LENGTH


class BeamGroup:
    """The beam search of one prompt.

    In each step the candidates of all live hypotheses are pooled and ranked by summed logprob; of
    equal ones the earlier hypothesis comes first, then the earlier candidate. A stop token among
    the best `num_beams` finishes its hypothesis, one further down is dropped. The best `num_beams`
    others live on. Finished hypotheses are ranked by ``sum_logprob / length ** length_penalty``,
    where the length counts the stop token; of equal ones the one that finished first comes first.

    Args:
        num_beams: hypotheses alive at most, and finished ones kept.
        max_tokens: generated tokens at which live hypotheses finish, too.
        length_penalty: above 0 favours long hypotheses, below 0 short ones.
        early_stopping: end as soon as `num_beams` hypotheses have finished; otherwise as soon as
            no live one can be among the best `num_return`, so that stopping changes no answer.
        stop_token_ids: tokens that finish a hypothesis.
        num_return: how many hypotheses will be asked for at most; None for `num_beams`.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        num_beams: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        stop_token_ids: Collection[int] = frozenset(),
        num_return: int | None = None,
    ) -> None:
        for name, value in (("num_beams", num_beams), ("max_tokens", max_tokens)):
            if value < 1:
                raise ValueError(f"[BeamGroup] {name} is {value}: expected >= 1")
        if num_return is not None and not 1 <= num_return <= num_beams:
            raise ValueError(
                f"[BeamGroup] num_return is {num_return}: expected 1 to num_beams = {num_beams}"
            )
        # Beyond, max_tokens ** length_penalty leaves the range of floats.
        largest = 1000 / max(1.0, math.log2(max_tokens))
        if not is_real(length_penalty) or not abs(length_penalty) <= largest:
            raise ValueError(
                f"[BeamGroup] length_penalty is {length_penalty}: "
                f"expected {-largest:g} to {largest:g} for max_tokens {max_tokens}"
            )
        self.num_beams = num_beams
        self.max_tokens = max_tokens
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.stop_token_ids = frozenset(stop_token_ids)
        self.num_return = num_beams if num_return is None else num_return
        self.done = False
        self._length = 0  # tokens of every live hypothesis
        self._sums = [0.0]  # summed logprobs of the live hypotheses, best first
        self._finished: list[BeamHypothesis] = []  # best first, at most num_beams

    @property
    def num_candidates(self) -> int:
        """Candidates that each hypothesis should bring, where the vocabulary has so many: enough
        for `num_beams` to live on even if each hypothesis brings every stop token."""
        return self.num_beams * max(2, 1 + len(self.stop_token_ids))

    def advance(self, hypotheses: Sequence[Hypothesis], candidates: Candidates) -> list[Survivor]:
        """One step of the search.

        Args:
            hypotheses: the H live ones: in the first step the prompt alone, nothing generated yet,
                later the survivors of the last step in their order, their tokens appended.
            candidates: of each of them in turn.

        Returns:
            The hypotheses that live on, best first; parents not among them are to be dropped. Empty
            once the search is done.

        Raises:
            ValueError: the search is done, or the arguments do not fit each other.
        """
        tokens, logprobs = self._checked(hypotheses, candidates)
        sums = np.array(self._sums)[:, None] + logprobs
        self._length += 1
        survivors: list[Survivor] = []
        self._sums = []
        finished: list[BeamHypothesis] = []
        for rank, (parent, column) in enumerate(_best_first(sums)):
            if len(survivors) == self.num_beams:
                break
            last = Survivor(parent, int(tokens[parent, column]), float(logprobs[parent, column]))
            total = float(sums[parent, column])
            if last.token not in self.stop_token_ids:
                survivors.append(last)
                self._sums.append(total)
            elif rank < self.num_beams:
                finished.append(self._finish(hypotheses[parent], last, total, FinishReason.STOP))
        self._keep(finished)
        self.done = not survivors or self._is_settled()
        if not self.done and self._length == self.max_tokens:
            self._keep(
                self._finish(hypotheses[last.parent], last, total, FinishReason.LENGTH)
                for last, total in zip(survivors, self._sums, strict=True)
            )
            self.done = True
        return [] if self.done else survivors

    def best(self, n: int | None = None) -> list[BeamHypothesis]:
        """The `n` best of the hypotheses that have finished, best first, or all if they are fewer.

        Args:
            n: 1 to `num_return`, the default.

        Raises:
            ValueError: n is out of range.
        """
        n = self.num_return if n is None else n
        if not 1 <= n <= self.num_return:
            raise ValueError(f"[BeamGroup] n is {n}: expected 1 to num_return = {self.num_return}")
        return self._finished[:n]

    def _checked(
        self, hypotheses: Sequence[Hypothesis], candidates: Candidates
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Tokens and logprobs of the candidates, both [H, K]."""
        if self.done:
            raise ValueError("[BeamGroup] the search is done: expected no further step")
        lengths = [len(hypothesis.logprobs) for hypothesis in hypotheses]
        if lengths != [self._length] * len(self._sums):
            raise ValueError(
                f"[BeamGroup] hypotheses have {lengths} tokens: "
                f"expected {len(self._sums)} hypotheses of {self._length}"
            )
        tokens = np.asarray(candidates.tokens)
        logprobs = np.asarray(candidates.logprobs, np.float64)
        if tokens.ndim != 2 or tokens.shape != logprobs.shape or len(tokens) != len(hypotheses):
            raise ValueError(
                f"[BeamGroup] candidates have tokens {tokens.shape} and logprobs "
                f"{logprobs.shape}: expected [{len(hypotheses)}, K] for both"
            )
        # A logprob above 0 is a rounding error, and the search relies on sums that only fall.
        return tokens, np.minimum(logprobs, 0.0)

    def _finish(
        self, parent: Hypothesis, last: Survivor, sum_logprob: float, reason: FinishReason
    ) -> BeamHypothesis:
        return BeamHypothesis(
            tokens=[*parent.generated, last.token],
            logprobs=[*parent.logprobs, last.logprob],
            sum_logprob=sum_logprob,
            score=self._score(sum_logprob, self._length),
            finish_reason=reason,
        )

    def _keep(self, finished: Iterable[BeamHypothesis]) -> None:
        ranked = sorted([*self._finished, *finished], key=lambda h: h.score, reverse=True)
        self._finished = ranked[: self.num_beams]

    def _score(self, sum_logprob: float, length: int) -> float:
        return sum_logprob / math.pow(length, self.length_penalty)

    def _is_settled(self) -> bool:
        """Whether live hypotheses, one at least, can no longer change the answer.

        Sums only fall, so one that finishes later, or now at `max_tokens`, has a sum <= S, the best
        live one, and S <= 0. Its length n is from ``length + 1`` to `max_tokens`. Its score is thus
        at most S / n ** length_penalty for the n that makes the divisor largest: the longest if
        length_penalty >= 0, else the shortest. A hypothesis that goes on with probability 1 attains
        that, so no smaller bound is safe.
        """
        if self.early_stopping:
            return len(self._finished) == self.num_beams
        if len(self._finished) < self.num_return:
            return False
        shortest = min(self._length + 1, self.max_tokens)
        length = self.max_tokens if self.length_penalty >= 0 else shortest
        return self._score(self._sums[0], length) <= self._finished[self.num_return - 1].score


def _best_first(totals: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    """Row and column of every finite entry of `totals` [H, K], largest first, ties as they lie."""
    order = np.argsort(-totals, axis=None, kind="stable")
    order = order[np.isfinite(totals.ravel()[order])]
    rows, columns = np.unravel_index(order, totals.shape)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


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

    def offer(self, choice: SampledToken) -> bool:
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
                scheduler.unpark(request)
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
