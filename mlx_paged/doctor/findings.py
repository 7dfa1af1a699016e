"""What checks find, and the page that says it."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

FAILED, UNFINISHED = 1, 3
"""Exit statuses: something is wrong; nothing is, but not all was checked."""

NOT_FINISHED = "not finished"
"""What the page says of a check that was ended before its end, and in which nothing is wrong."""

UNTIL_CTRL_C = "until Ctrl-C"

SAVED_EVERY_S = 5
MAX_SHOWN = 8  # failures of a check that the page shows; the JSON file has all
MAX_MESSAGE_LINES = 6  # lines of an error message that are kept: a compiler's messages are long


@dataclass(slots=True)
class Findings:
    """What one check has found so far."""

    name: str
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    num_wrong: int = 0  # failures that are wrong numbers
    verdict: str = ""  # what the page's first line says of it
    counted: str = ""  # how much is checked: "412 of 1254 variants"
    unfinished: str = ""  # why not all of it is checked; no failure

    @property
    def ok(self) -> bool:
        """Whether nothing has failed and nothing is left."""
        return not self.failures and not self.unfinished

    @property
    def state(self) -> str:
        if self.failures:
            return "FAILED"
        return NOT_FINISHED if self.unfinished else "ok"

    def so_far(self, late: str) -> str:
        """How much is checked, and when the check was ended."""
        return f"{self.counted or 'nothing counted'} {late}"

    def progress(self, items: Collection[T], unit: str) -> Iterator[T]:
        """The items, which are counted, with a progress bar on stderr if that is a terminal."""
        bar = tqdm(items, desc=self.name, unit=unit, leave=False, disable=None)
        for done, item in enumerate(bar):
            self.counted = f"{done} of {len(items)} {unit}s"
            yield item
        self.counted = f"{len(items)} of {len(items)} {unit}s"

    def text(self) -> str:
        """The part of the page about this check."""
        shown = [f"{NOT_FINISHED}: {self.unfinished}"] * bool(self.unfinished)
        shown += [f"FAILED: {failure}" for failure in self.failures[:MAX_SHOWN]]
        if len(self.failures) > MAX_SHOWN:
            shown.append(f"FAILED: {len(self.failures) - MAX_SHOWN} more")
        lines = [line for entry in [*self.lines, *shown] for line in entry.splitlines()]
        head = f"{self.name}: {self.state} ({self.seconds:.1f} s)"
        return "\n".join([head, *(f"  {line}" for line in lines)])


Check = Callable[[Findings, bool], None]
"""Writes what it finds; the flag asks for a quick check. Its docstring describes it."""


def run_check(
    found: Findings, check: Check, quick: bool, save: Callable[[], None] = lambda: None
) -> Findings:
    """Run a check, which fills in `found`. An exception is a failure of this check. A thread saves
    what was found so far: a check that hangs may be ended from outside."""
    has_ended = Event()

    def saving() -> None:
        while not has_ended.wait(SAVED_EVERY_S):
            with suppress(RuntimeError):  # `found` changes meanwhile
                save()

    saver = Thread(target=saving, daemon=True)
    saver.start()
    started = time.perf_counter()
    try:
        check(found, quick)
    except Exception as error:
        found.failures.append(message(error))
    except KeyboardInterrupt:
        found.unfinished = found.unfinished or found.so_far(UNTIL_CTRL_C)
        raise
    finally:
        found.seconds = time.perf_counter() - started
        has_ended.set()
        saver.join()
    return found


def message(error: Exception) -> str:
    """The type and the first lines of an error."""
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    return "\n  ".join(lines[:MAX_MESSAGE_LINES])


def page(checks: list[Findings], quick: bool, not_begun: Sequence[str] = ()) -> str:
    """What an issue needs; its first line is the verdict."""
    states: dict[str, Sequence[str]] = {
        state: [found.name for found in checks if found.state == state]
        for state in ("FAILED", NOT_FINISHED)
    }
    states["not begun"] = not_begun
    told = [f"{state}: {', '.join(names)}" for state, names in states.items() if names]
    verdict = "; ".join(told) or "all checks are ok"
    seconds = sum(found.seconds for found in checks)
    parts = [f"mlx_paged.doctor{' --quick' if quick else ''}: {verdict} ({seconds:.0f} s)"]
    head = "; ".join([*parts, *(found.verdict for found in checks if found.verdict)])
    return "\n".join([head, *(found.text() for found in checks)])


def status(checks: Sequence[Findings]) -> int:
    """The exit status."""
    if any(found.failures for found in checks):
        return FAILED
    return 0 if all(found.ok for found in checks) else UNFINISHED
