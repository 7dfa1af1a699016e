"""The options of a batch's rows as columns, built once for each batch composition."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.request import Request
from mlx_paged.sampling_params import SamplingParams, check_biases

MIN_TEMPERATURE = 1e-30  # smaller ones have the same effect but would be zero in float32
ALL_MASS = 2.0  # a top-p that keeps everything, also if rounding makes the sum exceed 1
PENALTIES = "repetition", "presence", "frequency"


class Subset:
    """Some rows of arrays ``[R, ...]``. A subset of all rows copies nothing."""

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
class TopFilters:
    """Rows with top-p or top-k."""

    subset: Subset
    top_p: mx.array  # [N, 1] float32
    top_k: mx.array  # [N, 1] int32


@dataclass(frozen=True, slots=True)
class XTC:
    """Rows with XTC."""

    subset: Subset
    probability: npt.NDArray[np.float32]  # [N]
    threshold: mx.array  # [N, 1] float32
    special: tuple[mx.array, mx.array] | None  # rows, tokens int32 that XTC never drops
    tops: TopFilters | None  # top-k acts after XTC


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Rows with a temperature. The subsets in `tops` and `xtc` index into these rows."""

    subset: Subset
    seeds: npt.NDArray[np.uint64]  # [N]
    num_prompt: npt.NDArray[np.int32]  # [N]
    temperature: mx.array  # [N, 1] float32
    log_min_p: mx.array | None  # [N, 1] float32
    tops: TopFilters | None
    xtc: XTC | None


class SamplingRows:
    """The options of the rows of one batch composition, for logits ``[R, vocab]``.

    A member is None or empty if no row has the option; the option then costs nothing in a step.
    The requests may get tokens while the columns are in use, but their options may not change.
    """

    def __init__(self, requests: Sequence[Request], vocab: int) -> None:
        params = [request.params for request in requests]
        reported = [i for i, p in enumerate(params) if p.logprobs]
        self.requests = list(requests)
        self.vocab = vocab
        self.drawn = _drawn(requests, params, vocab)
        self.biases, self.errors = _biases(params, vocab)
        self.penalised = [i for i, p in enumerate(params) if any(penalties_of(p))]
        self.processed = [i for i, p in enumerate(params) if p.logits_processors]
        self.samplers = {i: p.sampler for i, p in enumerate(params) if p.sampler is not None}
        constrained: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            if request.constraint is not None:
                constrained.setdefault(request.id, []).append(i)
        # Rows with a constraint, and how many tokens beyond the request's own come before each.
        self.constrained = [
            (row, num_before)
            for rows in constrained.values()
            for num_before, row in enumerate(rows)
        ]
        self.reported = Subset(reported, len(params)) if reported else None
        self.num_reported = min(max((p.logprobs for p in params), default=0), vocab)


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
        temperature=column([max(p.temperature, MIN_TEMPERATURE) for p in drawn]),
        log_min_p=column(log_min_p) if any(p.min_p > 0 for p in drawn) else None,
        tops=_tops(
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
        threshold=column([params[i].xtc_threshold for i in rows]),
        special=_indices(special) if special else None,
        tops=_tops(
            [ALL_MASS] * len(params),
            [_top_k(p, vocab) if p.xtc_probability > 0 else vocab for p in params],
            vocab,
        ),
    )


def _tops(top_p: Sequence[float], top_k: Sequence[int], vocab: int) -> TopFilters | None:
    rows = [i for i, (p, k) in enumerate(zip(top_p, top_k, strict=True)) if p < 1 or k < vocab]
    if not rows:
        return None
    return TopFilters(
        Subset(rows, len(top_p)),
        column([top_p[i] for i in rows]),
        mx.array(np.array([[top_k[i]] for i in rows], np.int32)),
    )


def _top_k(params: SamplingParams, vocab: int) -> int:
    return params.top_k if 0 < params.top_k < vocab else vocab


def _biases(
    params: Sequence[SamplingParams], vocab: int
) -> tuple[tuple[mx.array, mx.array, mx.array] | None, dict[int, Exception]]:
    """All biases, as rows and tokens ``[N]`` int32 and numbers ``[N]`` float32; errors by row."""
    cells: list[tuple[int, int]] = []
    values: list[float] = []
    errors: dict[int, Exception] = {}
    for row, p in enumerate(params):
        if not p.logit_bias:
            continue
        try:
            check_biases(p, vocab)
        except ValueError as error:
            errors[row] = error.with_traceback(None)  # it references every caller
            continue
        bias = dict(p.logit_bias)
        cells += [(row, token) for token in bias]
        values += bias.values()
    if not cells:
        return None, errors
    return (*_indices(cells), mx.array(_float32(values))), errors


def tokens_of(request: Request, beyond: Mapping[int, Sequence[int]]) -> list[int]:
    """A request's own tokens, and those beyond them."""
    own = beyond.get(request.id)
    return [*request.tokens, *own] if own else request.tokens


def tokens_between(
    request: Request, beyond: Mapping[int, Sequence[int]], start: int, stop: int
) -> list[int]:
    """A copy of :func:`tokens_of` from position `start` to `stop`, without the others."""
    tokens, own = request.tokens[start:stop], beyond.get(request.id)
    if own:
        count = len(request.tokens)
        tokens += own[max(0, start - count) : max(0, stop - count)]
    return tokens


def penalties_of(params: SamplingParams) -> list[float]:
    """The strength of each of `PENALTIES`; 0 is off."""
    repetition, *others = (getattr(params, f"{kind}_penalty") or 0.0 for kind in PENALTIES)
    return [0.0 if repetition == 1 else repetition, *others]


def column(values: Sequence[float]) -> mx.array:
    return mx.array(_float32(values)[:, None])


def _float32(values: Sequence[float]) -> npt.NDArray[np.float32]:
    """The nearest finite numbers of float32, infinite values apart."""
    wide, most = np.array(values, np.float64), np.finfo(np.float32).max
    return np.where(np.isinf(wide), wide, np.clip(wide, -most, most)).astype(np.float32)


def _indices(cells: Sequence[tuple[int, int]]) -> tuple[mx.array, mx.array]:
    rows, columns = np.array(cells, np.int32).T
    return mx.array(rows), mx.array(columns)
