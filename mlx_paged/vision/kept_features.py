"""Which pictures' features are kept: those worth most for their bytes. Knows no mlx."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from mlx_paged.kv.frequency import ONE, log2_of, together
from mlx_paged.kv.worth import worth


@dataclass(slots=True)
class _Kept:
    """Features of a picture, and the logarithm of how often they are used."""

    features: Any
    num_bytes: int
    worth: int
    score: int

    @property
    def rank(self) -> int:
        return self.score + log2_of(self.worth)


class KeptFeatures:
    """Features by the digest of their picture, in `max_bytes`, one picture's at least.

    As blocks of K/V they go in the order of their worth: operations of the vision tower, per byte,
    times how often they are used. A use counts half as much after as many bytes as are kept have
    been given up.

    Attributes:
        nbytes: of the features that are kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.nbytes = 0
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # the one used last at the end
        self._age = 0  # half-lives that have passed

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, digest: bytes) -> Any:
        """The features of a picture; None: they are not kept. Chunks of a prompt that ask one after
        the other are one use."""
        kept = self._kept.get(digest)
        if kept is None:
            return None
        if next(reversed(self._kept)) != digest:
            kept.score = together(kept.score, self._age)
            self._kept.move_to_end(digest)
        return kept.features

    def add(self, digest: bytes, features: Any, num_bytes: int, operations: int) -> None:
        """Keep the features of a picture, which took so many operations; others go for them."""
        self._kept[digest] = _Kept(features, num_bytes, worth(operations, num_bytes), self._age)
        self.nbytes += num_bytes
        while self.nbytes > self._max_bytes and len(self._kept) > 1:
            others = (each for each in self._kept if each != digest)
            size = self._kept.pop(min(others, key=lambda each: self._kept[each].rank)).num_bytes
            self.nbytes -= size
            self._age += size * ONE // self._max_bytes

    def clear(self) -> None:
        self._kept.clear()
        self.nbytes = 0
