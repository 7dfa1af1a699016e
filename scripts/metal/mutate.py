"""Does the suite notice? Lift each barrier and each guard of metal/ in turn and run its tests.

    python -m scripts.metal.mutate [--list] [--only TEXT] [--sample N [--seed S]] [--results FILE]

Takes some seconds a mutation, or minutes where few tests notice, so it is run by hand or nightly,
not by CI. First all mutations meet the tests that are likely to notice them, then those that are
left meet all tests. Prints what caught each one, then the survivors, and ends with one JSON line.
What FILE has is not run again, and it gets what is found: a run that was stopped goes on.

Refuses to start if the tests fail without a mutation, or if the extension was built from other
sources than those in metal/: nothing would follow from what fails then.
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
SUITES = (
    *("threadgroups", "vectors", "nonfinite", "matrix", "kernels", "traffic", "quantized"),
    "shared",
    "simplest",
)
TESTS = [f"tests/ops/test_metal_{what}.py" for what in SUITES]
FIRST = {
    "vectors.h": "nonfinite",
    "online_softmax.h": "nonfinite",
    "key_range.h": "option or OneLength",
    "shared_prefixes.h": "TestTrees or TestWhatIsRead",
    "pool_rows.h": "hide or nothing or outside_the_window",
    "attention.h": "option or queries or nothing",
    "key_tile.h": "threadgroups or option or hide",
    "paged_attention.metal": "threadgroups or option or hide or nothing or debugging or full_table"
    " or first_row or loaded_once",
    "row_tiles.h": "DifferentLengths or OneLength",
    "staging.h": "Traffic or OneLength or Nonfinite or matrix_kernel or outside_the_pool",
    "matrix_attention.metal": "Traffic or DifferentLengths or OneLength or Nonfinite or infinite",
    "merge_splits.metal": "split_contexts or the_merge or than_the_decodes or after_the_last",
    "write_kv.metal": "TestPool",
    "copy_blocks.metal": "TestPool",
    "write_quantized.metal": "test_writes or need_not",
    "write_elements.metal": "elements",
    "quantize_elements.metal": "quantized",
    "copy_elements.metal": "copied",
}
"""The files, and which tests notice most of their mutations, and soon: what pytest's -k selects."""

BARRIER = re.compile(r"(threadgroup|simdgroup)_barrier\((?!mem_flags::mem_none)[^;]*\);")
"""Those of no memory only tell a compiler in which order to place instructions."""
OPERAND = r"(?:-?[\w.\[\]]+|min\([^()]*\))"
GUARD = re.compile(
    rf"{OPERAND}(?: [*/%+-] {OPERAND})* (?:<=?|>=?|[=!]=) {OPERAND}(?: [*/+-] {OPERAND})*"
    r"|!?\b(?:is_(?:valid|inside|seen|stored|spoiled)|are_finite|has_keys)\b(?! =)"
)
DECLARATION = re.compile(r"^\s*(?:bool \w+;|float qk, )")
SIZE = re.compile(r"\s*constexpr int\b")
"""A number that is chosen when a kernel is compiled guards nothing."""
REFUSED = "Apple's compiler would refuse it"


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
        is_size = False
        for number, line in enumerate(text.splitlines(keepends=True), start=1):
            where = f"{name}:{number}: {line.strip()}"
            is_size = bool(SIZE.match(line)) if line[:1] != " " else is_size
            code = "" if is_size or SIZE.match(line) else line.split("//")[0]
            for match, new in changes(code):
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


def failed_test(mutation: Mutation | None, selection: str) -> str | None:
    """The first test that fails, or None. Exits if something else stopped the tests."""
    environment = dict(os.environ)
    if mutation is not None:
        change = [mutation.file, mutation.old, mutation.new, mutation.nth]
        environment["MLX_PAGED_METAL_MUTATION"] = json.dumps(change)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--cases", "all", "-k", selection, *TESTS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if run.returncode == 0:
        return None
    failed = re.search(r"^FAILED \S+::(.+?)(?: - |$)", run.stdout, re.MULTILINE)
    if run.returncode != 1 or not failed:
        sys.exit(f"the tests did not run, exit status {run.returncode}:\n{run.stdout[-4000:]}")
    return REFUSED if "CompileError" in run.stdout else failed.group(1)


class Results:
    """By stage and mutation: the test that caught it, or "".

    A line of a file is one result. A mutation is told by its line's text, not by its number: a
    file of metal/ may change elsewhere.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path and path.exists() else []
        self._found: dict[str, str] = dict(json.loads(line) for line in lines)

    def test(self, mutation: Mutation | None, stage: str) -> str | None:
        """The test that catches a mutation. Runs the tests if the result is not there."""
        text = mutation.where.split(":", 2)[2].strip() if mutation else ""
        change = [mutation.file, text, mutation.old, mutation.nth] if mutation else []
        key = json.dumps([stage, *change])
        if key not in self._found:
            selection = FIRST[mutation.file] if mutation and stage == "first" else ""
            self._found[key] = failed_test(mutation, selection) or ""
            if self._path:
                with self._path.open("a") as file:
                    print(json.dumps([key, self._found[key]]), file=file)
        return self._found[key] or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="only list the mutations")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose line contains TEXT")
    parser.add_argument("--sample", type=int, metavar="N", help="at most N of them, by chance")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the sample")
    parser.add_argument("--results", type=Path, metavar="FILE", help="has results, and gets them")
    args = parser.parse_args()
    chosen = [m for m in mutations() if args.only in m.where]
    if args.sample is not None and args.sample < len(chosen):
        chosen = random.Random(args.seed).sample(chosen, args.sample)
    if args.list:
        for mutation in chosen:
            print(f"{mutation.where}\n    {mutation.old} -> {mutation.new or 'nothing'}")
        return
    results = Results(args.results)
    if test := results.test(None, "all"):
        sys.exit(f"without a mutation {test} fails")
    left = chosen
    for stage in ("first", "all"):
        missed = []
        for mutation in left:
            test = results.test(mutation, stage)
            print(f"{mutation.where}\n    {mutation.old} -> {mutation.new or 'nothing'}")
            print(f"    {'caught by ' + test if test else 'passes'}: {stage}", flush=True)
            if test is None:
                missed.append(mutation)
        left = missed
    for mutation in left:
        print(f"survivor: {mutation.where}: {mutation.old} -> {mutation.new or 'nothing'}")
    print(json.dumps({"mutations": len(chosen), "survivors": len(left)}))


if __name__ == "__main__":
    main()
