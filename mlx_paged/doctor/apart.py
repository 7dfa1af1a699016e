"""Checks in processes of their own: whatever happens in one of them, the others are judged."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

from tqdm import tqdm

from mlx_paged.doctor.findings import FAILED, UNFINISHED, UNTIL_CTRL_C, Findings

MOST_SECONDS = {True: 300, False: 1200}
"""Of a quick and of a whole check. A GPU that hangs answers nobody; up to 1,254 pipelines of a kind
are compiled one after the other."""

SHOWN_EVERY_S = 1

STATUSES = 0, FAILED, UNFINISHED
"""Exit statuses of a process that has said all that it found."""


def found_apart(found: Findings, quick: bool, only: str = "", **environment: str) -> Findings:
    """What another process finds out before its end about a check or a kind of variants. `only` is
    its name for ``--only``, by default that of `found`, which is filled in, after Ctrl-C too.
    `environment` are variables for that process."""
    only, seconds, problem, late = only or found.name, MOST_SECONDS[quick], "", ""
    started = time.perf_counter()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "mlx_paged.doctor", "--only", only, "--json", str(path)]
        try:
            with _shown(only, path):
                done = subprocess.run(
                    [*command, *["--quick"] * quick],
                    capture_output=True,
                    text=True,
                    timeout=seconds,
                    env=os.environ | environment,
                )
            if done.returncode not in STATUSES:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                problem = f"ended with status {done.returncode}: {last}"
        except subprocess.TimeoutExpired:
            late = f"in {seconds} s"
        except KeyboardInterrupt:
            late = UNTIL_CTRL_C
            raise
        finally:
            known = _read(path)
            for name in known.keys() - {"name", "ok"}:
                setattr(found, name, known[name])
            found.seconds = time.perf_counter() - started
            if late:
                found.unfinished = found.so_far(late)
            elif problem or not known:
                found.failures.append(f"{only}: {problem or 'no report'}")
    return found


@contextmanager
def _shown(only: str, path: Path) -> Iterator[None]:
    """Shows on stderr, if that is a terminal, how much the process says that it has checked."""
    ended = Event()
    form = "{desc} [{elapsed}]"
    bar = tqdm(desc=only, bar_format=form, leave=False, disable=None)

    def show() -> None:
        while not ended.wait(SHOWN_EVERY_S):
            counted = _read(path).get("counted") or "begun"
            bar.set_description_str(f"{only}: {counted}")

    shower = Thread(target=show, daemon=True)
    if not bar.disable:
        shower.start()
    try:
        yield
    finally:
        ended.set()
        if not bar.disable:
            shower.join()
        bar.close()


def _read(path: Path) -> dict[str, Any]:
    """The findings about the one check of a report; none if the process ended while it wrote."""
    try:
        (known,) = json.loads(path.read_text())["checks"].values()
    except (OSError, ValueError):
        return {}
    return dict(known)
