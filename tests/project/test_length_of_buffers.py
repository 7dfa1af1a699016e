"""Commands set the length of MLX's command buffers on an M1 to M4, before MLX is imported."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mlx_paged import command_buffers, starting
from mlx_paged.command_buffers import ELEMENTS, OPERATIONS


@pytest.fixture
def of_chip(monkeypatch):
    """Let this be a Mac with a chip of this name, whose environment has these variables."""

    def be(name: str, **environment: str) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        told = SimpleNamespace(stdout=f"{name}\n")
        monkeypatch.setattr(subprocess, "run", lambda command, **_: told)
        for variable in (OPERATIONS, ELEMENTS):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)

    return be


@pytest.mark.parametrize(
    ("chip", "expected"),
    [
        *(("Apple M1", "1000"), ("Apple M2 Pro", "1000"), ("Apple M3 Ultra", "1000")),
        *(("Apple M4 Max", "1000"), ("Apple M5", None), ("Apple M10", None), ("Apple M14", None)),
        *(("Intel(R) Core(TM) i7", None), ("", None)),
    ],
)
def test_a_start_sets_it_on_an_m1_to_m4(of_chip, chip, expected):
    of_chip(chip)
    seen = []
    with pytest.raises(SystemExit):
        starting.start(lambda: seen.append(os.environ.get(OPERATIONS)) or 0)
    assert seen == [expected]


def test_what_the_user_has_set_stays(of_chip):
    of_chip("Apple M4", **{OPERATIONS: "7"})
    command_buffers.lengthen()
    assert os.environ[OPERATIONS] == "7"


@pytest.mark.parametrize("error", [OSError("no such file"), subprocess.TimeoutExpired("sysctl", 5)])
def test_a_chip_that_nobody_names_keeps_mlx_s_length(of_chip, monkeypatch, error):
    def run(*_, **__):
        raise error

    of_chip("")
    monkeypatch.setattr(subprocess, "run", run)
    command_buffers.lengthen()
    assert OPERATIONS not in os.environ


def test_elsewhere_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    assert command_buffers.chip_name() == ""


@pytest.mark.parametrize(("given", "expected"), [(None, 50), ("400", 400), ("many", 50)])
def test_elements_are_those_that_hold(of_chip, given, expected):
    of_chip("Apple M1", **({ELEMENTS: given} if given else {}))
    assert command_buffers.most_elements() == expected << 20


def test_the_commands_set_it_before_they_import_mlx():
    """In a process of its own: the modules that are imported when each command sets it."""
    program = """
import json, runpy, sys
from mlx_paged import command_buffers
seen = {}
for name in ("generate", "server", "terminal", "run", "bench"):
    def lengthen():
        seen[name] = "mlx.core" in sys.modules
        raise KeyboardInterrupt
    command_buffers.lengthen = lengthen
    sys.argv = ["mlx_paged", *(["bench", "memory"] if name == "bench" else [])]
    sys.orig_argv = sys.argv.copy()
    module = "mlx_paged" if name == "bench" else f"mlx_paged.{name}"
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit:
        pass
print(json.dumps(seen))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,  # a command that starts does not end
    )
    assert json.loads(done.stdout) == dict.fromkeys(
        ("generate", "server", "terminal", "run", "bench"), False
    ), done.stderr
