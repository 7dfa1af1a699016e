"""What an adapter has: its factors, and a hash of them."""

from dataclasses import dataclass
from hashlib import blake2b

import mlx.core as mx

from mlx_paged.ops import as_numpy
from mlx_paged.runner.low_rank_places import Factors

ALIGNMENT = 64
"""In :func:`numbers_of` each factor begins at a multiple of so many bytes."""


@dataclass(frozen=True)
class Content:
    """The factors of an adapter, and their bytes as one array: see :func:`numbers_of`."""

    factors: Factors
    numbers: mx.array

    @property
    def key(self) -> bytes:
        """A hash of the factors, 16 bytes."""
        forms = [
            (path, [(each.shape, str(each.dtype)) for each in pair])
            for path, pair in self.factors.items()
        ]
        digest = blake2b(repr(forms).encode(), digest_size=16, person=b"adapter")
        digest.update(as_numpy(self.numbers).data)  # in one call: each gives Python's lock away
        return digest.digest()


def numbers_of(factors: Factors) -> mx.array:
    """The bytes of all factors, one after another, each with zeros up to a multiple of
    :data:`ALIGNMENT`."""
    pieces = []
    for pair in factors.values():
        for each in pair:
            pieces.append(mx.pad(each.flatten().view(mx.uint8), (0, -each.nbytes % ALIGNMENT)))
    return mx.concatenate(pieces)
