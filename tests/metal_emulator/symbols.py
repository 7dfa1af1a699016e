"""Code addresses to lines of the Metal source."""

import json
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

from . import toolchain
from .build import DEVICE_HEADERS


def source_lines(library: Path, return_addresses: Collection[int]) -> dict[int, str]:
    """Where the calls that return to these offsets in `library` are: "file.metal:line".

    For code that was inlined from the emulator's own headers, the place in the kernel.
    """
    if not return_addresses:
        return {}
    command = [toolchain.symbolizer(), f"--obj={library}", "--output-style=JSON"]
    command += [hex(address - 1) for address in return_addresses]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    results = json.loads(output)
    pairs = zip(return_addresses, results, strict=True)
    return {address: _place(result.get("Symbol", [])) for address, result in pairs}


def _place(frames: list[dict[str, Any]]) -> str:
    """The innermost frame that is not the emulator's; just its file if the line is unknown."""
    places = [(Path(frame["FileName"]), frame["Line"]) for frame in frames]
    in_kernel = [(path, line) for path, line in places if DEVICE_HEADERS not in path.parents]
    for path, line in in_kernel:
        if line:
            return f"{path.name}:{line}"
    return in_kernel[0][0].name if in_kernel and in_kernel[0][0].name != "??" else ""
