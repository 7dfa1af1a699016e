"""Checks in processes of their own: whatever happens in one of them, the others are judged."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_paged.doctor.findings import Findings

MOST_SECONDS = 300  # that a process may take: a GPU that hangs answers nobody


def found_apart(only: str, quick: bool, **environment: str) -> Findings:
    """What another process finds out about a check or a kind of variants, by the name that
    ``--only`` takes; `environment` are variables for that process."""
    lost = Findings(only, lines=["ran in a process of its own"])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "mlx_paged.doctor", "--only", only, "--json", str(path)]
        try:
            done = subprocess.run(
                [*command, *["--quick"] * quick],
                capture_output=True,
                text=True,
                timeout=MOST_SECONDS,
                env=os.environ | environment,
            )
        except subprocess.TimeoutExpired:
            lost.failures.append(f"{only}: no answer in {MOST_SECONDS} s")
            return lost
        checks = json.loads(path.read_text() if path.exists() else "{}").get("checks")
    if not checks:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        lost.failures.append(f"{only}: ended with status {done.returncode}: {last}")
        return lost
    (found,) = checks.values()
    found.pop("ok")
    return Findings(**found)
