"""Checks in processes of their own: whatever happens in one of them, the others are judged."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlx_paged.doctor.findings import FAILED, UNFINISHED, UNTIL_CTRL_C, Findings

MOST_SECONDS = {True: 300, False: 1200}
"""Of a quick and of a whole check. A GPU that hangs answers nobody; up to 1,254 pipelines of a kind
are compiled one after the other."""

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


def _read(path: Path) -> dict[str, Any]:
    """The findings about the one check of a report; none if the process ended while it wrote."""
    try:
        (known,) = json.loads(path.read_text())["checks"].values()
    except (OSError, ValueError):
        return {}
    return dict(known)
