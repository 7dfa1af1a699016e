"""What the system tells of itself: its build, memory, swap, power mode, other programs with MLX."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from mlx_paged.system_memory import available_memory

GB = 1e9
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}  # of `sysctl vm.swapusage`
SECONDS_TO_ANSWER = 5
BACKENDS = "mlx-metal", "mlx-cuda-13", "mlx-cuda-12", "mlx-cpu", "mlx"
"""Packages that have MLX's library, the first of which counts."""

POWER_MODES = "automatic", "low power", "high power"
PROCESSES = "ps", "-axww", "-o", "pid=,ppid=,rss=,args="
MEMINFO = Path("/proc/meminfo")
MLX = re.compile(r"mlx|lm studio", re.IGNORECASE)


def system_facts(platform: str = sys.platform) -> dict[str, str]:
    """By name: what the page says of the system. What it does not tell is left out."""
    found = {"wheel of MLX": wheel_tag()}
    if platform == "darwin":
        found |= {
            "macOS build": answer("sw_vers", "-buildVersion"),
            "wired limit": wired_limit(answer("sysctl", "-n", "iogpu.wired_limit_mb")),
            "power mode": power_mode(answer("pmset", "-g")),
        }
        swap = darwin_swap(answer("sysctl", "-n", "vm.swapusage"))
    else:
        swap = linux_swap(MEMINFO.read_text() if MEMINFO.exists() else "")
    free = available_memory()
    found["available memory"] = "" if free is None else f"{free / GB:.1f} GB"
    found["swap"] = swap
    found["other MLX processes"] = other_programs(answer(*PROCESSES), os.getpid())
    return {name: text for name, text in found.items() if text}


def answer(*command: str) -> str:
    """What a command prints, without the white space around it; nothing if it fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS_TO_ANSWER,
            env=os.environ | {"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout.strip()


def wheel_tag() -> str:
    """The package of MLX's library and the platform of its wheel: a wheel for an older macOS lacks
    kernels for newer GPUs."""
    for name in BACKENDS:
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        tags = re.findall(r"^Tag: (\S+)", package.read_text("WHEEL") or "", re.MULTILINE)
        return f"{name} {package.version} {' '.join(tags) or 'without a tag'}"
    return ""


def wired_limit(megabytes: str) -> str:
    """0 is the system's own choice."""
    if not megabytes.isdecimal():
        return ""
    return f"{megabytes} MB" if int(megabytes) else "macOS's own"


def power_mode(settings: str) -> str:
    """Of ``pmset -g``. Some Macs have the line `powermode`, others `lowpowermode`."""
    match = re.search(r"^\s*(?:low)?powermode\s+(\d+)", settings, re.MULTILINE)
    if match is None:
        return ""
    number = int(match[1])
    return POWER_MODES[number] if number < len(POWER_MODES) else str(number)


def darwin_swap(usage: str) -> str:
    """Of ``sysctl -n vm.swapusage``."""
    sizes = {
        name: float(number.replace(",", ".")) * UNITS[unit]
        for name, number, unit in re.findall(r"(total|used) = ([\d.,]+)([KMG])", usage)
    }
    return _used(sizes["used"], sizes["total"]) if len(sizes) == 2 else ""


def linux_swap(meminfo: str) -> str:
    """Of ``/proc/meminfo``."""
    total, free = (re.search(rf"^Swap{n}: +(\d+) kB", meminfo, re.M) for n in ("Total", "Free"))
    if total is None or free is None:
        return ""
    return _used((int(total[1]) - int(free[1])) * 2**10, int(total[1]) * 2**10)


def _used(used: float, total: float) -> str:
    return f"{used / GB:.1f} of {total / GB:.1f} GB used"


def other_programs(processes: str, own: int) -> str:
    """Of ``ps``, as `PROCESSES` calls it: programs with MLX in their name, without this process and
    those that started it. No other arguments are named: an issue is public."""
    fields = [line.split(maxsplit=3) for line in processes.splitlines()]
    known = {int(pid): (int(parent), int(kib), rest) for pid, parent, kib, *rest in fields}
    own_ones = set[int]()
    while own in known and own not in own_ones:
        own_ones.add(own)
        own = known[own][0]
    pids: defaultdict[str, list[int]] = defaultdict(list)
    for pid, (_, _, rest) in known.items():
        if pid not in own_ones and rest and MLX.search(name := program(rest[0])):
            pids[name].append(pid)
    found = [
        f"{name} ({sum(known[pid][1] for pid in of_name) * 2**10 / GB:.1f} GB resident,"
        f" pid {' '.join(map(str, of_name))})"
        for name, of_name in pids.items()
    ]
    return ", ".join(found) or ("none" if known else "")


def program(command: str) -> str:
    """The name of what a command line runs: for Python the module or the script."""
    if app := re.match(r"/.*/([^/]+)\.app/Contents/MacOS/", command):
        if app[1].lower() != "python":
            return app[1]
        command = command[app.end() :]
    executable, *arguments = command.split()
    name = executable.rpartition("/")[2]
    if not name.lower().startswith("python"):
        return name
    options = iter(arguments)
    for option in options:
        if option == "-m":
            return next(options, name)
        if option in ("-X", "-W"):
            next(options, None)
        elif option == "-c":
            return name
        elif not option.startswith("-"):
            return option.rpartition("/")[2]
    return name
