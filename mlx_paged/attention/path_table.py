"""Measured times of the two paths of attention, and which is faster between the measurements."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Self

import numpy as np

VERSION = 1


class AttentionPath(StrEnum):
    """How queries are attended over a sequence's blocks."""

    PAGED = "paged"  # the paged op, through block tables
    GATHER = "gather"  # blocks gathered once, then MLX's own attention


@dataclass(frozen=True, slots=True)
class Heads:
    """What tells one kind of attention from another.

    Attributes:
        device: "cpu" or "gpu"; anything else was never measured.
        dtype: of the pool, such as "float16".
        group: query heads that share a KV head.
        head_dim, v_head_dim: of keys and of values.
    """

    device: str
    dtype: str
    group: int
    head_dim: int
    v_head_dim: int

    def distance(self, other: "Heads") -> float:
        """How unlike two kinds of the same device and dtype are: octaves of their sizes."""
        pairs = zip(self._sizes(), other._sizes(), strict=True)
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    def _sizes(self) -> tuple[int, int, int]:
        return self.group, max(self.head_dim, 1), max(self.v_head_dim, 1)


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of `length` query tokens at the end of a context of `context` tokens."""

    length: int
    context: int
    paged_ms: float
    gather_ms: float

    @property
    def gain(self) -> float:
        """Above 0 where the paged op is the faster one: the logarithm of how many times."""
        return math.log(self.gather_ms / self.paged_ms)


class _Surface:
    """The gain over lengths and contexts, linear in their logarithms between the measurements and
    constant beyond them."""

    def __init__(self, timings: Iterable[Timing]) -> None:
        rows: dict[int, list[Timing]] = defaultdict(list)
        for timing in sorted(timings, key=lambda t: (t.length, t.context)):
            rows[timing.length].append(timing)
        self.log_lengths = [math.log(length) for length in rows]
        self.rows = [
            ([math.log(t.context) for t in row], [t.gain for t in row]) for row in rows.values()
        ]

    def gain(self, length: int, context: int) -> float:
        log_context = math.log(max(context, 1))
        gains = [np.interp(log_context, contexts, gains) for contexts, gains in self.rows]
        return float(np.interp(math.log(max(length, 1)), self.log_lengths, gains))


class PathTable:
    """Which path is faster, as measured on one machine.

    Args:
        timings: by kind of heads.
        about: what was measured on what, for people.
    """

    def __init__(
        self, timings: Mapping[Heads, Iterable[Timing]], about: Mapping[str, Any] | None = None
    ) -> None:
        self.timings = {heads: list(rows) for heads, rows in timings.items()}
        self.about = dict(about or {})
        self._surfaces = {heads: _Surface(rows) for heads, rows in self.timings.items() if rows}

    def faster(self, heads: Heads, length: int, context: int) -> AttentionPath | None:
        """The faster path for `length` query tokens at the end of `context`; None: not known,
        because nothing of this device and dtype was measured.

        Of the kinds measured the one most like `heads` counts.
        """
        alike = [
            known
            for known in self._surfaces
            if (known.device, known.dtype) == (heads.device, heads.dtype)
        ]
        if not alike:
            return None
        nearest = min(alike, key=heads.distance)
        gain = self._surfaces[nearest].gain(length, context)
        return AttentionPath.PAGED if gain >= 0 else AttentionPath.GATHER

    def updated(self, newer: "PathTable") -> "PathTable":
        """This table with the kinds of `newer` in place of its own."""
        return PathTable(self.timings | newer.timings, newer.about)

    def as_json(self) -> dict[str, Any]:
        """What `from_json` takes back."""
        names = [field.name for field in fields(Timing)]
        kinds = [
            asdict(heads) | {"timings": [[getattr(row, name) for name in names] for row in rows]}
            for heads, rows in self.timings.items()
        ]
        return {"version": VERSION, "about": self.about, "columns": names, "kinds": kinds}

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """The table that `as_json` gave.

        Raises:
            ValueError: it is none, or one of another version.
        """
        if not isinstance(content, dict) or content.get("version") != VERSION:
            found = content.get("version") if isinstance(content, dict) else None
            raise ValueError(f"its version is {found!r}: expected {VERSION}")
        try:
            timings = {_heads(kind): _timings(kind["timings"]) for kind in content["kinds"]}
            return cls(timings, content.get("about"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"it holds no times ({type(error).__name__}: {error})") from error


def _heads(kind: Mapping[str, Any]) -> Heads:
    device, dtype = str(kind["device"]), str(kind["dtype"])
    group, head_dim, v_head_dim = (int(kind[n]) for n in ("group", "head_dim", "v_head_dim"))
    if group < 1 or head_dim < 0 or v_head_dim < 0:
        raise ValueError(f"heads of group {group}, head_dim {head_dim}, v_head_dim {v_head_dim}")
    return Heads(device, dtype, group, head_dim, v_head_dim)


def _timings(rows: Iterable[Iterable[Any]]) -> list[Timing]:
    timings = []
    for length, context, paged_ms, gather_ms in rows:
        timing = Timing(int(length), int(context), float(paged_ms), float(gather_ms))
        if not (
            timing.length >= 1
            and timing.context >= 1
            and all(0 < ms < math.inf for ms in (timing.paged_ms, timing.gather_ms))
        ):
            raise ValueError(f"{timing}")
        timings.append(timing)
    return timings
