"""How logits change before a token is chosen: penalties and the callers' processors.

The numbers are mlx-lm's, in the type of the logits, but all of them are finite: float16 ends at
65,504.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged import ops
from mlx_paged.request import Request
from mlx_paged.sampling.columns import (
    PENALTIES,
    Subset,
    column,
    penalties_of,
    tokens_between,
    tokens_of,
)

T = TypeVar("T")
Beyond = Mapping[int, Sequence[int]]  # by request id, tokens after the request's own
NOTHING_BEYOND: Beyond = {}

NO_TOKEN = -1
MAX_TAIL = 256  # tokens that a `TokenHistory` converts in each step at most


@dataclass(frozen=True, slots=True)
class Penalty:
    """One kind of penalty: its strength ``[P, 1]`` float32, and a mask ``[P, W]`` bool of the
    newest tokens of each row that it counts."""

    strength: mx.array
    counted: mx.array


class Penalties:
    """Repetition, presence and frequency penalties of one batch composition.

    The last W tokens of each row, the newest last, stay on the device and move by one in each step.
    The host may not know the newest token yet.

    Args:
        requests: all requests of the batch.
        rows: those with penalties.
        beyond: by request id, tokens that may follow its own.
    """

    def __init__(
        self, requests: Sequence[Request], rows: Sequence[int], beyond: Beyond = NOTHING_BEYOND
    ) -> None:
        self._beyond = beyond
        self._subset = Subset(rows, len(requests))
        self._row_indices = mx.array(self._subset.rows[:, None])
        self._requests = [requests[row] for row in rows]
        # [P, 3], a column for each of PENALTIES
        strengths = np.array([penalties_of(request.params) for request in self._requests])
        contexts = np.array([_contexts(request) for request in self._requests])
        self._width = int((contexts * (strengths != 0)).max())
        neutral = 1.0, 0.0, 0.0
        found = map(self._penalty, strengths.T, contexts.T, neutral)
        self._repetition, self._presence, self._frequency = found
        self._past = mx.zeros((len(rows), 0), mx.int32)  # the last tokens without the newest one
        self._num_tokens = np.zeros(0, np.int32)  # the lengths that `_past` belongs to

    def __call__(
        self, logits: mx.array, newest: mx.array, lengths: npt.NDArray[np.int32]
    ) -> mx.array:
        """Logits ``[R, vocab]`` after the penalties. `lengths` ``[R]`` counts each request's
        tokens; `newest` ``[R]`` int32 is the last of them."""
        recent = self._recent(self._subset.take(newest), lengths[self._subset.rows])
        recent = mx.minimum(recent, logits.shape[-1] - 1)  # prompts may hold ids >= vocab
        rows, dtype = self._row_indices, logits.dtype
        logits = mx.array(logits)  # shares the values; assignments do not reach the caller's array
        if (penalty := self._repetition) is not None:
            tokens, _ = _counted(recent, penalty)
            strength = mx.maximum(clipped(penalty.strength, dtype), 1 / largest(dtype))
            seen = logits[rows, tokens]
            found = mx.where(seen < 0, seen * strength, seen / strength)
            logits[rows, tokens] = bounded(found, seen)
        if (penalty := self._presence) is not None:
            tokens, _ = _counted(recent, penalty)
            seen = logits[rows, tokens]
            logits[rows, tokens] = bounded(seen - clipped(penalty.strength, dtype), seen)
        if (penalty := self._frequency) is not None:
            tokens, counted = _counted(recent, penalty)
            strength, seen = clipped(penalty.strength, dtype), logits[rows, tokens]
            logits = logits.at[rows, tokens].subtract(mx.where(counted, strength, 0))
            logits[rows, tokens] = bounded(logits[rows, tokens], seen)
        return logits

    def _penalty(
        self,
        strengths: npt.NDArray[np.float64],
        contexts: npt.NDArray[np.int64],
        neutral: float,
    ) -> Penalty | None:
        """The penalty of all rows; `neutral` has no effect on a row where it is off."""
        if not strengths.any():
            return None
        counted = np.arange(self._width) >= self._width - contexts[:, None]
        return Penalty(
            column(np.where(strengths == 0, neutral, strengths).tolist()), mx.array(counted)
        )

    def _recent(self, newest: mx.array, num_tokens: npt.NDArray[np.int32]) -> mx.array:
        """The rows' last tokens ``[P, W]`` int32, `NO_TOKEN` before the first."""
        # Compared: a step that was dropped or run again must not shift the tokens.
        if not np.array_equal(num_tokens, self._num_tokens):
            self._past = self._known_past(num_tokens)
        recent = mx.concatenate([self._past, newest[:, None]], axis=1)
        self._past = recent[:, 1:]
        self._num_tokens = num_tokens + np.int32(1)
        return recent

    def _known_past(self, num_tokens: npt.NDArray[np.int32]) -> mx.array:
        """The last tokens before the newest one ``[P, W - 1]``, from tokens that the host knows."""
        width = self._width - 1
        past = np.full((len(self._requests), width), NO_TOKEN, np.int32)
        for row, request, length in zip(past, self._requests, num_tokens, strict=True):
            stop = int(length) - 1
            tokens = tokens_between(request, self._beyond, max(0, stop - width), stop)
            row[width - len(tokens) :] = tokens
        return mx.array(past)


