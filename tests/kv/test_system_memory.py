"""What macOS and Linux say of their memory."""

import ctypes
import struct
import sys
from pathlib import Path

import pytest

from mlx_paged import system_memory
from mlx_paged.system_memory import available_memory, of_mach, of_meminfo

PAGE = 16_384
OFFSETS = {"free": 0, "active": 4, "inactive": 8, "wired": 12, "purges": 80, "purgeable": 88}
"""Bytes before some fields of ``vm_statistics64``, as a C compiler lays them out."""


class FakeMach:
    """Mach's functions. They fill a structure that no code of the package has laid out."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.num_ports = failing, 0
        self.pages = dict(free=3, active=1000, inactive=50, wired=10**4, purges=7, purgeable=200)

        def mach_host_self() -> int:
            self.num_ports += 1
            return 77

        def host_page_size(host, size) -> int:
            assert host.value == 77
            size._obj.value = PAGE
            return int(self.failing == "host_page_size")

        def host_statistics64(host, flavor, info, words) -> int:
            assert (host.value, flavor) == (77, 4) and words._obj.value >= 24
            filled = bytearray(4 * words._obj.value)
            for name, count in self.pages.items():
                struct.pack_into("<I", filled, OFFSETS[name], count)
            ctypes.memmove(info, bytes(filled), len(filled))
            return int(self.failing == "host_statistics64")

        self.mach_host_self = mach_host_self
        self.host_page_size = host_page_size
        self.host_statistics64 = host_statistics64


def test_macos_counts_free_inactive_and_purgeable_pages():
    mach = FakeMach()
    assert of_mach(mach) == (3 + 50 + 200) * PAGE
    mach.pages["free"] = 4
    assert of_mach(mach) == (4 + 50 + 200) * PAGE and mach.num_ports == 1


@pytest.mark.parametrize("failing", ["host_page_size", "host_statistics64"])
def test_a_mac_that_does_not_answer_tells_nothing(failing):
    assert of_mach(FakeMach(failing)) is None
    assert of_mach(object()) is None


def test_linux_has_a_line_of_kilobytes(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:     5 kB\nBuffers: 7 kB\n")
    assert of_meminfo(str(path)) == 5 * 1024
    path.write_text("MemTotal:  9 kB\n")
    assert of_meminfo(str(path)) is None
    assert of_meminfo(str(tmp_path / "missing")) is None


def test_the_system_that_runs_is_asked(monkeypatch):
    monkeypatch.setattr(system_memory, "of_mach", lambda: 11)
    monkeypatch.setattr(system_memory, "of_meminfo", lambda: 22)
    for name, answer in (("darwin", 11), ("linux", 22), ("win32", None)):
        monkeypatch.setattr(sys, "platform", name)
        assert available_memory() == answer


@pytest.mark.skipif(not Path(system_memory.MEMINFO).exists(), reason="Linux tells it")
def test_this_machine_has_some_memory():
    assert 0 < of_meminfo() < 1 << 50
