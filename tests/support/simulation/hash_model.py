"""A model of hashes: contexts, what is kept for a token, and the token that comes next."""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

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
