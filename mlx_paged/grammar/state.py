"""Where a request is in its grammar, and which tokens may follow. Knows no mlx.

Only these two modules know llguidance. It need not be installed for requests without a grammar.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

MAX_FORCED = 1024
"""Tokens that are looked for at once after a token."""


class Matcher(Protocol):
    """The part of llguidance's LLMatcher that is used here."""

    def deep_copy(self) -> "Matcher": ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...
    def is_stopped(self) -> bool: ...
    def compute_bitmask(self) -> bytes: ...
    def compute_ff_tokens(self) -> list[int]: ...
    def consume_token(self, token: int) -> bool: ...
    def consume_tokens(self, tokens: list[int]) -> bool: ...


class GrammarState:
    """The grammar of one request, after the tokens that it has.

    Where the grammar leaves one text only, its tokens are forced: those that the tokenizer makes
    of this text. Other tokens with the same text are then not allowed. So the output does not
    depend on whether the model computes these tokens one by one or all at once.

    Args:
        matcher: after `position` tokens of the request; it belongs to the state from now on.
        end: the end-of-sequence token that follows when the grammar allows no other token.
        vocab_size: tokens that the matcher knows.

    Attributes:
        forced: tokens that must follow. The matcher is behind them.
    """

    def __init__(self, matcher: Matcher, position: int, end: int, vocab_size: int) -> None:
        self.matcher = matcher
        self.vocab_size = vocab_size
        self.forced: list[int] = []
        self._position = position
        self._end = end
        self._find_forced()

    def copy(self, tokens: Sequence[int]) -> "GrammarState":
        """The state of a fork with these tokens, which begin with those that this state has
        followed. Raises ValueError as :meth:`follow`."""
        twin = object.__new__(GrammarState)
        twin.matcher, twin.forced = self.matcher.deep_copy(), list(self.forced)
        twin.vocab_size, twin._position, twin._end = self.vocab_size, self._position, self._end
        twin.follow(tokens)
        return twin

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on to the end of the request's `tokens`.

        Raises:
            ValueError: the grammar does not allow one of them; the state is then useless.
        """
        for token in tokens[self._position :]:
            if self.forced:
                is_allowed = self.forced[0] == token
            else:
                is_allowed = self.matcher.consume_token(token)
            if not is_allowed:  # the position stays, so that later calls raise, too
                raise ValueError(f"[SamplingParams] the grammar does not allow token {token}")
            self._position += 1
            if self.forced:
                del self.forced[0]
            else:
                self._find_forced()

    def _find_forced(self) -> None:
        matcher = self.matcher
        while len(self.forced) < MAX_FORCED and (more := matcher.compute_ff_tokens()):
            matcher.consume_tokens(more)
            self.forced += more
        if matcher.is_stopped() and not matcher.is_error():
            self.forced.append(self._end)


class Row(NamedTuple):
    """A row of logits for the token at index `length` of a request's tokens."""

    row: int
    state: GrammarState
    tokens: list[int]
    length: int


class Masks(NamedTuple):
    """What the grammars of a batch allow.

    Attributes:
        allowed: ``[R, vocab]`` uint8, 1 or 0; a row without a grammar has ones.
        forced: the only token that may follow, by row.
        errors: why a row has no token.
    """

    allowed: npt.NDArray[np.uint8]
    forced: dict[int, int]
    errors: dict[int, Exception]


def masks_of(rows: Sequence[Row], num_rows: int, vocab: int) -> Masks:
    """Let each row's state follow its tokens, and fill the masks of all rows in one call.

    The library fills them on several threads.
    """
    forced: dict[int, int] = {}
    errors: dict[int, Exception] = {}
    waiting: list[Row] = []
    for each in rows:
        try:
            each.state.follow(each.tokens)
        except ValueError as error:
            errors[each.row] = error.with_traceback(None)
            continue
        if each.length < len(each.tokens):  # the engine has appended forced tokens already
            forced[each.row] = each.tokens[each.length]
        elif each.state.forced:
            forced[each.row] = each.state.forced[0]
        else:
            waiting.append(each)
    known_vocab = rows[0].state.vocab_size
    bits = np.full((num_rows, -(-known_vocab // 32)), -1, np.int32)
    for known in forced:
        bits[known] = 0
    if waiting:
        pairs = [(each.state.matcher, each.row) for each in waiting]
        _executor().unsafe_compute_mask_ptr(pairs, bits.ctypes.data, bits.strides[0], num_rows)
    for each in waiting:
        if each.state.matcher.is_error():
            reason = " ".join(each.state.matcher.get_error().split())
            errors[each.row] = ValueError(f"[SamplingParams] the grammar failed: {reason:.200}")
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, count=vocab, bitorder="little")
    allowed[list(forced), list(forced.values())] = 1
    if known_vocab < vocab:  # logits of no tokens
        is_free = np.ones(num_rows, bool)
        is_free[[each.row for each in rows]] = False
        allowed[is_free] = 1
    return Masks(allowed, forced, errors)


@cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor()
