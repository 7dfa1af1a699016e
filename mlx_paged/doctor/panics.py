"""Reports of kernel panics that macOS keeps."""

import time
from pathlib import Path

FOLDER = Path("/Library/Logs/DiagnosticReports")
DAYS = 7


def recent_panics(folder: Path = FOLDER, days: float = DAYS) -> list[str]:
    """Names of the reports of the last `days`, the newest first; none where no folder can be
    read."""
    found: list[tuple[float, str]] = []
    try:
        for path in folder.glob("*.panic"):
            found.append((path.stat().st_mtime, path.name))
    except OSError:
        pass
    since = time.time() - days * 86_400
    return [name for modified, name in sorted(found, reverse=True) if modified >= since]
