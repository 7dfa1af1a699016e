"""Instructions and cache misses of whole decode steps where ops choose as on a GPU, by callgrind.

Unlike times, these numbers do not depend on what else the machine does, nor on how long its memory
takes after the CPU has computed a step.

    python -m bench.host_cost --gpu --counted --rows 1

Needs ``valgrind`` with its headers, and a C compiler.
"""

import ctypes
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from tqdm import tqdm

with patch.object(resource, "setrlimit"):  # valgrind lets nobody raise a limit, as mlx-lm does
    from bench.host_cost.gpu_steps import BASE, HostClock, courses_of, deep_llama

WARM_STEPS = 16  # until Python has specialised its code
STEPS = 3
TOKENS = WARM_STEPS + 1 + STEPS + 8

CACHES = ("--I1=196608,6,64", "--D1=131072,8,64", "--LL=12582912,12,128")
"""First-level caches and a shared second level as large as published of an M1's fast cores. They
hold what a step reads; the caches of this machine lose some of it while the CPU computes."""

NEAR, FAR = 10, 100
"""Instructions that a miss of a first-level cache and one of the last level count as: callgrind's
own estimate of cycles."""

SWITCH = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void toggle(void) { CALLGRIND_TOGGLE_COLLECT; }
void zero(void) { CALLGRIND_ZERO_STATS; }
void dump(const char* name) { CALLGRIND_DUMP_STATS_AT(name); }
"""
"""A library by which a program that callgrind runs says what counts."""

TRIGGER = "Trigger: Client Request: "


class CountedClock(HostClock):
    """Switches callgrind's counting: on within steps, off within MLX's evaluation."""

    def __init__(self, switch: Any) -> None:
        super().__init__()
        self._switch = switch

    def count(self, run: Callable[[], object]) -> None:
        """Run a step that counts."""
        self.counts = True
        self._switch.toggle()
        run()
        self._switch.toggle()
        self.counts = False

    def _apart(self, call: Callable[..., None]) -> Callable[..., None]:
        def apart(*arrays: Any) -> None:
            with self._uncounted():
                call(*arrays)
                mx.synchronize()

        return apart

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        if self.counts:
            self._switch.toggle()
        try:
            yield
        finally:
            if self.counts:
                self._switch.toggle()


def _count(library: str, layers: int, rows: int) -> None:
    """What callgrind runs: each course's steps, and a dump of their counts under its name."""
    switch = ctypes.CDLL(library)
    clock = CountedClock(switch)
    with clock.watching():
        courses = courses_of(deep_llama(layers), rows, TOKENS, clock)
        for course in courses.values():
            with course.inside():
                for _ in range(WARM_STEPS):
                    course.step()
        gc.collect()
        gc.disable()  # a collection comes in some step of some course
        switch.start()
        for name, course in courses.items():
            with course.inside():
                course.step()  # it fills the caches
                switch.zero()
                for _ in range(STEPS):
                    clock.count(course.step)
            switch.dump(name.encode())


def counted_steps(layers: int, rows: Sequence[int]) -> list[dict[str, Any]]:
    """By rows and course, of a step: instructions, misses of both first-level caches and of the
    last level, the instructions that all of it counts as, and how many times mlx-lm's these are.
    """
    found = []
    with TemporaryDirectory() as home:
        source, library = Path(home, "switch.c"), str(Path(home, "switch.so"))
        source.write_text(SWITCH)
        compiled = ["cc", "-O2", "-shared", "-fPIC", "-o", library, str(source)]
        subprocess.run(compiled, check=True)
        for count in tqdm(rows, desc="rows", disable=None):
            out = Path(home, f"rows{count}")
            tool = ["valgrind", "-q", "--tool=callgrind", "--cache-sim=yes", *CACHES]
            tool += ["--instr-atstart=no", "--collect-atstart=no", f"--callgrind-out-file={out}"]
            program = [sys.executable, "-m", __name__, library, str(layers), str(count)]
            environment = os.environ | {"PYTHONHASHSEED": "0"}
            subprocess.run([*tool, *program], check=True, env=environment)
            dumps = [path.read_text() for path in sorted(Path(home).glob(f"{out.name}.*"))]
            found += [{"rows": count} | each for each in per_step(dumps, STEPS)]
    return found


def per_step(dumps: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """The counts of a step of each course, from callgrind's dumps of `steps` steps each."""
    found: list[dict[str, Any]] = []
    for dump in dumps:
        fields = dict(line.split(": ", 1) for line in dump.splitlines() if ": " in line)
        totals = [int(total) / steps for total in fields["totals"].split()]
        of = dict(zip(fields["events"].split(), totals, strict=True))
        near = of["I1mr"] + of["D1mr"] + of["D1mw"]
        far = of["ILmr"] + of["DLmr"] + of["DLmw"]
        counts = {"instructions": of["Ir"], "first-level misses": near, "last-level misses": far}
        counts["counts as"] = of["Ir"] + NEAR * near + FAR * far
        whole = {name: round(count) for name, count in counts.items()}
        found.append({"course": fields["desc"].removeprefix(TRIGGER)} | whole)
    (base,) = [each for each in found if each["course"] == BASE]
    for each in found:
        for name in ("instructions", "counts as"):
            each[f"{name}, over {BASE}"] = round(each[name] / base[name], 3)
    return found


if __name__ == "__main__":
    _count(sys.argv[1], *map(int, sys.argv[2:]))
