"""Measure every figure of README's table and of docs/benchmarks.md, and write the tables.

    python -m scripts.publish                 measure the parts that are missing, then write
    python -m scripts.publish --only joins    measure this part, again if it is there
    python -m scripts.publish --write         only write the tables of docs/benchmarks.json

Each part runs bench commands, one process each, with OpenBLAS preloaded on Linux. What they print
goes to docs/benchmarks.json, which has one commit: where the product or a bench differs from the
commit of the file, the file begins anew. A part is measured again where other processes computed
beside it, and the quieter run is kept. A table whose part is missing says so; README's table needs
all parts. Together they take about half an hour on two cores.
"""

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.machine import cores, describe
from bench.names import REAL, real_model
from mlx_paged.cli import COUNT, Parser
from scripts.published_tables import HEADLINE, PARTS, RESULTS, ROOT, written

PRODUCT = ("mlx_paged", "csrc", "metal", "python", "CMakeLists.txt", "setup.py", "bench")
"""What decides the figures: it has no changes that are not committed."""

BLAS = "libopenblas.so.0"
BUSY = 0.15  # cores that other processes may use on average
UNUSED = {"spikes", "probes", "phases", "failures", "skipped", "counts", "ratios", "tokens_digest"}
"""What the tables need of a bench's last line is all but this."""

Record = dict[str, Any]


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


def check() -> None:
    """Before anything is measured: ValueError says what is missing."""
    if changed := git("status", "--porcelain", "--", *PRODUCT).stdout.split("\n")[:-1]:
        raise ValueError(f"{changed[0][3:]} has changes: expected a commit of them")
    for name in REAL:
        real_model(name)
    for package in ("llama-cpp-python", "gguf"):
        try:
            version(package)
        except PackageNotFoundError:
            raise ValueError(f"{package} is missing: pip install '.[peers]'") from None
    if platform.system() == "Linux":
        try:
            ctypes.CDLL(BLAS)
        except OSError:
            raise ValueError(f"{BLAS} is missing (Debian: libopenblas0-pthread)") from None


def stored(commit: str) -> Record:
    """The results so far, if they are of the same product; otherwise none."""
    if RESULTS.exists():
        found: Record = json.loads(RESULTS.read_text())
        if not git("diff", "--quiet", found["commit"], commit, "--", *PRODUCT).returncode:
            return found
    packages = ("mlx", "mlx-lm", "llama-cpp-python")
    machine = {key: value for key, value in describe().items() if key != "blas"}
    versions = {package: version(package) for package in packages}
    return {"commit": commit, "machine": machine | versions, "parts": {}}


def busy_seconds() -> float | None:
    """Seconds in which the machine's cores computed, all processes together; None if unknown."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except OSError:
        return None
    idle, waiting = 3, 4
    ticks = [int(field) for i, field in enumerate(fields) if i not in (idle, waiting)]
    return sum(ticks) / float(os.sysconf("SC_CLK_TCK"))


def measured(commands: Sequence[str]) -> Record:
    """What the commands print in their last lines, and how many cores others used meanwhile."""
    began, busy, own = time.monotonic(), busy_seconds(), sum(os.times()[:4])
    results = [run(command) for command in commands]
    seconds = time.monotonic() - began
    others = None
    if busy is not None and (now := busy_seconds()) is not None:
        others = round(max(0.0, now - busy - (sum(os.times()[:4]) - own)) / seconds, 2)
    return {
        "others_cores": others,
        "seconds": round(seconds),
        "runs": [{"command": c, "result": r} for c, r in zip(commands, results, strict=True)],
    }


def run(command: str) -> Record:
    """The last line of a bench; RuntimeError if it fails."""
    print(f"python -m {command}", file=sys.stderr, flush=True)
    words = [sys.executable, "-m", *command.split()]
    env = os.environ | ({"LD_PRELOAD": BLAS} if platform.system() == "Linux" else {})
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"python -m {command}: status {done.returncode}: {reason}")
    record: Record = used(json.loads(done.stdout.splitlines()[-1]))
    return record


def used(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: used(each) for key, each in value.items() if key not in UNUSED}
    return [used(each) for each in value] if isinstance(value, list) else value


def quietest(commands: Sequence[str], most: int) -> Record:
    """Of at most so many runs, the first one beside which little else computed; if none is such a
    run, the quietest."""
    tries = list[Record]()
    while len(tries) < most:
        tries.append(measured(commands))
        others = tries[-1]["others_cores"]
        if others is None or others <= BUSY:
            break
        print(f"other processes used {others} of {cores()} cores", file=sys.stderr)
    found = min(tries, key=lambda each: each["others_cores"] or 0.0)
    return found | {"tries": len(tries)}


def write(results: Record) -> None:
    """The tables, into every page."""
    if missing := [name for name in HEADLINE if name not in results["parts"]]:
        print(f"README's table stays: not measured: {', '.join(missing)}")
    for page, text in written(results).items():
        page.write_text(text)
        print(f"wrote {page.relative_to(ROOT)}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="scripts.publish", description=(__doc__ or "").splitlines()[0])
    choice = parser.add_mutually_exclusive_group().add_argument
    choice("--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    choice("--write", action="store_true", help=f"measure nothing; tables of {RESULTS.name}")
    tries = "times that a part is measured beside other processes (default: %(default)s)"
    parser.add_argument("--tries", type=COUNT, default=2, metavar="N", help=tries)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        if args.write:
            write(json.loads(RESULTS.read_text()))
            return 0
        check()
        results = stored(git("rev-parse", "HEAD").stdout.strip())
        for name in args.only or [name for name in PARTS if name not in results["parts"]]:
            results["parts"][name] = quietest(PARTS[name].commands, args.tries)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write(results)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"scripts.publish: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
