"""What the emulator found wrong with a launch."""

from dataclasses import dataclass
from enum import StrEnum


class FindingKind(StrEnum):
    """Every kind of finding; runtime/findings.h lists the same strings."""

    OUT_OF_BOUNDS = "device buffer out of bounds"
    READ_ONLY = "store to read-only buffer"
    UNBOUND = "unbound buffer"
    WILD = "access outside every buffer"
    THREADGROUP_BOUNDS = "threadgroup memory out of bounds"
    THREADGROUP_LIMIT = "too much threadgroup memory"
    UNINITIALISED = "uninitialised threadgroup memory"
    RACE_IN_SIMDGROUP = "race in simdgroup"
    RACE_IN_THREADGROUP = "race in threadgroup"
    RACE_IN_GRID = "race between threadgroups"
    DIVERGENT_OPERATION = "divergent simdgroup operation"
    DIVERGENT_BARRIER = "divergent barrier"
    INACTIVE_LANE = "read from inactive lane"
    UNDEFINED = "undefined behaviour"
    ASSERTION = "assertion failed"
    STACK_OVERFLOW = "thread stack overflow"
    ENDLESS = "kernel does not end"


@dataclass(frozen=True, slots=True)
class Finding:
    """`count` occurrences of one kind at one place; `detail` tells about the first of them."""

    kind: FindingKind
    where: str  # "file.metal:line", or "" where the place is unknown
    detail: str
    count: int

    def __str__(self) -> str:
        return f"{self.where or '?'}: {self.kind} ({self.count} times): {self.detail}"


class EmulatorFinding(Exception):
    """A checked launch had findings."""

    def __init__(self, kernel: str, findings: list[Finding]) -> None:
        super().__init__("\n".join([f"{kernel}:", *map(str, findings)]))
        self.findings = findings
