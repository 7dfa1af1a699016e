"""The next token of every row, each with its own options and random stream."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.constraint import Constraint, Row
from mlx_paged.ops.cpu_layers import log_softmax
from mlx_paged.request import Request
from mlx_paged.sampling.columns import (
    XTC,
    DrawnRows,
    SamplingRows,
    TopFilters,
    tokens_between,
)
from mlx_paged.sampling.penalties import (
    NOTHING_BEYOND,
    Beyond,
    Penalties,
    TokenHistory,
    biased,
    checked_array,
    processed,
    row_by_row,
)

XTC_STREAM = 0xA0761D6478BD642F
"""Draw n of the stream of ``seed ^ XTC_STREAM`` decides whether XTC acts on the n-th token."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)

TopLogprobs = tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)  # not frozen, which would triple the time to make one
class Sampled:
    """The token chosen for each row, not evaluated yet.

    Log-probabilities include bias, penalties, processors and constraints, but neither filters nor
    temperature.
    """

    tokens: mx.array  # [R] int32
    logprobs: mx.array  # of the tokens, [R] float32
    distributions: mx.array  # of all tokens [R, vocab], in the type of the logits
    # The most likely tokens [R, K] int32, best first. K is the largest number that a row asks for;
    # a row that asks for none holds zeros. None if no row asks.
    top_tokens: mx.array | None = None
    top_logprobs: mx.array | None = None  # of `top_tokens`, float32; -inf where these are zeros
    # [R] integers: what was chosen, if some of it may be no id; `tokens` then has another id there.
    chosen: mx.array | None = None
    # By row, why it has no token; its entry of `tokens` is then meaningless.
    errors: dict[int, Exception] = field(default_factory=dict)

    def below(self, limit: int) -> "Sampled":
        """This result with token ids below `limit`."""
        chosen = self.tokens if self.chosen is None else self.chosen
        return replace(self, tokens=mx.minimum(self.tokens, limit - 1), chosen=chosen)


@dataclass(frozen=True, eq=False)
class PendingTokens:
    """Tokens that a running step is choosing: one for each of `requests`, ``[R]`` int32."""

    requests: list[Request]
    tokens: mx.array

    @cached_property
    def row_of(self) -> dict[int, int]:
        """The index of each request's token, by request id."""
        return {request.id: row for row, request in enumerate(self.requests)}


class Scores(NamedTuple):
    """What logits ``[R, vocab]`` say without any option; a compiled graph may have it already."""

    logits: mx.array
    distributions: mx.array  # as of `Sampled`
    tokens: mx.array  # the most likely ones, [R] int32
    totals: mx.array  # logarithms of the sums of exp(logits), [R, 1] float32

    @classmethod
    def of(cls, logits: mx.array, allowed: mx.array | None = None) -> "Scores":
        """The scores of logits.

        Args:
            allowed: the tokens that may follow, a bit each: words ``[R, ceil(vocab / 32)]`` uint32.
                None: all tokens.
        """
        return cls(logits, *log_softmax(logits, allowed))


Lengths = npt.NDArray[np.int32]
SamplerArguments = tuple[mx.array, list[Request], mx.array, Lengths, Scores | None, Beyond]
"""The arguments of a :class:`Sampler`, in their order."""


