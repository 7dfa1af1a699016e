"""Assembles the Metal sources that MLX would get, and compiles them where Xcode is."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_paged.doctor.findings import MAX_MESSAGE_LINES, Findings
from mlx_paged.doctor.variants import QUICK_STEP, all_variants, launches_of

METAL = ("xcrun", "-sdk", "macosx", "metal")
ASK = (*METAL, "--version")  # `xcrun --find` also finds the stub of an Xcode without a compiler
COMPILE = (*METAL, "-std=metal3.1", "-fno-fast-math", "-w", "-o", os.devnull, "-c")
SECONDS_TO_ANSWER = 60
NEW_SOURCE = ("plain", "long", "float32-queries")
"""Options with sources of their own. All others are function constants."""


def check_sources(found: Findings, quick: bool) -> None:
    """the Metal sources, compiled where there is Xcode"""
    variants = {
        (v.op, v.dtype, v.heads, v.group, v.tokens, v.option): v
        for v in all_variants()
        if v.option in NEW_SOURCE
    }
    chosen = [*variants.values()][:: QUICK_STEP if quick else 1]
    sources: dict[str, str] = {}
    for variant in found.progress(chosen, "plan"):
        sources |= {launch["kernel"]: launch["source"] for launch in launches_of(variant)}
    found.numbers |= {"assembled": len(sources), "compiled": 0}
    if (missing := _compiler_missing()) is not None:
        found.lines.append(f"{len(sources)} assembled, none compiled: {missing}")
        return
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
        results = threads.map(partial(_compile, Path(folder)), *zip(*sources.items(), strict=True))
        errors = {kernel: next(results) for kernel in found.progress(sources, "source")}
    found.failures += [f"{kernel}: {error}" for kernel, error in errors.items() if error]
    found.numbers["compiled"] = compiled = len(sources) - len(found.failures)
    found.lines.append(f"{compiled} of {len(sources)} compiled by Xcode as Metal 3.1")


def _compiler_missing() -> str | None:
    """Why Apple's compiler cannot be called; None if it can."""
    if not shutil.which(ASK[0]):
        return f"no `{ASK[0]}` here"
    try:
        done = subprocess.run(ASK, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER)
    except subprocess.TimeoutExpired:
        return f"`{' '.join(ASK)}` gave no answer in {SECONDS_TO_ANSWER} s"
    message = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
    return f"`{' '.join(ASK)}`: {message}" if done.returncode else None


def _compile(folder: Path, kernel: str, source: str) -> str:
    """The first lines of the compiler's message if it refuses the source, else nothing."""
    path = folder / f"{kernel}.metal"
    path.write_text(source)
    command = [*COMPILE, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER)
    except subprocess.TimeoutExpired:
        return f"no answer in {SECONDS_TO_ANSWER} s"
    lines = (done.stderr or f"exit status {done.returncode}").splitlines()
    return "\n  ".join(lines[:MAX_MESSAGE_LINES]) if done.returncode else ""
