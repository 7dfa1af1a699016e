"""Beam search: its calls, the hypotheses that live on, their requests. Knows no mlx."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlx_paged.arguments import integer, is_real, require, require_flags
from mlx_paged.engine.one_thread import Occupancy, exclusive
from mlx_paged.engine.request_maker import Queueing, RequestMaker, check_queueing, checked_params
from mlx_paged.engine.text import OutputProcessor, PromptEncoder, PromptLike
from mlx_paged.engine.token_ids import TokenIds
from mlx_paged.engine.waiting_calls import OnOutput
from mlx_paged.outputs import Beam, Completion
from mlx_paged.request import FinishReason, Request
from mlx_paged.sampling_params import SamplingParams, chosen_by_caller
from mlx_paged.scheduler.progress import append_token
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import SampledToken


class Survivor(NamedTuple):
    """A live hypothesis after a step: its parent from before the step and one more token."""

    parent: int  # index among the hypotheses given to `advance`
    token: int
    logprob: float  # of that token


class BeamGroup:
    """Ranks the hypotheses of one beam search.

    Each step ranks the candidates of all live hypotheses together, by summed log-probability. Among
    equal sums the earlier hypothesis comes first, then the earlier candidate. A stop token among
    the best `num_beams` candidates finishes its hypothesis; a stop token below them is dropped. The
    best `num_beams` other candidates live on. Finished hypotheses are ranked by
    ``sum_logprob / length ** length_penalty``, where the length counts the stop token. Among equal
    scores the hypothesis that finished first comes first.
    """

    def __init__(
        self,
        num_beams: int,  # the largest number of live hypotheses, and of finished ones that are kept
        max_tokens: int,  # live hypotheses finish, too, when they have generated so many tokens
        length_penalty: float = 1.0,  # above 0 favours long hypotheses, below 0 short ones
        # End as soon as `num_beams` hypotheses have finished. Otherwise the search ends as soon as
        # no live hypothesis can be among the best: then stopping changes no answer.
        early_stopping: bool = False,
        # Tokens that finish a hypothesis. Such a token is its last one.
        stop_token_ids: Collection[int] = frozenset(),
    ) -> None:
        self.num_beams = num_beams
        self.max_tokens = max_tokens
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.stop_token_ids = frozenset(stop_token_ids)
        self.done = False
        self._length = 0  # tokens of every live hypothesis
        self._sums = [0.0]  # summed logprobs of the live hypotheses, best first
        self.best: list[Beam] = []  # finished, best first, at most num_beams; no texts

    @property
    def num_candidates(self) -> int:
        """How many candidates each hypothesis needs, if the vocabulary has so many: then
        `num_beams` live on even if every stop token is a candidate of each hypothesis."""
        return self.num_beams * max(2, 1 + len(self.stop_token_ids))

    def advance(
        self, hypotheses: Sequence[Request], tokens: npt.ArrayLike, logprobs: npt.ArrayLike
    ) -> list[Survivor]:
        """Advance the search by one step. Returns the hypotheses that live on, best first; an empty
        list if the search is done. The caller drops each parent of which no survivor is left.

        Args:
            hypotheses: H live ones: first the prompt alone, later the survivors of the last step in
                their order, with their tokens appended.
            tokens: ``[H, K]``, the likeliest next tokens of each hypothesis, in any order.
            logprobs: ``[H, K]``, theirs in the whole vocabulary. A token whose number is not finite
                is no candidate.
        """
        assert not self.done, "a step after the end of the search"
        lengths = [len(hypothesis.logprobs) for hypothesis in hypotheses]
        assert lengths == [self._length] * len(self._sums), "not the survivors of the last step"
        tokens = np.asarray(tokens)
        # A logprob above 0 is a rounding error, and the search relies on sums that only fall.
        logprobs = np.minimum(np.asarray(logprobs, np.float64), 0.0)
        assert tokens.shape == logprobs.shape == (len(hypotheses), tokens.shape[-1])
        sums = np.array(self._sums)[:, None] + logprobs
        self._length += 1
        survivors: list[Survivor] = []
        self._sums = []
        finished: list[Beam] = []
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

    def _finish(
        self, parent: Request, last: Survivor, sum_logprob: float, reason: FinishReason
    ) -> Beam:
        tokens, logprobs = [*parent.generated, last.token], [*parent.logprobs, last.logprob]
        return Beam(tokens, "", logprobs, self._score(sum_logprob, self._length), reason)

    def _keep(self, finished: Iterable[Beam]) -> None:
        ranked = sorted([*self.best, *finished], key=lambda h: h.score, reverse=True)
        self.best = ranked[: self.num_beams]

    def _score(self, sum_logprob: float, length: int) -> float:
        return sum_logprob / math.pow(length, self.length_penalty)

    def _is_settled(self) -> bool:
        """Whether no live hypothesis can change the answer any more; there is at least one.

        S <= 0 is the largest sum of the live hypotheses. Sums only fall, so a hypothesis that
        finishes later, or now at `max_tokens`, has a sum <= S. Its length n is from ``length + 1``
        to `max_tokens`. So its score is at most S / n ** length_penalty for the n with the largest
        divisor: the largest n if length_penalty >= 0, else the smallest. A hypothesis that
        continues with probability 1 reaches this bound, so no smaller bound is safe.
        """
        if len(self.best) < self.num_beams:
            return False
        if self.early_stopping:
            return True
        shortest = min(self._length + 1, self.max_tokens)
        length = self.max_tokens if self.length_penalty >= 0 else shortest
        return self._score(self._sums[0], length) <= self.best[-1].score


def _best_first(totals: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    """Row and column of every finite entry of `totals` [H, K], largest first, ties as they lie."""
    order = np.argsort(-totals, axis=None, kind="stable")
    order = order[np.isfinite(totals.ravel()[order])]
    rows, columns = np.unravel_index(order, totals.shape)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


class BeamSearch:
    """The requests of one beam search, each of them a live hypothesis.

    They advance together: a hypothesis that has its candidates is parked until all others have
    theirs. The first survivor of a hypothesis is the same request, the others are forks of it. So
    hypotheses share the blocks of the tokens that they have in common.
    """

    def __init__(
        self,
        root: Request,  # the prompt; its id is the search's
        group: BeamGroup,  # decides which hypotheses survive
        # Searches under way by the request id of each hypothesis; takes this one.
        searches: "dict[int, BeamSearch]",
        # Makes a request of tokens, params, a seed and how it waits.
        make_request: Callable[..., Request],
        vocab_size: int | None,  # tokens that can be candidates; None: unknown
    ) -> None:
        num_candidates = min(group.num_candidates, vocab_size or group.num_candidates)
        root.params = chosen_by_caller(root.params, num_candidates)
        self.root = root
        self.group = group
        self._live = [root]
        self._searches = searches
        searches[root.id] = self
        self._make_request = make_request
        self._candidates: dict[int, tuple[tuple[int, float], ...]] = {}  # by request id

    @property
    def finish_reason(self) -> FinishReason:
        """Why the best hypothesis ended; STOP if no continuation is possible at all."""
        best = self.group.best
        return best[0].finish_reason if best else FinishReason.STOP

    def append(self, choice: SampledToken, scheduler: Scheduler) -> None:
        """Take the candidates of one hypothesis; advance when all hypotheses have theirs."""
        scheduler.park(choice.request)
        self._candidates[choice.request.id] = choice.top[: self.root.params.logprobs]
        if len(self._candidates) == len(self._live):
            self._advance(scheduler)

    def end(self, scheduler: Scheduler) -> None:
        """Drop all hypotheses."""
        for request_id in [i for i, search in self._searches.items() if search is self]:
            del self._searches[request_id]
        for request in self._live:
            _drop(request, scheduler)

    def result(self, completion: Completion, text_of: Callable[[list[int]], str]) -> Completion:
        """The completion of the root with all finished hypotheses, best first, and with the tokens
        of the best one."""
        beams = tuple(replace(beam, text=text_of(beam.tokens)) for beam in self.group.best)
        best = beams[:1]
        return replace(
            completion,
            beams=beams,
            tokens=best[0].tokens if best else [],
            logprobs=best[0].logprobs if best else [],
            text=best[0].text if best else "",
        )

    def _advance(self, scheduler: Scheduler) -> None:
        """Let the best hypotheses live on, fork those with several survivors, drop the rest."""
        found = [self._candidates[request.id] for request in self._live]
        self._candidates.clear()
        tokens = [[token for token, _ in row] for row in found]
        logprobs = [[logprob for _, logprob in row] for row in found]
        survivors = self.group.advance(self._live, tokens, logprobs)
        first: dict[int, Survivor] = {}  # by parent: the survivor that stays the same request
        for survivor in survivors:
            first.setdefault(survivor.parent, survivor)
        live = [
            self._live[s.parent] if first[s.parent] is s else self._fork(s, scheduler)
            for s in survivors
        ]
        for index, request in enumerate(self._live):
            if index in first:
                append_token(SampledToken(request, first[index].token, first[index].logprob))
                scheduler.unpark(request)
            else:
                _drop(request, scheduler)
        self._live = live

    def _fork(self, survivor: Survivor, scheduler: Scheduler) -> Request:
        parent, root = self._live[survivor.parent], self.root
        tokens = [*parent.tokens, survivor.token]
        logprobs = [*parent.logprobs, survivor.logprob]
        child = self._make_request(
            root.prompt_of(tokens),
            root.params,
            0,
            Queueing.of(root),
            logprobs=logprobs,
            like=root,
            constraint=parent.constraint and parent.constraint.copy(parent.tokens),
        )
        self._searches[child.id] = self
        scheduler.fork(parent, child)
        return child


def _drop(request: Request, scheduler: Scheduler) -> None:
    """Give up a hypothesis: no prompt continues it."""
    scheduler.complete(request, is_continued=False)


def _check(
    params: SamplingParams,
    num_beams: int,
    length_penalty: float,
    early_stopping: bool,
    max_beams: int,
) -> None:
    """ValueError unless a beam search can be done with these arguments."""
    caller = "beam_search"
    if params.temperature > 0 or params.stop or params.sampler is not None:
        raise ValueError(
            f"[{caller}] temperature, stop or sampler is given: expected temperature 0, no stop and"
            " no sampler"
        )
    wanted = params.prompt_logprobs
    require(wanted is None, caller, "prompt_logprobs", wanted, "None in a beam search")
    integer(caller, "num_beams", num_beams, 1, max_beams)
    # A larger penalty makes max_tokens ** length_penalty leave the range of floats.
    limit = 1000 / max(1.0, math.log2(params.max_tokens))
    is_finite = is_real(length_penalty) and abs(length_penalty) <= limit
    expected = f"{-limit:g} to {limit:g} for max_tokens {params.max_tokens}"
    require(is_finite, caller, "length_penalty", length_penalty, expected)
    require_flags(caller, early_stopping=early_stopping)


class BeamCalls:
    """Beam searches among the requests of an engine: a part of :class:`EngineCore`."""

    scheduler: Scheduler
    occupancy: Occupancy
    token_ids: TokenIds
    _encode: PromptEncoder
    _outputs: OutputProcessor
    _make_request: RequestMaker
    _beams: dict[int, BeamSearch]
    _admit: Callable[[Sequence[Request], Callable[[], None]], None]
    _complete: Callable[[Iterator[list[int]], OnOutput | None], list[Completion]]

    @exclusive
    def add_beam_search(
        self,
        prompt: PromptLike,
        num_beams: int,
        params: SamplingParams | None = None,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        priority: int | str = 0,
        cache_salt: str = "",
        share: Sequence[str] = (),
        **options: Any,
    ) -> int:
        """Queue a beam search. Its one output has a completion with all hypotheses as `beams`.

        Args:
            num_beams: live hypotheses, and returned ones; at most the size of the vocabulary.
            length_penalty: above 0 favours long hypotheses, below 0 short ones.
            early_stopping: end with the first `num_beams` finished hypotheses, the best or not.

        Raises:
            ValueError: as :meth:`add_request`, or an option that a beam search cannot use.
        """
        queueing = check_queueing(
            "beam_search", priority=priority, cache_salt=cache_salt, share=share
        )
        params = checked_params("beam_search", params, options, self._encode, prompt)
        # Each live hypothesis writes into a block of its own.
        vocab_size = self.token_ids.columns
        max_beams = vocab_size or self.scheduler.num_blocks
        _check(params, num_beams, length_penalty, early_stopping, max_beams)
        root = self._make_request(self._encode(prompt), params, 0, queueing)
        stop = self._outputs.stop_token_ids(root)
        group = BeamGroup(num_beams, params.max_tokens, length_penalty, early_stopping, stop)
        BeamSearch(root, group, self._beams, self._make_request, vocab_size)
        self._admit([root], lambda: self.scheduler.add(root))
        return root.id

    @exclusive
    def beam_search(
        self,
        prompt: PromptLike,
        num_beams: int,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Completion:
        """The best continuation that a beam search finds; ``.beams`` has all of them.

        Arguments and errors are those of :meth:`add_beam_search`.
        """
        ids = ([self.add_beam_search(prompt, num_beams, params, **options)] for _ in range(1))
        return self._complete(ids, None)[0]
