"""Reports of kernel panics that macOS keeps."""

import time
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/Library/Logs/DiagnosticReports")
RETIRED = "Retired"
"""The folder in it for reports that were sent to Apple."""
DAYS = 7


def recent_panics(folder: Path = FOLDER, days: float = DAYS) -> list[str]:
    """Names of the reports of the last `days`, the newest first; none where no folder can be
    read."""
    found: list[tuple[float, str]] = []
    for each in (folder, folder / RETIRED):
        with suppress(OSError):
            for path in each.glob("*.panic"):
                found.append((path.stat().st_mtime, path.name))
    since = time.time() - days * 86_400
    return [name for modified, name in sorted(found, reverse=True) if modified >= since]
