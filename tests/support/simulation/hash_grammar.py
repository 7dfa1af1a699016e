"""Grammars for the model of hashes: a hash of a source and of the tokens so far says what follows.

:class:`HashMatcher` stands for llguidance's matcher in the engine's own ``GrammarState``.
"""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_paged.sampling.grammar import Grammars, GrammarState
from mlx_paged.sampling_params import SamplingParams
from tests.support.simulation.hash_model import GAMMA, MASK, VOCAB, empty_context, mixed

CONSTRAINTS = [{"regex": source} for source in ("a", "b", "c")]
"""Options of requests; their text is no regular expression here, but a seed."""


def state_after(source: str, tokens: Iterable[int]) -> int:
    """A hash of what was followed."""
    state = empty_context(source.encode())
    for token in tokens:
        state = mixed((state + (token + 1) * GAMMA) & MASK)
    return state


def forced_at(state: int) -> int | None:
    """The only token that may follow, in three of eight states."""
    return (state >> 8) % VOCAB if state % 8 < 3 else None


def allowed_at(state: int) -> npt.NDArray[np.bool_]:
    """Which tokens may follow ``[VOCAB]``: one at least."""
    tokens, forced = np.arange(VOCAB), forced_at(state)
    if forced is not None:
        return tokens == forced
    return (((mixed(state) % 2**32 >> tokens) & 1) == 1) | (tokens == state % VOCAB)


def allowed(params: SamplingParams, tokens: Iterable[int]) -> npt.NDArray[np.bool_] | None:
    """Which tokens may follow generated ones; None if `params` restrict nothing."""
    if params.constraint is None:
        return None
    return allowed_at(state_after(params.constraint[1], tokens))


class HashMatcher:
    """Follows tokens.

    Args:
        begin: the length of its request's prompt; a fork that inherits a matcher keeps it.
    """

    def __init__(self, source: str, begin: int) -> None:
        self.begin = begin
        self._state = state_after(source, ())

    def deep_copy(self) -> "HashMatcher":
        twin = HashMatcher("", self.begin)
        twin._state = self._state
        return twin

    def consume_token(self, token: int) -> bool:
        is_allowed = bool(allowed_at(self._state)[token])
        if is_allowed:
            self._state = mixed((self._state + (token + 1) * GAMMA) & MASK)
        return is_allowed

    def consume_tokens(self, tokens: Sequence[int]) -> None:
        assert all(map(self.consume_token, tokens))

    def compute_ff_tokens(self) -> list[int]:
        forced = forced_at(self._state)
        return [] if forced is None else [forced]

    def get_error(self) -> str:
        return "not allowed"

    def is_stopped(self) -> bool:
        return False


class HashGrammars(Grammars):
    """Those of an engine without a tokenizer."""

    def __init__(self) -> None:
        super().__init__(None, VOCAB)
        self._tokens: Any = SimpleNamespace(vocab_size=VOCAB, is_special_token=lambda token: False)

    def start(self, params: SamplingParams, position: int) -> GrammarState | None:
        if params.constraint is None:
            return None
        matcher = HashMatcher(params.constraint[1], position)
        return GrammarState(matcher, position, self._tokens)
