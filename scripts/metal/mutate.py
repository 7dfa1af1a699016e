"""Does the suite notice? Lift each barrier and each guard of metal/ in turn and run its tests.

    python -m scripts.metal.mutate [--list] [--only TEXT] [--sample N [--seed S]]

Takes some seconds a mutation, or minutes where few tests notice, so it is run by hand or nightly,
not by CI. Prints what caught each one, then the survivors, and ends with one JSON line. Refuses to
start if the tests fail without a mutation, or if the extension was built from other sources than
those in metal/: nothing would follow from what fails then.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.metal.sources import launches

ROOT = Path(__file__).resolve().parents[2]
TESTS = tuple(
    f"tests/ops/test_metal_{what}.py"
    for what in ("threadgroups", "vectors", "nonfinite", "matrix", "kernels", "traffic")
)
FIRST = {
    "vectors.h": "nonfinite",
    "online_softmax.h": "nonfinite",
    "key_range.h": "option or OneLength",
    "pool_rows.h": "hide or nothing",
    "attention.h": "option or queries or nothing",
    "key_tile.h": "threadgroups or option or hide",
    "paged_attention.metal": "threadgroups or option or hide or nothing or debugging or full_table",
    "row_tiles.h": "DifferentLengths or OneLength",
    "staging.h": "Traffic or OneLength or Nonfinite",
    "matrix_attention.metal": "Traffic or DifferentLengths or OneLength",
    "merge_splits.metal": "options_of_split",
    "write_kv.metal": "TestPool",
    "copy_blocks.metal": "TestPool",
}
"""The files, and which tests notice most of their mutations, and soon: what pytest's -k selects."""

BARRIER = re.compile(r"(threadgroup|simdgroup)_barrier\((?!mem_flags::mem_none)[^;]*\);")
"""Those of no memory only tell a compiler in which order to place instructions."""
OPERAND = r"-?[\w.\[\]]+"
GUARD = re.compile(
    rf"{OPERAND} (?:<|>=|>|[=!]=) {OPERAND}(?: [*/+-] {OPERAND})*"
    r"|!?\b(?:\w+\.)?(?:is_valid|exists|sees_keys)\b(?! =)"
)
DECLARATION = re.compile(r"^\s*(?:bool \w+;|float qk, )")


@dataclass(frozen=True)
class Mutation:
    """The n-th occurrence of `old` in a file of metal/ becomes `new`."""

    file: str
    where: str
    old: str
    new: str
    nth: int


def mutations() -> list[Mutation]:
    """Every barrier deleted, every comparison that guards something lifted.

    What has to hold becomes true, and what is a reason to leave, one of several, false.
    """
    embedded = [launch["source"] for launch in launches()]
    found = []
    for name in FIRST:
        text = (ROOT / "metal" / name).read_text()
        if not any(text in source for source in embedded):
            sys.exit(f"the extension was built from another {name}: build it again")
        line_start = 0
        for number, line in enumerate(text.splitlines(keepends=True), start=1):
            where = f"{name}:{number}: {line.strip()}"
            for match, new in changes(line.split("//")[0]):
                nth = text[: line_start + match.start()].count(match.group())
                found.append(Mutation(name, where, match.group(), new, nth))
            line_start += len(line)
    return found


def changes(code: str) -> Iterator[tuple[re.Match[str], str]]:
    """What to replace in a line, and by what."""
    for barrier in BARRIER.finditer(code):
        yield barrier, ""
    is_condition = " ? " in code or "if (" in code or "bool " in code or "&&" in code
    if is_condition and not DECLARATION.match(code):
        for guard in GUARD.finditer(code):
            yield guard, "false" if "||" in code else "true"


def failed_test(mutation: Mutation | None) -> str | None:
    """The first test that fails, or None. Exits if something else stopped the tests."""
    environment = dict(os.environ)
    selections = [""]
    if mutation is not None:
        change = [mutation.file, mutation.old, mutation.new, mutation.nth]
        environment["MLX_PAGED_METAL_MUTATION"] = json.dumps(change)
        selections.insert(0, FIRST[mutation.file])
    for selection in selections:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-k", selection, *TESTS],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        if run.returncode == 0:
            continue
        failed = re.search(r"^FAILED \S+::(.+?)(?: - |$)", run.stdout, re.MULTILINE)
        if run.returncode != 1 or not failed or "CompileError" in run.stdout:
            sys.exit(f"the tests did not run, exit status {run.returncode}:\n{run.stdout[-4000:]}")
        return failed.group(1)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="only list the mutations")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose line contains TEXT")
    parser.add_argument("--sample", type=int, metavar="N", help="at most N of them, by chance")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the sample")
    args = parser.parse_args()
    chosen = [m for m in mutations() if args.only in m.where]
    if args.sample is not None and args.sample < len(chosen):
        chosen = random.Random(args.seed).sample(chosen, args.sample)
    if not args.list and (test := failed_test(None)):
        sys.exit(f"without a mutation {test} fails")
    survivors = []
    for mutation in chosen:
        print(f"{mutation.where}\n    {mutation.old} -> {mutation.new or 'nothing'}", flush=True)
        if args.list:
            continue
        test = failed_test(mutation)
        print(f"    {'caught by ' + test if test else 'SURVIVED'}", flush=True)
        if test is None:
            survivors.append(mutation)
    for mutation in survivors:
        print(f"survivor: {mutation.where}: {mutation.old} -> {mutation.new or 'nothing'}")
    if not args.list:
        print(json.dumps({"mutations": len(chosen), "survivors": len(survivors)}))


if __name__ == "__main__":
    main()
