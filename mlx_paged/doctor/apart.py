"""Checks in processes of their own: whatever happens in one of them, the others are judged."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_paged.doctor.findings import FAILED, UNFINISHED, Findings

MOST_SECONDS = {True: 300, False: 1200}
"""Of a quick and of a whole check. A GPU that hangs answers nobody; up to 1,254 pipelines of a kind
are compiled one after the other."""

STATUSES = 0, FAILED, UNFINISHED
"""Exit statuses of a process that has said all that it found."""


def found_apart(only: str, quick: bool, **environment: str) -> Findings:
    """What another process finds out before its end about a check or a kind of variants, by the
    name that ``--only`` takes; `environment` are variables for that process."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "mlx_paged.doctor", "--only", only, "--json", str(path)]
        try:
            done = subprocess.run(
                [*command, *["--quick"] * quick],
                capture_output=True,
                text=True,
                timeout=MOST_SECONDS[quick],
                env=os.environ | environment,
            )
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            problem = f"ended with status {done.returncode}: {last}"
            has_ended, is_late = done.returncode in STATUSES, False
        except subprocess.TimeoutExpired:
            has_ended, is_late = False, True
        checks = {}
        with suppress(OSError, ValueError):  # it may have ended while it wrote
            checks = json.loads(path.read_text())["checks"]
    found = Findings(only, lines=["ran in a process of its own"])
    if checks:
        (known,) = checks.values()
        known.pop("ok")
        found = Findings(**known)
    if is_late:
        found.unfinished = f"{found.counted or 'nothing counted'} in {MOST_SECONDS[quick]} s"
    elif not checks or not has_ended:
        found.failures.append(f"{only}: {problem}")
    return found