class Sampler:
    """Chooses tokens as mlx-lm does, for all rows at once.

    Between steps it keeps what depends only on the batch's composition.
    """

    def __init__(self) -> None:
        self._compose((), 0)

    def __call__(
        self,
        logits: mx.array,
        requests: Sequence[Request],
        newest: mx.array,
        lengths: Lengths | None = None,
        scores: Scores | None = None,
        beyond: Beyond = NOTHING_BEYOND,
    ) -> Sampled | None:
        """Choose a token for each row, evaluating nothing.

        Returns None if a row has a constraint and the request's newest token is not known yet: its
        mask depends on that token. The same call succeeds later.

        Args:
            logits: ``[R, vocab]``.
            requests: one for each row. A request may have several rows, one after the other.
            newest: the last token ``[R]`` int32 of each request. A token in flight is not in
                ``request.tokens`` yet.
            lengths: ``num_tokens`` ``[R]`` of each request; None: read from the requests.
            scores: of these logits, or of others; None: not computed yet.
            beyond: by request id, the tokens after its own that its further rows follow. The
                request may never get them.
        """
        assert len(requests) == len(logits) == len(newest), "one row for each request"
        known, vocab = self._rows, logits.shape[-1]
        changed = known.vocab != vocab or known.requests != list(requests)
        # Beyond the requests' own, what is kept of the latest tokens may be wrong ones.
        if changed or beyond or self._beyond:
            self._compose(requests, vocab, beyond)
        rows = self._rows
        if lengths is None:
            lengths = np.array([request.num_tokens for request in requests], np.int32)
        errors = dict(rows.errors)
        allowed: mx.array | None = None
        samplers = rows.samplers
        constrained: list[Row[Constraint]] = []
        for i, num_beyond in rows.constrained:
            if not requests[i].finish_reason:  # it may have ended after the step was launched
                row = _row(requests[i], i, int(lengths[i]), num_beyond, beyond)
                if row.length > len(row.tokens):
                    return None
                constrained.append(row)
        logits = self._processed(logits, newest, lengths, errors)
        if constrained:
            words = _allowed(constrained, len(logits), vocab, errors)
            allowed = mx.array(words)
            samplers = {row: each for row, each in samplers.items() if not _is_forced(words[row])}
        if allowed is not None or scores is None or scores.logits is not logits:
            scores = Scores.of(logits, allowed)
        _, logprobs, tokens, totals = scores
        if rows.drawn is not None:
            tokens = _choose(tokens, logprobs, rows.drawn, lengths)
        chosen: mx.array | None = None
        if samplers:
            chosen = _choose_by_callers(tokens, logprobs, samplers, errors)
            tokens = mx.clip(chosen, 0, vocab - 1).astype(mx.int32)
        # Reported log-probabilities are computed in float32. The choice of a token has the
        # precision of the logits, as in mlx-lm.
        own = mx.take_along_axis(logits, tokens[:, None], axis=-1).astype(mx.float32) - totals
        tops: tuple[mx.array, mx.array] | tuple[None, None] = (None, None)
        if rows.reported is not None:
            shape = (len(logprobs), rows.num_reported)
            row_logits, row_totals, row_logprobs = (
                rows.reported.take(each) for each in (logits, totals, logprobs)
            )
            exact = row_logits.astype(mx.float32) - row_totals
            exact = mx.where(row_logprobs > -mx.inf, exact, -mx.inf)
            top_tokens, top_logprobs = most_likely(exact, rows.num_reported)
            tops = (
                rows.reported.put(mx.zeros(shape, mx.int32), top_tokens),
                rows.reported.put(mx.full(shape, -mx.inf), top_logprobs),
            )
        return Sampled(tokens, own[:, 0], logprobs, tops[0], tops[1], chosen, errors)

    def _compose(
        self, requests: Sequence[Request], vocab: int, beyond: Beyond = NOTHING_BEYOND
    ) -> None:
        rows = self._rows = SamplingRows(requests, vocab)
        self._beyond = beyond
        self._penalties = Penalties(requests, rows.penalised, beyond) if rows.penalised else None
        self._histories = {row: TokenHistory(requests[row], beyond) for row in rows.processed}

    def _processed(
        self,
        logits: mx.array,
        newest: mx.array,
        lengths: npt.NDArray[np.int32],
        errors: dict[int, Exception],
    ) -> mx.array:
        if self._rows.biases is not None:
            logits = biased(logits, *self._rows.biases)
        if self._penalties is not None:
            logits = self._penalties(logits, newest, lengths)
        if not self._histories:
            return logits

        def process(row: slice, history: TokenHistory) -> mx.array:
            return processed(history, logits[row], newest[row], int(lengths[row.start]))

        return row_by_row(logits, self._histories, process, errors)


def _row(
    request: Request, index: int, length: int, num_beyond: int, beyond: Beyond
) -> Row[Constraint]:
    """The row at `index`, which follows `num_beyond` tokens beyond the request's own."""
    assert request.constraint is not None
    tokens = request.tokens
    if request.id in beyond:
        tokens = tokens_between(request, beyond, 0, length)
    return Row(index, request.constraint, tokens, length, num_beyond > 0)


