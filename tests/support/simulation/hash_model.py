"""A model of hashes: contexts, what is kept for a token, the token that comes next, and grammars: a
hash of a source and of the tokens so far says what may follow."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_paged.sampling.grammar import Compiled, Grammars, GrammarState
from mlx_paged.sampling_params import SamplingParams

VOCAB = 24

FloatArray = npt.NDArray[np.float64]

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
_OF_TOKEN = np.arange(VOCAB, dtype=np.uint64) * np.uint64(GAMMA)


def mixed(z: int) -> int:
    """A hash of 64 bits."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def empty_context(salt: bytes) -> int:
    """What a sequence is before its first token."""
    return int.from_bytes(blake2b(salt, digest_size=8).digest(), "little")


def kv_of(context: int, token: int, position: int) -> int:
    """What is kept for a token that comes after `context`."""
    return mixed((context + (token + 1) * GAMMA + position) & MASK)


def extended(context: int, kv: int, position: int) -> int:
    """The context with one more token, whose weight depends on where it is."""
    return (context + kv * (2 * position + 1)) & MASK


def context_of(tokens: list[int], salt: bytes) -> int:
    """The context of a whole sequence, from plain lists."""
    context = empty_context(salt)
    for position, token in enumerate(tokens):
        context = extended(context, kv_of(context, token, position), position)
    return context


def logprobs_of(context: int) -> FloatArray:
    """A number below 0 for each token ``[VOCAB]``; they need not sum to a probability of 1."""
    z = np.uint64(mixed(context)) + _OF_TOKEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return -0.1 - 6.0 * ((z >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def next_token(
    context: int,
    params: SamplingParams,
    seed: int,
    index: int,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> int:
    """Token number `index` of a request: the likeliest of the `allowed` ones ``[VOCAB]``, or one
    that hangs on the seed too."""
    if params.temperature == 0:
        logprobs = logprobs_of(context)
        return int(
            logprobs.argmax() if allowed is None else np.where(allowed, logprobs, -np.inf).argmax()
        )
    drawn = mixed(context ^ mixed((seed + index * GAMMA) & MASK))
    if allowed is None:
        return drawn % VOCAB
    left = np.flatnonzero(allowed)
    return int(left[drawn % len(left)])


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
    """Follows tokens; stands for llguidance's matcher in the engine's own ``GrammarState``.

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
        return GrammarState(Compiled(matcher, 0), position, self._tokens)
