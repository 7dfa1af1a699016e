"""The facts of the system on the doctor's page, from what the commands of macOS and Linux print."""

import importlib.metadata
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mlx_paged.doctor import machine, system
from mlx_paged.doctor.findings import Findings

OLD_PMSET = """\
System-wide power settings:
 SleepDisabled\t\t1
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 sleep                1 (sleep prevented by bluetoothd, powerd, sharingd)
 tcpkeepalive         1
 lowpowermode         1
 womp                 1
"""
"""Of an M1; newer Macs have the line `powermode`."""

NEW_PMSET = OLD_PMSET.replace("lowpowermode         1", "powermode            2")
SWAP = "total = 13312.00M  used = 11625.69M  free = 1686.31M  (encrypted)"
IN_ITALY = SWAP.replace(".", ",")

PROCESSES = """\
    1     0  12345 /sbin/launchd
  600     1   5000 -zsh
  700   600   9000 /opt/py/bin/python3 /opt/py/bin/mlx_paged doctor
  701   700 900000 /opt/py/bin/python3 -m mlx_paged.doctor --only machine
  702     1      0 (mlx_gone)
  703     1      0
  812     1 8886718 /opt/homebrew/Cellar/python@3.12/3.12.7/Frameworks\
/Python.framework/Versions/3.12/Resources/Python.app/Contents\
/MacOS/Python -X dev -m mlx_lm.server --model /Users/ada/secret
  813     1 2000000 /Users/a/venv/bin/python3.12 /Users/a/venv/bin/mlx_lm.generate --prompt key
  814     1 1000000 /Applications/LM Studio.app/Contents/MacOS/LM Studio
  815     1  500000 /Applications/LM Studio.app/Contents/Frameworks\
/LM Studio Helper.app/Contents/MacOS/LM Studio Helper --type=utility
  816     1  500000 /Applications/LM Studio.app/Contents/Frameworks\
/LM Studio Helper.app/Contents/MacOS/LM Studio Helper --type=gpu-process
  817     1  4000 vim /Users/ada/mlx/notes.txt
  818     1  4000 python -c import mlx.core
"""
OTHERS = (
    "(mlx_gone) (0.0 GB resident, pid 702), mlx_lm.server (9.1 GB resident, pid 812),"
    " mlx_lm.generate (2.0 GB resident, pid 813), LM Studio (1.0 GB resident, pid 814),"
    " LM Studio Helper (1.0 GB resident, pid 815 816)"
)

ANSWERS = {
    ("sw_vers", "-buildVersion"): "25C56\n",
    ("sysctl", "-n", "iogpu.wired_limit_mb"): "0\n",
    ("sysctl", "-n", "vm.swapusage"): SWAP + "\n",
    ("pmset", "-g"): OLD_PMSET,
    system.PROCESSES: PROCESSES.replace("  701 ", f"{os.getpid()} ", 1),
}


@pytest.fixture
def on_a_mac(monkeypatch) -> None:
    def distribution(name):
        if name != "mlx-metal":
            raise importlib.metadata.PackageNotFoundError(name)
        wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-macosx_26_0_arm64\n"
        return SimpleNamespace(version="0.32.4", read_text=lambda file: wheel)

    monkeypatch.setattr(system, "answer", lambda *command: ANSWERS[command].strip())
    monkeypatch.setattr(system, "distribution", distribution)
    monkeypatch.setattr(system, "available_memory", lambda: 8_000_000_000)


def test_a_mac_tells_all_of_them(on_a_mac):
    assert system.system_facts("darwin") == {
        "wheel of MLX": "mlx-metal 0.32.4 py3-none-macosx_26_0_arm64",
        "macOS build": "25C56",
        "wired limit": "macOS's own",
        "power mode": "low power",
        "available memory": "8.0 GB",
        "swap": "12.2 of 14.0 GB used",
        "other MLX processes": OTHERS,
    }


def test_the_page_and_the_json_have_them(on_a_mac, monkeypatch):
    monkeypatch.setattr(machine, "system_facts", lambda: system.system_facts("darwin"))
    found = Findings("machine")
    machine.check_machine(found, quick=True)
    assert "macOS build 25C56, wired limit macOS's own, power mode low power" in found.text()
    assert found.numbers["state"]["power mode"] == "low power"
    assert "secret" not in found.text() and "key" not in found.text()


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        (OLD_PMSET, "low power"),
        (NEW_PMSET, "high power"),
        (OLD_PMSET.replace("mode         1", "mode         0"), "automatic"),
        (OLD_PMSET.replace("mode         1", "mode         7"), "7"),
        (" womp                 1", ""),
    ],
)
def test_both_names_of_the_power_mode(settings, mode):
    assert system.power_mode(settings) == mode


@pytest.mark.parametrize(
    ("usage", "text"),
    [
        (SWAP, "12.2 of 14.0 GB used"),
        (IN_ITALY, "12.2 of 14.0 GB used"),
        ("total = 0.00M  used = 0.00M  free = 0.00M  (encrypted)", "0.0 of 0.0 GB used"),
        ("sysctl: unknown oid 'vm.swapusage'", ""),
    ],
)
def test_swap_of_a_mac(usage, text):
    assert system.darwin_swap(usage) == text


def test_a_limit_that_somebody_set_is_told():
    assert system.wired_limit("57344") == "57344 MB"
    assert system.wired_limit("") == ""


def test_linux_tells_what_applies(monkeypatch, tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(
        "SwapCached:            0 kB\nSwapTotal:     4194300 kB\nSwapFree: 3194300 kB\n"
    )
    monkeypatch.setattr(system, "MEMINFO", meminfo)
    found = system.system_facts("linux")
    assert found["swap"] == "1.0 of 4.3 GB used"
    assert {"macOS build", "wired limit", "power mode"} & found.keys() == set()
    meminfo.write_text("MemTotal: 1 kB\n")
    assert "swap" not in system.system_facts("linux")


def test_what_the_system_does_not_tell_is_left_out(monkeypatch):
    def missing(command, **options):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(system, "available_memory", lambda: None)
    assert system.system_facts("darwin").keys() == {"wheel of MLX"}
    assert system.answer("sw_vers") == ""


def test_a_command_that_fails_or_hangs_tells_nothing(monkeypatch):
    assert system.answer(sys.executable, "-c", "print(3); raise SystemExit(1)") == ""
    assert system.answer(sys.executable, "-c", "print(3)") == "3"
    language = "import os; print(os.environ['LC_ALL'])"
    assert system.answer(sys.executable, "-c", language) == "C"
    monkeypatch.setattr(system, "SECONDS_TO_ANSWER", 0.01)
    assert system.answer(sys.executable, "-c", "import time; time.sleep(9)") == ""


def test_processes_of_this_system_are_read():
    child = subprocess.Popen([sys.executable, "-c", "input()", "x"], stdin=subprocess.PIPE)
    try:
        listed = system.answer(*system.PROCESSES)
        if not listed:
            pytest.skip("no `ps` here")
        assert f"{child.pid}" in listed
        assert system.other_programs(listed, os.getpid())
    finally:
        child.communicate()
