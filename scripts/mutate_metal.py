"""Does the suite notice? Break each barrier and each guard of metal/ in turn and run its tests.

    python -m scripts.mutate_metal [--list] [--only TEXT]

Takes about half a minute a mutation, so it is run by hand or nightly, not by CI. Prints what caught
each one, then the survivors, and ends with one JSON line.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("paged_attention.metal", "pool.metal")
TESTS = "tests/test_metal_kernels.py"

BARRIER = re.compile(r"(threadgroup|simdgroup)_barrier\([^;]*\);")
OPERAND = r"[\w.\[\]]+"
GUARD = re.compile(
    rf"{OPERAND} (?:<|>=|>) {OPERAND}(?: [*/+-] {OPERAND})*|is_valid\b|exists\b|sees_keys\b"
)
DECLARATION = re.compile(r"^\s*(?:bool \w+;|float qk, )")

EXPLAINED = {
    "key < max_keys": "max_keys is a multiple of the keys that a pass takes unless blocks are odd",
}
"""Guards whose loss no test can see, and why."""


@dataclass(frozen=True)
class Mutation:
    """The n-th occurrence of `old` in the library's source becomes `new`."""

    where: str
    old: str
    new: str
    nth: int


def mutations() -> list[Mutation]:
    """Every barrier deleted, every comparison that guards something made true."""
    text = "".join((ROOT / "metal" / name).read_text() for name in SOURCES)
    found = []
    line_start = 0
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        code = line.split("//")[0]
        is_condition = " ? " in code or "if (" in code or "bool " in code or "&&" in code
        matches = [(m, "") for m in BARRIER.finditer(code)]
        if is_condition and not DECLARATION.match(code):
            matches += [(m, "true") for m in GUARD.finditer(code)]
        for match, new in matches:
            old = match.group()
            nth = text[: line_start + match.start()].count(old)
            found.append(Mutation(f"{number}: {code.strip()}", old, new, nth))
        line_start += len(line)
    return found


def caught_by(mutation: Mutation) -> str | None:
    """The first test that fails, or None."""
    change = json.dumps([mutation.old, mutation.new, mutation.nth])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", TESTS],
        cwd=ROOT,
        env=os.environ | {"MLX_PAGED_METAL_MUTATION": change},
        capture_output=True,
        text=True,
    )
    if run.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", run.stdout, re.MULTILINE)
    return failed.group(1) if failed else f"exit status {run.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="only list the mutations")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose line contains TEXT")
    args = parser.parse_args()
    chosen = [m for m in mutations() if args.only in m.where]
    survivors = []
    for mutation in chosen:
        print(f"{mutation.where}\n    {mutation.old} -> {mutation.new or 'nothing'}", flush=True)
        if args.list:
            continue
        test = caught_by(mutation)
        print(f"    {'caught by ' + test if test else 'SURVIVED'}", flush=True)
        if test is None:
            survivors.append(mutation)
    for mutation in survivors:
        print(f"survivor: {mutation.where}: {EXPLAINED.get(mutation.old, 'not explained')}")
    if not args.list:
        print(json.dumps({"mutations": len(chosen), "survivors": len(survivors)}))


if __name__ == "__main__":
    main()
