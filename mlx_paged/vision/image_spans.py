"""The images of a prompt, and the tokens that stand for them. Knows no mlx."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

WORDS = 4  # of a picture's digest; its tokens take them in turn
WORD_BITS = 62


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """An image, or several images that the model sees together.

    Attributes:
        digest: 32 bytes, a hash of all that its features depend on.
        tokens: ``[m]`` int32, a prompt that holds the picture.
        rows: ``[n]``, the tokens that the features of the picture replace.
        inputs: arguments of the model's ``get_input_embeddings``; NumPy arrays, which any thread
            may have made.
    """

    digest: bytes
    tokens: Int32Array
    rows: npt.NDArray[np.intp]
    inputs: dict[str, Any]

    @property
    def token_keys(self) -> list[int]:
        """What stands for its tokens where equal tokens mean equal K/V: no token has such an id,
        and no other picture has all of them."""
        words = [int.from_bytes(self.digest[i * 8 : i * 8 + 8], "little") for i in range(WORDS)]
        ids = [(1 << WORD_BITS) | (word >> (64 - WORD_BITS)) for word in words]
        return [ids[i % WORDS] for i in range(len(self.rows))]


class ImageSpans:
    """The pictures of a prompt, and the tokens that stand for them.

    Attributes:
        keys: the prompt's tokens, those of pictures replaced by :attr:`Picture.token_keys`.
        features: ``[P]`` int32, for each token the number of its feature among those of all
            pictures; -1: the token has none.
        positions: ``[3, P]`` int32, of the tokens in time, height and width; None: the model counts
            tokens.
        delta: a token after the prompt has its index plus this number as its position.
        first: for each picture the number of its first feature, and the number of all features.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        pictures: Sequence[Picture],
        is_image: npt.NDArray[np.bool_],
        positions: Int32Array | None = None,
        delta: int = 0,
    ) -> None:
        self.pictures = list(pictures)
        self.positions, self.delta = positions, delta
        self.first = np.cumsum([0, *(len(picture.rows) for picture in pictures)])
        at = np.flatnonzero(is_image)
        assert len(at) == self.first[-1], "each image token has one feature"
        self.features = np.full(len(tokens), -1, np.int32)
        self.features[at] = np.arange(len(at), dtype=np.int32)
        self.keys = list(tokens)
        for i, key in zip(at, chain(*(each.token_keys for each in pictures)), strict=True):
            self.keys[i] = key

    @property
    def nbytes(self) -> int:
        """Bytes of the pictures' inputs."""
        return sum(size_of([*picture.inputs.values()]) for picture in self.pictures)


def size_of(value: Any) -> int:
    """Bytes of the arrays in this."""
    if isinstance(value, dict | list | tuple):
        return sum(map(size_of, value.values() if isinstance(value, dict) else value))
    return getattr(value, "nbytes", 0)
