"""Service level objectives: limits on what the client of each stream sees."""

from dataclasses import dataclass

import numpy as np

from bench.serving.run import Stream

UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Slo:
    """Limits in seconds; None: no limit.

    Attributes:
        ttft: from the scheduled arrival to the first token.
        itl: between any two consecutive tokens.
        tpot: mean time between tokens.
    """

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """From e.g. ``ttft=500ms,itl=0.1s``; a bare number is milliseconds.

        Raises:
            ValueError: anything else.
        """
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            seconds = _seconds(value)
            if name not in ("ttft", "itl", "tpot") or name in limits or seconds is None:
                raise ValueError(
                    f"expected limits on ttft, itl or tpot, e.g. ttft=500ms,itl=100ms, got {text!r}"
                )
            limits[name] = seconds
        return cls(**limits)

    def holds(self, stream: Stream) -> bool:
        """Whether a stream has ended and kept every limit."""
        if not stream.is_done:
            return False
        gaps = np.diff(stream.times_s)
        seen = {
            "ttft": stream.times_s[0] - stream.arrival_s,
            "itl": float(gaps.max(initial=0.0)),
            "tpot": float(gaps.mean()) if gaps.size else 0.0,
        }
        return all((limit := getattr(self, name)) is None or seen[name] <= limit for name in seen)


def _seconds(text: str) -> float | None:
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * UNITS.get(unit, 1e-3)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
