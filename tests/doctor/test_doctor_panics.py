"""The doctor names the kernel panics of the last days."""

import os
import time

from mlx_paged.doctor import machine
from mlx_paged.doctor.findings import Findings
from mlx_paged.doctor.panics import recent_panics


def test_reports_of_the_last_days_the_newest_first(tmp_path):
    now = time.time()
    for name, days in (("old.panic", 8), ("a.panic", 3), ("b.panic", 1), ("crash.ips", 0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now, now - days * 86_400))
    assert recent_panics(tmp_path) == ["b.panic", "a.panic"]
    (tmp_path / "Retired").mkdir()
    (tmp_path / "a.panic").rename(tmp_path / "Retired" / "a.panic")
    assert recent_panics(tmp_path) == ["b.panic", "a.panic"]
    assert recent_panics(tmp_path / "missing") == []


def test_the_page_names_them(monkeypatch):
    for panics in ([], ["panic-full-1.panic", "panic-full-2.panic"]):
        monkeypatch.setattr(machine, "recent_panics", lambda panics=panics: panics)
        found = Findings("machine")
        machine.check_machine(found, quick=True)
        named = [line for line in found.lines if "kernel panics" in line]
        assert len(named) == bool(panics)
        assert all(name in named[0] for name in panics)
        assert found.numbers.get("panics", []) == panics
