"""The next token of every row, each with its own options and random stream."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.ops.cpu_layers import log_sum_exp
from mlx_paged.request import Request
from mlx_paged.sampling.columns import XTC, DrawnRows, RankFilters, SamplingRows, Subset
from mlx_paged.sampling.penalties import Penalties, Processors, add_biases, described

XTC_STREAM = 0xA0761D6478BD642F
"""Whether XTC acts on a request's n-th token is draw n of the stream of ``seed ^ XTC_STREAM``."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was chosen for each row, not evaluated yet.

    Log-probabilities are those after bias, penalties and processors, before filters and
    temperature.

    Attributes:
        tokens: ``[R]`` int32.
        logprobs: of the tokens, ``[R]`` float32.
        top_tokens: the most likely tokens ``[R, K]`` int32, most likely first. K is the largest
            number that a row asks for; a row that asks for none holds zeros. None if none does.
        top_logprobs: of those tokens, ``[R, K]`` float32; -inf in a row that asks for none.
        errors: by row, why it has no token: what `tokens` holds there means nothing.
        may_be_empty: rows that have no token either if their log-probability is NaN.
        distributions: of all tokens ``[R, vocab]``, in the type of the logits.
    """

    tokens: mx.array
    logprobs: mx.array
    distributions: mx.array
    top_tokens: mx.array | None = None
    top_logprobs: mx.array | None = None
    errors: dict[int, Exception] = field(default_factory=dict)
    may_be_empty: Sequence[int] = ()


class Sampler:
    """Chooses tokens in mlx-lm's way, row by row in meaning and all at once in computation.

    Between steps it keeps what depends on the batch's composition alone.
    """

    def __init__(self) -> None:
        self._compose((), 0)

    def __call__(
        self,
        logits: mx.array,
        requests: Sequence[Request],
        newest: mx.array,
        lengths: npt.NDArray[np.int32] | None = None,
    ) -> Sampled:
        """Choose a token for each row, evaluating nothing.

        Args:
            logits: ``[R, vocab]``.
            requests: the rows', each of them once.
            newest: the last token ``[R]`` int32 of each request. It may still be in flight, and is
                then not among ``request.tokens``.
            lengths: ``num_tokens`` ``[R]`` of each request; None: the requests are asked.
        """
        assert len(requests) == len(logits) == len(newest), "one row for each request"
        if not self._rows.belong_to(requests, logits.shape[-1]):
            self._compose(requests, logits.shape[-1])
        if lengths is None:
            lengths = np.array([request.num_tokens for request in requests], np.int32)
        errors = dict(self._rows.errors)
        logits = self._processed(logits, newest, lengths, errors)
        logprobs = logits - log_sum_exp(logits)
        tokens = _choose(logprobs, self._rows.drawn, lengths)
        if self._rows.samplers:
            tokens = _choose_by_callers(tokens, logprobs, self._rows.samplers, errors)
        chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0].astype(mx.float32)
        top_tokens = top_logprobs = None
        if self._rows.reported is not None:
            top_tokens, top_logprobs = _most_likely(
                logprobs, self._rows.reported, self._rows.num_reported
            )
        may_be_empty = self._rows.may_be_empty
        return Sampled(tokens, chosen, logprobs, top_tokens, top_logprobs, errors, may_be_empty)

    def _compose(self, requests: Sequence[Request], vocab: int) -> None:
        rows = self._rows = SamplingRows.of(requests, vocab)
        self._penalties = Penalties(rows.penalised) if rows.penalised else None
        self._processors = Processors(requests, rows.processed) if rows.processed else None

    def _processed(
        self,
        logits: mx.array,
        newest: mx.array,
        lengths: npt.NDArray[np.int32],
        errors: dict[int, Exception],
    ) -> mx.array:
        if self._rows.biases is not None:
            logits = add_biases(logits, self._rows.biases)
        if self._penalties is not None:
            logits = self._penalties(logits, newest, lengths)
        if self._processors is not None:
            logits = self._processors(logits, newest, errors)
        return logits


def uniform(seeds: npt.ArrayLike, indices: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Draw number `index` of the random stream of `seed`, for each pair: ``[R]`` in [0, 1).

    SplitMix64 (Steele et al. 2014, section 5), whose n-th number needs no state: a request draws
    the same numbers in any batch, chunking or preemption.
    """
    state = _mix64(np.asarray(seeds, np.uint64)) + np.asarray(indices, np.uint64) * _GAMMA
    return ((_mix64(state) >> np.uint64(41)).astype(np.float32)) * np.float32(2.0**-23)


