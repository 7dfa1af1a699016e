"""Recurrent states as the prefix cache and the disk have them: in 8 bits an element."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import mlx.core as mx

from mlx_paged.kv.eight_bits import DTYPES, Rows8, can_be_stored
from mlx_paged.runner.layer_states import States

SECOND = ".1"
"""Behind the name of an array, for the second array that it is stored as."""


@dataclass(frozen=True, slots=True)
class StoredStates:
    """The states of one sequence, layer by layer, each array of floating point in 8 bits."""

    layers: Sequence[Sequence[Rows8 | mx.array | None]]

    @classmethod
    def of(cls, states: States) -> "StoredStates":
        """Round states ``[1, ...]``; see :class:`Rows8`."""
        return cls(
            [
                [Rows8.of(a) if a is not None and can_be_stored(a) else a for a in layer]
                for layer in states
            ]
        )

    @property
    def states(self) -> States:
        """The states, rounded, as arrays of their own dtypes that are computed when they are
        used."""
        return [[a.array if isinstance(a, Rows8) else a for a in layer] for layer in self.layers]

    @property
    def arrays(self) -> list[mx.array]:
        """What is in memory."""
        found = list[mx.array]()
        for layer in self.layers:
            for each in layer:
                if isinstance(each, Rows8):
                    found += each.arrays
                elif each is not None:
                    found.append(each)
        return found

    def packed(self) -> bytes:
        """The states as bytes."""
        arrays = dict[str, mx.array]()
        known = {"lengths": ",".join(str(len(layer)) for layer in self.layers)}
        for i, layer in enumerate(self.layers):
            for j, each in enumerate(layer):
                name = f"{i}.{j}"
                if isinstance(each, Rows8):
                    arrays[name], arrays[name + SECOND] = each.arrays
                    known[name] = str(each.dtype)
                elif each is not None:
                    arrays[name] = each
        stream = BytesIO()
        mx.save_safetensors(stream, arrays, known)
        return stream.getvalue()

    @classmethod
    def unpacked(cls, content: bytes) -> "StoredStates":
        """The states of which :meth:`packed` made these bytes."""
        loaded: Any = mx.load(BytesIO(content), format="safetensors", return_metadata=True)
        arrays, known = loaded

        def read(name: str) -> Rows8 | mx.array | None:
            array: mx.array | None = arrays.get(name)
            if array is None or name not in known:
                return array
            return Rows8(array, arrays[name + SECOND], DTYPES[known[name]])

        lengths = map(int, known["lengths"].split(","))
        return cls([[read(f"{i}.{j}") for j in range(n)] for i, n in enumerate(lengths)])
