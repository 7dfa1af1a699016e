"""One line of the audit."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    found: str
    """What the verdict rests on."""

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'FAIL'}  {self.name}: {self.found}"
