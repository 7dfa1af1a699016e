"""What is done to logits before a token is chosen: biases, penalties, callers' processors.

The numbers are mlx-lm's, in the type of the logits.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_paged.request import Request
from mlx_paged.sampling.columns import LogitBiases, PenalisedRows, Penalty, Subset

NO_TOKEN = -1
MAX_TAIL = 256
"""Tokens that a `TokenHistory` converts in each step at most."""


def add_biases(logits: mx.array, biases: LogitBiases) -> mx.array:
    """Logits ``[R, vocab]`` with the biases added."""
    return logits.at[biases.rows, biases.tokens].add(biases.values)


class Penalties:
    """Repetition, presence and frequency penalties of one batch composition.

    Windows of the rows' last tokens stay on the device and move by the newest token in each step,
    which may still be unknown to the host.
    """

    def __init__(self, rows: PenalisedRows) -> None:
        self._rows = rows
        self._row_indices = mx.array(rows.subset.rows[:, None])
        self._past = mx.zeros((len(rows.requests), 0), mx.int32)  # windows without the newest
        self._num_tokens = np.zeros(0, np.int32)  # for which `_past` is right

    def __call__(
        self, logits: mx.array, newest: mx.array, lengths: npt.NDArray[np.int32]
    ) -> mx.array:
        """Logits ``[R, vocab]`` after the penalties; `newest` ``[R]`` int32 ends the windows, being
        the last of `lengths` ``[R]`` tokens of each request."""
        windows = self._windows(self._rows.subset.take(newest), lengths[self._rows.subset.rows])
        windows = mx.minimum(windows, logits.shape[-1] - 1)  # an odd prompt must not reach beyond
        rows, dtype = self._row_indices, logits.dtype
        logits = mx.array(logits)  # shares the values; assignments do not reach the caller's array
        if (penalty := self._rows.repetition) is not None:
            tokens, _ = _counted(windows, penalty)
            strength, seen = penalty.strength.astype(dtype), logits[rows, tokens]
            logits[rows, tokens] = mx.where(seen < 0, seen * strength, seen / strength)
        if (penalty := self._rows.presence) is not None:
            tokens, _ = _counted(windows, penalty)
            logits[rows, tokens] = logits[rows, tokens] - penalty.strength.astype(dtype)
        if (penalty := self._rows.frequency) is not None:
            tokens, counted = _counted(windows, penalty)
            logits = logits.at[rows, tokens].subtract(mx.where(counted, penalty.strength, 0))
        return logits

    def _windows(self, newest: mx.array, num_tokens: npt.NDArray[np.int32]) -> mx.array:
        """The rows' last tokens ``[P, W]`` int32, `NO_TOKEN` before the first."""
        # Compared: a step that was dropped or run again must not shift the windows.
        if not np.array_equal(num_tokens, self._num_tokens):
            self._past = self._known_past(num_tokens)
        windows = mx.concatenate([self._past, newest[:, None]], axis=1)
        self._past = windows[:, 1:]
        self._num_tokens = num_tokens + np.int32(1)
        return windows

    def _known_past(self, num_tokens: npt.NDArray[np.int32]) -> mx.array:
        """The windows up to the newest token ``[P, W - 1]``, from what the host knows."""
        width = self._rows.width - 1
        past = np.full((len(self._rows.requests), width), NO_TOKEN, np.int32)
        for row, request, length in zip(past, self._rows.requests, num_tokens, strict=True):
            stop = int(length) - 1
            tokens = request.tokens[max(0, stop - width) : stop]
            row[width - len(tokens) :] = tokens
        return mx.array(past)


def _counted(windows: mx.array, penalty: Penalty) -> tuple[mx.array, mx.array]:
    """The windows with every token that the penalty does not count replaced by the newest, which
    is always counted, and a mask of those it counts."""
    counted = penalty.counted & (windows > NO_TOKEN)
    return mx.where(counted, windows, windows[:, -1:]), counted


class Processors:
    """The callers' logits processors of one batch composition, called row by row.

    Args:
        requests: all the batch's.
        rows: those with processors.
    """

    def __init__(self, requests: Sequence[Request], rows: Sequence[int]) -> None:
        self._subset = Subset(rows, len(requests))
        self._histories = {row: TokenHistory(requests[row]) for row in rows}

    def __call__(
        self, logits: mx.array, newest: mx.array, errors: dict[int, Exception]
    ) -> mx.array:
        """Logits ``[R, vocab]`` after the processors. The exception of a row goes into `errors`,
        its logits stay as they were."""
        processed = []
        for row, history in self._histories.items():
            one = slice(row, row + 1)
            try:
                processed.append(_process(history, logits[one], newest[one]))
            except Exception as error:
                errors[row] = error.with_traceback(None)  # which holds on to every caller
                processed.append(logits[one])
        return self._subset.put(logits, mx.concatenate(processed))


class TokenHistory:
    """The tokens of one request as an array, without converting all of them in every step."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._head = mx.array([], mx.int32)

    def up_to(self, newest: mx.array) -> mx.array:
        """Prompt and generated tokens ``[n]`` int32, ending with `newest` ``[1]``."""
        tokens, stop = self.request.tokens, self.request.num_tokens - 1
        if not 0 <= stop - self._head.size <= MAX_TAIL:
            self._head = mx.array(tokens[:stop], mx.int32)
        return mx.concatenate(
            [self._head, mx.array(tokens[self._head.size : stop], mx.int32), newest]
        )


def _process(history: TokenHistory, logits: mx.array, newest: mx.array) -> mx.array:
    """Logits ``[1, vocab]`` after the request's processors.

    Raises:
        ValueError: a processor returned something else than such logits.
    """
    tokens, shape, dtype = history.up_to(newest), logits.shape, logits.dtype
    for i, processor in enumerate(history.request.params.logits_processors):
        logits = processor(tokens, logits)
        if not _is_logits(logits, shape):
            raise ValueError(
                f"[SamplingParams] logits_processors[{i}] returned {described(logits)}: "
                f"expected an mx.array of floats of shape {shape}"
            )
    return logits.astype(dtype)


def _is_logits(value: object, shape: tuple[int, ...]) -> bool:
    return (
        isinstance(value, mx.array)
        and value.shape == shape
        and mx.issubdtype(value.dtype, mx.floating)
    )


def described(value: object) -> str:
    """What a caller's function returned, in words."""
    if isinstance(value, mx.array):
        return f"an array of {value.dtype} of shape {value.shape}"
    return f"a {type(value).__name__}"