def _mix64(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = z + _GAMMA
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _choose(
    logprobs: mx.array, drawn: DrawnRows | None, lengths: npt.NDArray[np.int32]
) -> mx.array:
    """Tokens ``[R]`` int32: the most likely one, or a drawn one."""
    if drawn is None:
        return mx.argmax(logprobs, axis=-1).astype(mx.int32)
    # Counted from the lengths: a request draws the same number if the step is run again.
    indices = (lengths[drawn.subset.rows] - drawn.num_prompt).astype(np.uint64)
    tokens = _draw(drawn.subset.take(logprobs).astype(mx.float32), drawn, indices)
    if drawn.subset.index is None:
        return tokens
    return drawn.subset.put(mx.argmax(logprobs, axis=-1).astype(mx.int32), tokens)


def _choose_by_callers(
    tokens: mx.array,
    logprobs: mx.array,
    samplers: Mapping[int, Callable[..., object]],
    errors: dict[int, Exception],
) -> mx.array:
    """`tokens` ``[R]`` with those that callers' samplers choose from the rows of `logprobs`.

    The exception of a row goes into `errors`; a row that has one already is not asked for.
    """
    rows, chosen = [], []
    for row, sampler in samplers.items():
        if row in errors:
            continue
        try:
            chosen.append(_token(sampler(logprobs[row : row + 1]), logprobs.shape[-1]))
            rows.append(row)
        except Exception as error:
            errors[row] = error.with_traceback(None)  # which holds on to every caller
    return Subset(rows, len(tokens)).put(tokens, mx.concatenate(chosen)) if rows else tokens


def _token(sampled: object, vocab: int) -> mx.array:
    """What a caller's sampler returned, ``[1]`` int32.

    It is not known yet, so an id that no token has is not refused but led to the nearest that is.

    Raises:
        ValueError: it is something else than a token id.
    """
    if (
        not isinstance(sampled, mx.array)
        or sampled.shape != (1,)
        or not mx.issubdtype(sampled.dtype, mx.integer)
    ):
        raise ValueError(
            f"[SamplingParams] sampler returned {described(sampled)}: "
            "expected an mx.array of integers of shape (1,)"
        )
    return mx.clip(sampled, 0, vocab - 1).astype(mx.int32)


def _draw(logprobs: mx.array, drawn: DrawnRows, indices: npt.NDArray[np.uint64]) -> mx.array:
    """Inverse transform sampling: the first token whose cumulated probability exceeds a draw, which
    is number `indices` ``[N]`` of each row's stream."""
    kept = _filtered(logprobs, drawn, indices)
    scaled = (kept - kept.max(axis=-1, keepdims=True)) / drawn.temperature
    cumulated = mx.cumsum(mx.exp(scaled), axis=-1)
    draws = mx.array(uniform(drawn.seeds, indices)[:, None])
    passed = cumulated > draws * cumulated[:, -1:]
    return mx.argmax(passed & (kept > -mx.inf), axis=-1).astype(mx.int32)


def _filtered(logprobs: mx.array, drawn: DrawnRows, indices: npt.NDArray[np.uint64]) -> mx.array:
    """`logprobs` with -inf wherever a row's top-p, min-p, XTC or top-k drops the token.

    The filters look at probabilities at temperature 1, and a token has to pass all of them.
    """
    kept = logprobs if drawn.ranks is None else _rank_filtered(logprobs, drawn.ranks)
    if drawn.log_min_p is not None:
        floor = logprobs.max(axis=-1, keepdims=True) + drawn.log_min_p
        kept = mx.where(logprobs < floor, -mx.inf, kept)
    if drawn.xtc is not None:
        kept = _xtc_filtered(kept, drawn.xtc, drawn.seeds, indices)
    return kept


def _rank_filtered(logprobs: mx.array, ranks: RankFilters) -> mx.array:
    """`logprobs` with -inf wherever a row's top-p or top-k drops the token."""
    before = ranks.subset.take(logprobs)
    descending = mx.sort(before, axis=-1)[:, ::-1]
    probs = mx.exp(descending)
    mass_before = mx.cumsum(probs, axis=-1) - probs
    nucleus = mass_before < ranks.top_p * probs.sum(axis=-1, keepdims=True)
    in_nucleus = nucleus.sum(axis=-1, keepdims=True)
    last = mx.maximum(mx.minimum(in_nucleus, ranks.top_k), 1) - 1
    floor = mx.take_along_axis(descending, last, axis=-1)
    return ranks.subset.put(logprobs, mx.where(before < floor, -mx.inf, before))


def _xtc_filtered(
    kept: mx.array,
    xtc: XTC,
    seeds: npt.NDArray[np.uint64],
    indices: npt.NDArray[np.uint64],
) -> mx.array:
    """`kept` after XTC, which now and then drops all but the least of the likely tokens, and after
    these rows' top-k."""
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
    return after if xtc.ranks is None else _rank_filtered(after, xtc.ranks)


def _most_likely(logprobs: mx.array, rows: Subset, count: int) -> tuple[mx.array, mx.array]:
    """Tokens ``[R, count]`` int32 and log-probabilities float32, most likely first, of `rows`; of
    equally likely tokens the first comes first."""
    of_rows = rows.take(logprobs)
    tokens = mx.argpartition(-of_rows, count - 1, axis=-1)[:, :count]
    tokens = mx.sort(tokens, axis=-1)
    values = mx.take_along_axis(of_rows, tokens, axis=-1)
    order = mx.argsort(-values, axis=-1)
    shape = (len(logprobs), count)
    return (
        rows.put(mx.zeros(shape, mx.int32), _ordered(tokens, order).astype(mx.int32)),
        rows.put(mx.full(shape, -mx.inf), _ordered(values, order).astype(mx.float32)),
    )


def _ordered(array: mx.array, order: mx.array) -> mx.array:
    return mx.take_along_axis(array, order, axis=-1)
