"""Runs mlx-lm's own tests without and with the patch, and prints what differs.

    python -m scripts.mlx_lm_tests [--keep DIR] [test_generate.py ...]

It makes an environment with the tested mlx-lm and what its tests need, and downloads mlx-lm's
source from PyPI for the tests. Tests that load a model get the demo model, which has that model's
name in a Hugging Face cache of this script. Tests that need Metal, the network or the real model
fail or are skipped in both runs. The exit status is 1 if a test passes without the patch only.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from mlx_paged.arguments import TESTED_MLX_LM
from scripts.drop_in_packages.environments import Environment, build_wheel
from scripts.drop_in_packages.packages import Package
from scripts.drop_in_packages.tiny_model import write_hub

NEEDED = Package("", ("pytest", "datasets", "lm-eval", "Pillow", "requests"))
PYTEST = ["-p", "no:cacheprovider", "-o", "faulthandler_timeout=90"]
PYTEST += ["-o", "faulthandler_exit_on_timeout=true"]
MEMORY = 12 << 30
"""Bytes for one file's process: a test that takes more fails, and the machine stays usable."""
MODELS = ("mlx-community/Qwen1.5-0.5B-Chat-4bit",)
RUNS = {"stock": [], "patched": ["-m", "mlx_paged.run"]}
Outcomes = dict[str, str]
"""Of each test: passed, failed or skipped."""


def main() -> None:
    parser = argparse.ArgumentParser("mlx_lm_tests", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="of mlx-lm's tests (default: all)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the environment here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        environment = Environment(folder / "tests", "mlx-lm", NEEDED, build_wheel(folder))
        tests = fetch_tests(Path(temporary))
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        variables |= write_hub(Path(temporary) / "hf", MODELS) | {"PYTHONUNBUFFERED": "1"}
        files = [tests / name for name in args.files] or sorted(tests.glob("test_*.py"))
        totals = {name: Counter[str]() for name in RUNS}
        lost = []
        for file in files:
            stock, patched = (
                outcomes(environment.python, file, command, variables) for command in RUNS.values()
            )
            totals["stock"].update(stock.values())
            totals["patched"].update(patched.values())
            print(f"{file.name:24} stock {counts(stock):38} patched {counts(patched)}", flush=True)
            for test in sorted(stock.keys() | patched.keys()):
                before, after = stock.get(test, "missing"), patched.get(test, "missing")
                if before != after:
                    print(f"    {test}: {before} -> {after}", flush=True)
                    lost += [test] if before == "passed" else []
    for name, total in totals.items():
        print(f"{name}: {dict(total)}")
    print("\n".join([f"{len(lost)} tests pass without the patch only", *lost]))
    sys.exit(1 if lost else 0)


def fetch_tests(folder: Path) -> Path:
    """mlx-lm's folder of tests, apart from its sources: the installed mlx-lm is tested."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "-d", folder, f"mlx-lm=={TESTED_MLX_LM[-1]}"], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("mlx_lm-*/tests")).rename(folder / "tests")


def outcomes(python: Path, file: Path, command: list[str], variables: dict[str, str]) -> Outcomes:
    """Run one file. A test that ends the process has failed; the file then runs without it."""
    report = file.with_suffix(".xml")
    report.unlink(missing_ok=True)
    ended: list[str] = []
    while not report.exists():
        left_out = [f"--deselect={name}" for name in ended]
        pytest = ["-m", "pytest", "-v", *PYTEST, f"--junitxml={report}", *left_out, file.name]
        done = subprocess.run(
            ["prlimit", f"--as={MEMORY}", python, *command, *pytest],
            cwd=file.parent,
            env=variables,
            capture_output=True,
            text=True,
        )
        if not report.exists():
            begun = re.findall(rf"^({re.escape(file.name)}::\S+) (?!\w+ +\[)", done.stdout, re.M)
            if not begun or begun[-1] in ended:
                return {file.name: "failed"}
            ended.append(begun[-1])
    found = dict(outcome(case) for case in ElementTree.parse(report).iter("testcase"))
    names = [name.replace(".py::", ".").replace("/", ".") for name in ended]
    return found | dict.fromkeys(names, "failed")


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    name = f"{case.get('classname')}::{case.get('name')}"
    tags = {child.tag for child in case}
    if tags & {"failure", "error"}:
        return name, "failed"
    return name, "skipped" if "skipped" in tags else "passed"


def counts(found: Outcomes) -> str:
    by_outcome = Counter(found.values())
    return ", ".join(f"{by_outcome[key]} {key}" for key in ("passed", "failed", "skipped"))


if __name__ == "__main__":
    main()
