"""The options of a batch's rows as columns, made once for as long as the same requests share it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams, check_biases

MIN_TEMPERATURE = 1e-30
"""Smaller ones mean the same and would be zero in float32."""

ALL_MASS = 2.0
"""A top-p that keeps everything, whatever rounding does to the sum of the probabilities."""


class Subset:
    """Some rows of arrays ``[R, ...]``. When that is all of them, nothing is copied."""

    def __init__(self, rows: Sequence[int], num_rows: int) -> None:
        self.rows = np.array(rows, np.int32)
        self.index = None if len(rows) == num_rows else mx.array(self.rows)

    def take(self, array: mx.array) -> mx.array:
        return array if self.index is None else array[self.index]

    def put(self, array: mx.array, values: mx.array) -> mx.array:
        """`array` with `values` in these rows."""
        if self.index is None:
            return values
        result = mx.array(array)  # shares the values; the assignment does not reach `array`
        result[self.index] = values
        return result


@dataclass(frozen=True, slots=True)
class RankFilters:
    """Rows with top-p or top-k: the mass ``[N, 1]`` float32, the number ``[N, 1]`` int32."""

    subset: Subset
    top_p: mx.array
    top_k: mx.array


@dataclass(frozen=True, slots=True)
class XTC:
    """Rows with XTC."""

    subset: Subset
    probability: npt.NDArray[np.float32]  # [N]
    threshold: mx.array  # [N, 1] float32
    special: tuple[mx.array, mx.array] | None  # rows and tokens, int32, that are never dropped
    ranks: RankFilters | None  # top-k acts after XTC


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Rows with a temperature. Subsets within are of these rows."""

    subset: Subset
    seeds: npt.NDArray[np.uint64]  # [N]
    num_prompt: npt.NDArray[np.int32]  # [N], tokens before the first that is drawn
    temperature: mx.array  # [N, 1] float32
    log_min_p: mx.array | None  # [N, 1] float32
    ranks: RankFilters | None
    xtc: XTC | None


@dataclass(frozen=True, slots=True)
class LogitBiases:
    """Each bias with its place: rows, tokens ``[N]`` int32 and numbers ``[N]`` float32."""

    rows: mx.array
    tokens: mx.array
    values: mx.array


@dataclass(frozen=True, slots=True)
class Penalty:
    """One kind of penalty: its strength ``[P, 1]`` float32, and which of a window's tokens it
    counts ``[P, W]`` bool."""

    strength: mx.array
    counted: mx.array


