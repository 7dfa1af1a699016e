"""What MLX says of the memory of some Macs, for tests on any machine."""

import gc
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.kv.limits import _Limits

GB = 10**9
NO_LIMIT = 10**15
MACS = {  # memory, recommended working set, longest buffer
    "M1, 8 GB": (8_589_934_592, 5_726_633_984, 4_294_967_296),
    "M4 Pro, 24 GB": (25_769_803_776, 17_179_869_184, 14_302_248_960),
    "M3 Ultra, 512 GB": (549_755_813_888, 412_316_860_416, 309_237_645_312),
}


@dataclass
class FakeMac:
    """MLX's functions about memory, as they answer on a Mac.

    Attributes:
        others: bytes in use beside what this process really holds.
        available: bytes that macOS says it can give; None: all of the memory.
        calls: of `set_wired_limit` with the limit, and of `synchronize`.
        cached: limits that `set_cache_limit` was given, after the one that it found.
    """

    memory: int
    working_set: int
    longest_buffer: int
    others: int = 0
    available: int | None = None
    wired: int = 0
    calls: list[Any] = field(default_factory=list)
    cached: list[int] = field(default_factory=lambda: [NO_LIMIT])

    def device_info(self) -> dict[str, str | int]:
        return {
            "memory_size": self.memory,
            "max_recommended_working_set_size": self.working_set,
            "max_buffer_length": self.longest_buffer,
        }

    def set_wired_limit(self, limit: int) -> int:
        self.calls.append(limit)
        before, self.wired = self.wired, limit
        return before

    def set_cache_limit(self, limit: int) -> int:
        self.cached.append(limit)
        return self.cached[-2]


def fake_mac(monkeypatch: pytest.MonkeyPatch, name: str) -> FakeMac:
    """Let MLX speak of this Mac's memory, in which nobody has raised the wired limit; arrays stay
    where they are."""
    gc.collect()  # engines of earlier tests would restore their limit in this one
    monkeypatch.setattr("mlx_paged.kv.limits._limits", _Limits())
    mac = FakeMac(*MACS[name])
    active, synchronize = mx.get_active_memory, mx.synchronize

    def synchronized(stream: Any = None) -> None:
        mac.calls.append(("synchronize", stream))
        synchronize(stream)

    def available() -> int:
        return mac.memory if mac.available is None else mac.available

    monkeypatch.setattr("mlx_paged.system_memory.available_memory", available)
    monkeypatch.setattr(mx, "device_info", mac.device_info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: active() + mac.others)
    monkeypatch.setattr(mx, "set_wired_limit", mac.set_wired_limit)
    monkeypatch.setattr(mx, "set_cache_limit", mac.set_cache_limit)
    monkeypatch.setattr(mx, "synchronize", synchronized)
    return mac
