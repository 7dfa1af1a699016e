"""Every mistake of seeded_bugs.metal is found, with its kind and line; what is right is clean."""

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import launch
from .findings import EmulatorFinding, Finding, FindingKind
from .library import Library
from .modes import Mode

SOURCE = Path(__file__).with_name("seeded_bugs.metal")

WITHOUT_LINE = {FindingKind.THREADGROUP_LIMIT, FindingKind.STACK_OVERFLOW}
"""Findings about a kernel as a whole."""


def expectations() -> dict[str, dict[Mode, set[tuple[FindingKind, str]]]]:
    """By kernel and mode: the kinds of findings and where they are."""
    expected: dict[str, dict[Mode, set[tuple[FindingKind, str]]]] = {}
    for number, line in enumerate(SOURCE.read_text().splitlines(), start=1):
        if kernel := re.match(r"kernel void (\w+)", line):
            current = expected[kernel[1]] = {mode: set() for mode in Mode}
        if bug := re.search(r"// BUG\((.*?)\): (.*)", line):
            for mode in map(Mode, bug[1].split()):
                for kind in map(FindingKind, bug[2].split(", ")):
                    where = "" if kind in WITHOUT_LINE else f"{SOURCE.name}:{number}"
                    current[mode].add((kind, where))
    return expected


EXPECTED = expectations()
RIGHT = [kernel for kernel in EXPECTED if not any(EXPECTED[kernel].values())]


@functools.cache
def library(mode: Mode) -> Library:
    return Library.from_file(SOURCE, mode=mode)


def run(kernel: str, mode: Mode, **options: Any) -> list[Finding]:
    has_argument = "threadgroup_argument" in kernel
    buffers: dict[int, launch.Buffer] = {
        0: np.arange(256, dtype=np.int32),
        1: np.zeros(256, np.int32),
    }
    if kernel == "store_through_cast":
        buffers[3] = bytes(16)
    return (
        library(mode)
        .launch(
            kernel,
            grid=(4, 1, 1),
            threadgroup=(64, 1, 1),
            buffers=buffers,
            threadgroup_bytes={0: 64 * 4} if has_argument else {},
            **options,
        )
        .findings
    )


@pytest.mark.sampled(36)
@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("kernel", EXPECTED)
def test_findings(kernel: str, mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "CPU_SECONDS", 0.3)
    findings = run(kernel, mode, check=False)
    assert {(f.kind, f.where) for f in findings} == EXPECTED[kernel][mode]


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kernel", RIGHT)
def test_right_kernels_are_clean_in_any_order(kernel: str, seed: int) -> None:
    assert run(kernel, Mode.RACE, seed=seed) == []


def test_every_kind_of_finding_is_seeded() -> None:
    by_mode = [found for kernel in EXPECTED.values() for found in kernel.values()]
    assert {kind for found in by_mode for kind, _ in found} == set(FindingKind)


def test_a_checked_launch_raises() -> None:
    with pytest.raises(EmulatorFinding, match=r"seeded_bugs.metal:\d+: unbound buffer") as raised:
        run("unbound_buffer", Mode.FAST)
    assert [finding.kind for finding in raised.value.findings] == [FindingKind.UNBOUND]


def test_random_order_shows_a_race() -> None:
    """Without any instrumentation: the result depends on the order."""
    outputs = set()
    for seed in range(4):
        out = np.zeros(256, np.int32)
        library(Mode.FAST).launch(
            "several_threadgroups_store_one_address",
            grid=(4, 1, 1),
            threadgroup=(64, 1, 1),
            buffers={0: np.arange(256, dtype=np.int32), 1: out},
            seed=seed,
        )
        outputs.add(out.tobytes())
    assert len(outputs) > 1
