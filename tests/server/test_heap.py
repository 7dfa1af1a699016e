"""A server gives memory back that long bodies have left."""

import re
from pathlib import Path

import pytest

from mlx_paged.server import heap
from tests.support.commands.server_harness import live, wait_until

PROCESS = Path("/proc/self/status")


def resident() -> int:
    found = re.search(r"^VmRSS:\s+(\d+)", PROCESS.read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.skipif(not PROCESS.exists(), reason="reads /proc")
def test_freed_memory_below_memory_in_use_goes_back(monkeypatch):
    pieces = [bytes([1]) * 50_000 for _ in range(3000)]
    kept = pieces[::50]
    pieces.clear()
    held = resident()
    monkeypatch.setattr(heap, "EVERY_S", 0.05)
    with live():
        wait_until(lambda: resident() < held - 50_000_000)
    assert len(kept) == 60