@dataclass(frozen=True, slots=True)
class PenalisedRows:
    """Rows with penalties. A window is a row's last `width` tokens, the newest last."""

    subset: Subset
    requests: list[Request]
    width: int
    repetition: Penalty | None
    presence: Penalty | None
    frequency: Penalty | None


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The options of the rows of one batch composition.

    A member is None or empty where no row has the option, which then costs nothing in a step.
    While the columns last, the requests may only grow.
    """

    requests: list[Request]
    vocab: int
    drawn: DrawnRows | None
    biases: LogitBiases | None
    penalised: PenalisedRows | None
    processed: list[int]  # rows with processors of the caller's
    samplers: dict[int, Callable[..., object]]  # by row, samplers of the caller's
    reported: Subset | None  # rows whose most likely tokens are reported
    num_reported: int
    errors: dict[int, Exception]  # by row
    may_be_empty: list[int]  # rows whose caller may leave them no token to choose

    @classmethod
    def of(cls, requests: Sequence[Request], vocab: int) -> "SamplingRows":
        """Columns for the logits ``[R, vocab]`` of `requests`."""
        params = [request.params for request in requests]
        reported = [i for i, p in enumerate(params) if p.logprobs]
        biases, errors = _biases(params, vocab)
        return cls(
            requests=list(requests),
            vocab=vocab,
            drawn=_drawn(requests, params, vocab),
            biases=biases,
            penalised=_penalised(requests, params),
            processed=[i for i, p in enumerate(params) if p.logits_processors],
            samplers={i: p.sampler for i, p in enumerate(params) if p.sampler is not None},
            reported=Subset(reported, len(params)) if reported else None,
            num_reported=min(max((p.logprobs for p in params), default=0), vocab),
            errors=errors,
            may_be_empty=[i for i, request in enumerate(requests) if _may_be_empty(request)],
        )

    def belong_to(self, requests: Sequence[Request], vocab: int) -> bool:
        """Whether these are the columns of just these requests; requests compare by identity."""
        return self.vocab == vocab and self.requests == list(requests)


def _drawn(
    requests: Sequence[Request], params: Sequence[SamplingParams], vocab: int
) -> DrawnRows | None:
    rows = [i for i, p in enumerate(params) if p.temperature > 0]
    if not rows:
        return None
    drawn = [params[i] for i in rows]
    log_min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in drawn]
    return DrawnRows(
        subset=Subset(rows, len(params)),
        seeds=np.array([requests[i].seed for i in rows], np.uint64),
        num_prompt=np.array([requests[i].num_prompt for i in rows], np.int32),
        temperature=_column([max(p.temperature, MIN_TEMPERATURE) for p in drawn]),
        log_min_p=_column(log_min_p) if any(p.min_p > 0 for p in drawn) else None,
        ranks=_ranks(
            [p.top_p if 0 < p.top_p < 1 else ALL_MASS for p in drawn],
            [vocab if p.xtc_probability > 0 else _top_k(p, vocab) for p in drawn],
            vocab,
        ),
        xtc=_xtc(drawn, vocab),
    )


def _xtc(params: Sequence[SamplingParams], vocab: int) -> XTC | None:
    rows = [i for i, p in enumerate(params) if p.xtc_probability > 0]
    if not rows:
        return None
    special = [
        (row, token)
        for row, i in enumerate(rows)
        for token in params[i].xtc_special_tokens
        if token < vocab
    ]
    return XTC(
        subset=Subset(rows, len(params)),
        probability=np.array([params[i].xtc_probability for i in rows], np.float32),
        threshold=_column([params[i].xtc_threshold for i in rows]),
        special=_indices(special) if special else None,
        ranks=_ranks(
            [ALL_MASS] * len(params),
            [_top_k(p, vocab) if p.xtc_probability > 0 else vocab for p in params],
            vocab,
        ),
    )


def _ranks(top_p: Sequence[float], top_k: Sequence[int], vocab: int) -> RankFilters | None:
    rows = [i for i, (p, k) in enumerate(zip(top_p, top_k, strict=True)) if p < 1 or k < vocab]
    if not rows:
        return None
    return RankFilters(
        Subset(rows, len(top_p)),
        _column([top_p[i] for i in rows]),
        mx.array(np.array([[top_k[i]] for i in rows], np.int32)),
    )


def _top_k(params: SamplingParams, vocab: int) -> int:
    return params.top_k if 0 < params.top_k < vocab else vocab


def _biases(
    params: Sequence[SamplingParams], vocab: int
) -> tuple[LogitBiases | None, dict[int, Exception]]:
    places: list[tuple[int, int]] = []
    values: list[float] = []
    errors: dict[int, Exception] = {}
    for row, p in enumerate(params):
        if not p.logit_bias:
            continue
        try:
            check_biases(p, vocab)
        except ValueError as error:
            errors[row] = error.with_traceback(None)  # which holds on to every caller
            continue
        bias = dict(p.logit_bias)
        places += [(row, token) for token in bias]
        values += bias.values()
    if not places:
        return None, errors
    return LogitBiases(*_indices(places), mx.array(np.array(values, np.float32))), errors


def _may_be_empty(request: Request) -> bool:
    """Whether the caller may forbid every token; a beam search drops such a hypothesis itself."""
    params = request.params
    forbids = -math.inf in dict(params.logit_bias).values()
    return (forbids or bool(params.logits_processors)) and not request.synchronous


def _penalised(
    requests: Sequence[Request], params: Sequence[SamplingParams]
) -> PenalisedRows | None:
    rows = [i for i, p in enumerate(params) if any(_penalties(p))]
    if not rows:
        return None
    penalised = [requests[i] for i in rows]
    # Two lists [P, 3], of repetition, presence and frequency each.
    strengths = [_penalties(request.params) for request in penalised]
    contexts = [_contexts(request) for request in penalised]
    used = np.array(strengths) != 0
    width = int((np.array(contexts) * used).max())
    kinds = [
        _penalty(
            [row[kind] if row[kind] else neutral for row in strengths],
            [row[kind] for row in contexts],
            width,
        )
        if used[:, kind].any()
        else None
        for kind, neutral in enumerate((1.0, 0.0, 0.0))
    ]
    return PenalisedRows(Subset(rows, len(params)), penalised, width, *kinds)


def _penalties(params: SamplingParams) -> tuple[float, float, float]:
    """Repetition, presence and frequency penalty, 0 where it is off."""
    repetition = params.repetition_penalty or 0.0
    return (
        0.0 if repetition == 1 else repetition,
        params.presence_penalty or 0.0,
        params.frequency_penalty or 0.0,
    )


def _contexts(request: Request) -> tuple[int, int, int]:
    """How many tokens each penalty looks back, at most all that there can come to be."""
    params, most = request.params, request.num_prompt + request.params.max_tokens
    return (
        min(params.repetition_context_size or most, most),
        min(params.presence_context_size or most, most),
        min(params.frequency_context_size or most, most),
    )


def _penalty(strengths: Sequence[float], contexts: Sequence[int], width: int) -> Penalty:
    counted = np.arange(width) >= width - np.array(contexts)[:, None]
    return Penalty(_column(strengths), mx.array(counted))


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(np.array(values, np.float32)[:, None])


def _indices(places: Sequence[tuple[int, int]]) -> tuple[mx.array, mx.array]:
    rows, columns = np.array(places, np.int32).T
    return mx.array(rows), mx.array(columns)
