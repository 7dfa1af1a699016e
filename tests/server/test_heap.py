"""A server gives memory back that long bodies have left."""

import platform
import re
import subprocess
import sys
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


ARENAS_OF_THREADS = """
import ctypes, threading
from mlx_paged.server import heap
{limit}
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(8)
def allocate():
    together.wait()
    libc.malloc(ctypes.c_size_t(1000))
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fopen.restype = ctypes.c_void_p
file = libc.fopen(b"/dev/stdout", b"w")
libc.malloc_info(0, ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
@pytest.mark.parametrize("limit", ["heap.limit_arenas()", ""], ids=["limited", "not limited"])
def test_threads_share_few_arenas(limit):
    code = ARENAS_OF_THREADS.format(limit=limit)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    arenas = done.stdout.count("<heap nr=")
    assert (arenas <= heap.ARENAS) == bool(limit)
