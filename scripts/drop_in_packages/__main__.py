"""Runs packages that use mlx-lm without and with the patch, and prints a table of the results.

    python -m scripts.drop_in_packages [--only NAME ...] [--keep DIR] [--json FILE]

Each package gets a fresh environment with the tested mlx-lm. Its workload calls the package's own
functions and commands on the demo model. Results are text, tokens, numbers and arrays.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.drop_in_packages.environments import Environment, InstallError, build_wheel
from scripts.drop_in_packages.packages import PACKAGES, Package
from scripts.drop_in_packages.tiny_model import NO_NETWORK, write_model

WORKLOADS = Path(__file__).parent / "workloads"
RUNS: dict[str, list[str]] = {"stock": [], "patched": ["-m", "mlx_paged.run"]}
RTOL, ATOL = 1e-4, 1e-5
"""Of numbers in results, float32 all: another order of summation moves them by about 1e-5."""
TIMEOUT = 900
PROBE = """
import atexit, os, signal, sys

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so a server's end is one, too

@atexit.register
def report():
    if cache := sys.modules.get("mlx_lm.models.cache"):
        with open(os.environ["DROP_IN_PROBE"], "a") as file:
            file.write(cache.make_prompt_cache.__module__ + "\\n")
"""
"""The environment's sitecustomize: each process tells at its end who makes its caches."""


@dataclass
class Row:
    """A line of the table."""

    package: str
    version: str = ""
    installs: str = ""
    workload: str = ""
    stock: str = ""
    patched: str = ""
    differences: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def equal(self) -> str:
        if not self.stock:
            return ""
        if any(error.startswith("exit status") for error in self.errors):
            return "the stock run fails"
        return "yes" if not self.differences else f"{len(self.differences)} differ"


def main() -> None:
    parser = argparse.ArgumentParser("drop_in_packages", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PACKAGES, metavar="NAME", help="of these only")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the environments here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        wheel = build_wheel(folder)
        if not (model := folder / "model").exists():
            write_model(model)
        rows = []
        for name in args.only or PACKAGES:
            rows.append(row := tried(name, PACKAGES[name], folder, wheel))
            print(f"{name} {row.version}: {row.installs}, equal: {row.equal}", flush=True)
            print("".join(f"    {line}\n" for line in row.differences), end="", flush=True)
            if not args.keep:
                shutil.rmtree(folder / name, ignore_errors=True)
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    sys.exit(1 if any(row.differences for row in rows) else 0)


def tried(name: str, package: Package, folder: Path, wheel: Path) -> Row:
    """Install one package and run its workload both ways."""
    row = Row(name)
    try:
        environment = Environment(folder / name, name, package, wheel)
    except InstallError as error:
        row.installs = f"no: {error}"
        return row
    row.version = environment.version()
    row.installs = f"forced ({environment.refusal})" if environment.refusal else "yes"
    script = WORKLOADS / f"try_{package.workload}.py"
    row.workload = script.read_text().partition('"""')[2].partition('"""')[0].strip()
    found = {run: results(environment, run, script, folder / "model") for run in RUNS}
    row.stock, row.patched = (summary(found[run]) for run in RUNS)
    row.differences = differences(found["stock"], found["patched"])
    row.errors = [
        f"{key}: {value['error']}" for key, value in found["stock"].items() if failed(value)
    ]
    return row


def results(environment: Environment, run: str, script: Path, model: Path) -> dict[str, Any]:
    """The results of one run by name; its exit status and who made its caches are among them."""
    work = environment.folder / "work"  # the same name for both: some output is as wide as names
    shutil.rmtree(work, ignore_errors=True)
    for folder in (work / "probe", work / "home", work / "data"):
        folder.mkdir(parents=True)
    (work / "probe" / "sitecustomize.py").write_text(PROBE)
    variables = {"PYTHONPATH": str(work / "probe"), "DROP_IN_PROBE": str(work / "probe.txt")}
    variables |= {"HOME": str(work / "home"), "PYTHONHASHSEED": "0", **NO_NETWORK}
    variables |= {"PATH": f"{environment.python.parent}{os.pathsep}{os.environ['PATH']}"}
    file = work / "results.jsonl"
    file.touch()
    command: list[str | Path] = [environment.python, *RUNS[run], script, model, work / "data", file]
    try:
        with (work / "log.txt").open("w") as log:
            status: Any = subprocess.run(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                timeout=TIMEOUT,
                cwd=work,
                env=os.environ | variables,
            ).returncode
    except subprocess.TimeoutExpired:
        status = "no end"
    found = {line["name"]: line["value"] for line in map(json.loads, file.open())}
    last = (work / "log.txt").read_text().strip().splitlines()[-1:]
    found["exit status"] = {"error": f"{status}: {last}"} if status else 0
    makers = (work / "probe.txt").read_text().split() if (work / "probe.txt").exists() else []
    wrong = [maker for maker in makers if maker.startswith("mlx_paged") != (run == "patched")]
    found["processes that are not as they should be"] = len(wrong)
    found["processes"] = len(makers) or {"error": "no process told who makes its caches"}
    shutil.rmtree(environment.folder / f"work_{run}", ignore_errors=True)
    work.rename(environment.folder / f"work_{run}")
    return found


def failed(value: Any) -> bool:
    return isinstance(value, dict) and "error" in value


def summary(found: dict[str, Any]) -> str:
    errors = sum(map(failed, found.values()))
    return f"{len(found) - 3} results" + (f", {errors} errors" if errors else "")


def differences(stock: dict[str, Any], patched: dict[str, Any]) -> list[str]:
    lines = []
    for name in stock | patched:
        before, after = stock.get(name, "missing"), patched.get(name, "missing")
        if not same(before, after):
            lines.append(f"{name}: {shortened(before)} -> {shortened(after)}")
    return lines


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal; numbers within the tolerance."""
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, float | int) and isinstance(other, float | int)
        both_nan = numbers and math.isnan(one) and math.isnan(other)
        return numbers and (both_nan or math.isclose(one, other, rel_tol=RTOL, abs_tol=ATOL))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def shortened(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-70:]}"


def print_table(rows: list[Row]) -> None:
    print("\n| package | version | installs | workload | stock | patched | equal |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = (row.package, row.version, row.installs, row.workload, row.stock, row.patched)
        print("| " + " | ".join((*cells, row.equal)) + " |")
    for row in rows:
        if row.errors:
            print(f"\n{row.package}, errors of the stock run:")
            print("\n".join(f"- {error}" for error in row.errors))


if __name__ == "__main__":
    main()