def largest(dtype: mx.Dtype) -> float:
    """The largest logit that an option may make: a quarter of the largest number of `dtype`, so
    that the difference of two logits is finite."""
    return float(mx.finfo(dtype).max) / 4


def clipped(values: mx.array, dtype: mx.Dtype) -> mx.array:
    """`values` in another type, within what an option may make."""
    most = largest(dtype)
    return mx.clip(values, -most, most).astype(dtype)


def bounded(found: mx.array, before: mx.array) -> mx.array:
    """The logits `found`, limited to the range that options may reach. Logits that were infinite
    `before` stay infinite."""
    return mx.where(mx.isinf(before), before, clipped(found, found.dtype))


def biased(logits: mx.array, rows: mx.array, tokens: mx.array, values: mx.array) -> mx.array:
    """Logits ``[R, vocab]`` with `values` ``[N]`` added at these `rows` and `tokens` ``[N]``, each
    pair once; -inf forbids a token."""
    logits = mx.array(logits)  # shares the values; assignments do not reach the caller's array
    before = logits[rows, tokens]
    found = bounded(before + clipped(values, logits.dtype), before)
    logits[rows, tokens] = mx.where(values == -mx.inf, -mx.inf, found)
    return logits


def _contexts(request: Request) -> list[int]:
    """How many tokens each penalty looks back, at most the request's final length."""
    longest = request.num_prompt + request.params.max_tokens
    sizes = [getattr(request.params, f"{kind}_context_size") for kind in PENALTIES]
    return [min(size or longest, longest) for size in sizes]


def _counted(recent: mx.array, penalty: Penalty) -> tuple[mx.array, mx.array]:
    """The last tokens, and a mask of those that the penalty counts. The newest token, which always
    counts, replaces the others."""
    counted = penalty.counted & (recent > NO_TOKEN)
    return mx.where(counted, recent, recent[:, -1:]), counted


class TokenHistory:
    """The tokens of one request, and those beyond them, as an array. Most steps convert only
    the latest tokens."""

    def __init__(self, request: Request, beyond: Beyond = NOTHING_BEYOND) -> None:
        self.request = request
        self._tokens = tokens_of(request, beyond)
        self._head = mx.array([], mx.int32)

    def up_to(self, newest: mx.array, length: int) -> mx.array:
        """The request's first `length` tokens, int32, of which `newest` ``[1]`` is the last."""
        tokens, stop = self._tokens, length - 1
        if not 0 <= stop - self._head.size <= MAX_TAIL:
            self._head = mx.array(tokens[:stop], mx.int32)
        return mx.concatenate(
            [self._head, mx.array(tokens[self._head.size : stop], mx.int32), newest]
        )


def processed(history: TokenHistory, logits: mx.array, newest: mx.array, length: int) -> mx.array:
    """Logits ``[1, vocab]`` after the processors of the caller of a request."""
    tokens, shape, dtype = history.up_to(newest, length), logits.shape, logits.dtype
    for i, processor in enumerate(history.request.params.logits_processors):
        returned = processor(tokens, logits)
        logits = checked_array(f"logits_processors[{i}]", returned, mx.floating, shape)
    return logits.astype(dtype)


def row_by_row(
    array: mx.array,
    callees: Mapping[int, T],
    call: Callable[[slice, T], mx.array],
    errors: dict[int, Exception],
) -> mx.array:
    """`array` ``[R, ...]`` with what `call` makes of these rows, each with its callee. If it
    raises, the exception goes into `errors` and the row does not change."""
    made: dict[int, mx.array] = {}
    for row, callee in callees.items():
        try:
            made[row] = call(slice(row, row + 1), callee)
        except Exception as error:
            if ops.is_device_error(error):  # of no row
                raise
            errors[row] = error.with_traceback(None)  # it references every caller
    if not made:
        return array
    return Subset(list(made), len(array)).put(array, mx.concatenate(list(made.values())))


def checked_array(
    name: str, returned: object, kind: mx.DtypeCategory, shape: tuple[int, ...]
) -> mx.array:
    """What a caller's function returned; ValueError if it is no array of this kind and shape."""
    if not isinstance(returned, mx.array):
        found = f"a {type(returned).__name__}"
    elif returned.shape == shape and mx.issubdtype(returned.dtype, kind):
        return returned
    else:
        found = f"an array of {returned.dtype} of shape {returned.shape}"
    numbers = "floats" if kind == mx.floating else "integers"
    raise ValueError(
        f"[SamplingParams] {name} returned {found}: "
        f"expected an mx.array of {numbers} of shape {shape}"
    )