def masks_of(
    rows: Sequence[Row[Any]], vocab: int
) -> tuple[npt.NDArray[np.uint32], dict[int, Exception]]:
    """The tokens that the constraints of some rows allow, as :meth:`Constraint.masks` has them.
    Each class of constraints is asked once."""
    kinds: dict[type[Any], list[int]] = {}
    for index, row in enumerate(rows):
        kinds.setdefault(type(row.constraint), []).append(index)
    if len(kinds) == 1:
        [kind] = kinds
        found: tuple[npt.NDArray[np.uint32], dict[int, Exception]] = kind.masks(rows, vocab)
        return found
    bits, errors = np.zeros((len(rows), -(-vocab // 32)), np.uint32), dict[int, Exception]()
    for kind, indices in kinds.items():
        bits[indices], wrong = kind.masks([rows[i] for i in indices], vocab)
        errors |= wrong
    return bits, errors


def _allowed(
    rows: Sequence[Row[Constraint]], count: int, vocab: int, errors: dict[int, Exception]
) -> npt.NDArray[np.uint32]:
    """What the constraints of `rows` leave of `count` rows, a bit for each token ``[count,
    ceil(vocab / 32)]`` uint32."""
    bits, wrong = masks_of(rows, vocab)
    errors |= wrong
    if len(rows) < count:
        of_rows, bits = bits, ~np.zeros((count, bits.shape[1]), np.uint32)
        bits[[row.row for row in rows]] = of_rows
    return bits


def _is_forced(words: npt.NDArray[np.uint32]) -> bool:
    """Whether one bit of these words is set: one token may follow."""
    found = words[np.flatnonzero(words)]
    return len(found) == 1 and int(found[0]).bit_count() == 1


def uniform(seeds: npt.ArrayLike, indices: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Draw number `index` of the random stream of `seed`, for each pair: ``[R]`` in [0, 1).

    SplitMix64 (Steele et al. 2014, section 5). Its n-th number needs no state, so a request draws
    the same numbers whatever its batch, its chunks and its preemptions are.
    """
    state = _mix64(np.asarray(seeds, np.uint64)) + np.asarray(indices, np.uint64) * _GAMMA
    return ((_mix64(state) >> np.uint64(41)).astype(np.float32)) * np.float32(2.0**-23)


def _mix64(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = z + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _choose(
    likeliest: mx.array, logprobs: mx.array, drawn: DrawnRows, lengths: npt.NDArray[np.int32]
) -> mx.array:
    """Tokens ``[R]`` int32: the most likely one, or a drawn one."""
    # Computed from the lengths: a request draws the same number if the step is run again.
    indices = (lengths[drawn.subset.rows] - drawn.num_prompt).astype(np.uint64)
    tokens = _draw(drawn.subset.take(logprobs).astype(mx.float32), drawn, indices)
    return drawn.subset.put(likeliest, tokens)


def _choose_by_callers(
    tokens: mx.array,
    logprobs: mx.array,
    samplers: Mapping[int, Callable[..., object]],
    errors: dict[int, Exception],
) -> mx.array:
    """`tokens` ``[R]``, as int64, with the choices of callers' samplers. These are not known yet
    and may be no ids. A row that already has an error keeps its token."""

    def choose(row: slice, sampler: Callable[..., object]) -> mx.array:
        chosen = checked_array("sampler", sampler(logprobs[row]), mx.integer, (1,))
        return chosen.astype(mx.int64)  # the largest uint64 become negative

    left = {row: sampler for row, sampler in samplers.items() if row not in errors}
    return row_by_row(tokens.astype(mx.int64), left, choose, errors)


def _draw(logprobs: mx.array, drawn: DrawnRows, indices: npt.NDArray[np.uint64]) -> mx.array:
    """Inverse transform sampling: the first token whose cumulated probability exceeds a draw.
    `indices` ``[N]`` is the number of the draw in each row's stream."""
    kept = _filtered(logprobs, drawn, indices)
    scaled = (kept - kept.max(axis=-1, keepdims=True)) / drawn.temperature
    cumulated = mx.cumsum(mx.exp(scaled), axis=-1)
    draws = mx.array(uniform(drawn.seeds, indices)[:, None])
    passed = cumulated > draws * cumulated[:, -1:]
    return mx.argmax(passed & (kept > -mx.inf), axis=-1).astype(mx.int32)


def _filtered(logprobs: mx.array, drawn: DrawnRows, indices: npt.NDArray[np.uint64]) -> mx.array:
    """`logprobs` with -inf where a row's top-p, min-p, XTC or top-k drops the token.

    The filters use probabilities at temperature 1. A token must pass all of them.
    """
    kept = logprobs if drawn.tops is None else _top_filtered(logprobs, drawn.tops)
    if drawn.log_min_p is not None:
        floor = logprobs.max(axis=-1, keepdims=True) + drawn.log_min_p
        kept = mx.where(logprobs < floor, -mx.inf, kept)
    if drawn.xtc is not None:
        kept = _xtc_filtered(kept, drawn.xtc, drawn.seeds, indices)
    return kept


def _top_filtered(logprobs: mx.array, tops: TopFilters) -> mx.array:
    """`logprobs` with -inf where a row's top-p or top-k drops the token."""
    before = tops.subset.take(logprobs)
    descending = mx.sort(before, axis=-1)[:, ::-1]
    probs = mx.exp(descending)
    mass_before = mx.cumsum(probs, axis=-1) - probs
    nucleus = mass_before < tops.top_p * probs.sum(axis=-1, keepdims=True)
    in_nucleus = nucleus.sum(axis=-1, keepdims=True)
    last = mx.maximum(mx.minimum(in_nucleus, tops.top_k), 1) - 1
    floor = mx.take_along_axis(descending, last, axis=-1)
    return tops.subset.put(logprobs, mx.where(before < floor, -mx.inf, before))


def _xtc_filtered(
    kept: mx.array,
    xtc: XTC,
    seeds: npt.NDArray[np.uint64],
    indices: npt.NDArray[np.uint64],
) -> mx.array:
    """`kept` after XTC and the top-k of its rows. Where XTC acts, it drops all tokens above the
    threshold but the least likely of them."""
    rows = xtc.subset.rows
    draws = uniform(seeds[rows] ^ np.uint64(XTC_STREAM), indices[rows])
    acts = mx.array((draws < xtc.probability)[:, None])
    before = xtc.subset.take(kept)
    probs = mx.softmax(before, axis=-1)
    likely = mx.where(probs > xtc.threshold, probs, mx.inf)
    dropped = (probs > likely.min(axis=-1, keepdims=True)) & acts
    if xtc.special is not None:
        dropped[xtc.special] = False
    after = xtc.subset.put(kept, mx.where(dropped, -mx.inf, before))
    return after if xtc.tops is None else _top_filtered(after, xtc.tops)


def most_likely(logprobs: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Tokens ``[R, count]`` int32 and log-probabilities float32, most likely first; equally likely
    tokens are ordered by id."""
    tokens = mx.argpartition(-logprobs, count - 1, axis=-1)[:, :count]
    tokens = mx.sort(tokens, axis=-1)
    values = mx.take_along_axis(logprobs, tokens, axis=-1)
    order = mx.argsort(-values, axis=-1)
    tokens, values = (mx.take_along_axis(array, order, axis=-1) for array in (tokens, values))
    return tokens.astype(mx.int32), values.astype(mx.float32)


def outside_rows(sampled: Sampled, tokens: Sequence[int]) -> dict[int, Exception]:
    """Errors of rows whose choice is no token that the model can read."""
    if sampled.chosen is None:
        return {}
    columns, errors = sampled.distributions.shape[-1], dict[int, Exception]()
    each: list[int] = sampled.chosen.tolist()  # type: ignore[assignment]
    for row, chosen in enumerate(each):
        if not 0 <= chosen < columns:
            reason = f"sampler returned token {chosen}: expected ids in [0, {columns})"
            errors[row] = ValueError(f"[SamplingParams] {reason}")
        elif chosen != tokens[row]:
            errors[row] = ValueError(f"the embedding does not have the chosen token {chosen}")
    return errors


def on_host(sampled: Sampled) -> tuple[list[int], list[float], list[TopLogprobs]]:
    """Every row's token, its log-probability and the most likely tokens."""
    tokens: list[int] = sampled.tokens.tolist()  # type: ignore[assignment]
    logprobs: list[float] = sampled.logprobs.tolist()  # type: ignore[assignment]
    if sampled.top_tokens is None or sampled.top_logprobs is None:
        return tokens, logprobs, [()] * len(tokens)
    top_tokens: list[list[int]] = sampled.top_tokens.tolist()  # type: ignore[assignment]
    top_logprobs: list[list[float]] = sampled.top_logprobs.tolist()  # type: ignore[assignment]
    rows = zip(top_tokens, top_logprobs, strict=True)
    return tokens, logprobs, [tuple(zip(*row, strict=True)) for row in rows]
