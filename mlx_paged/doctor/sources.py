"""Assembles the Metal sources that MLX would get, and compiles them where Xcode is."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_paged.doctor.findings import MAX_MESSAGE_LINES, Findings
from mlx_paged.doctor.system import answer
from mlx_paged.doctor.variants import QUICK_STEP, all_variants, launches_of

METAL = ("xcrun", "-sdk", "macosx", "metal")
ASK = (*METAL, "--version")  # `xcrun --find` also finds the stub of an Xcode without a compiler
COMPILE = (*METAL, "-fno-fast-math", "-w", "-o", os.devnull, "-c")
LANGUAGES = {27: "4.1", 26: "4.0", 15: "3.2", 14: "3.1"}
"""By macOS: the version of Metal in which MLX has its system compile sources (`get_metal_version`
of MLX's metal/device.cpp). Between two of them counts the older one."""

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
    wanted = language_of(answer("sw_vers", "-productVersion"))
    with TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
        language = _newest_known(Path(folder), wanted)
        compiled_in = partial(_compile, Path(folder), language)
        results = threads.map(compiled_in, *zip(*sources.items(), strict=True))
        errors = {kernel: next(results) for kernel in found.progress(sources, "source")}
    found.failures += [f"{kernel}: {error}" for kernel, error in errors.items() if error]
    found.numbers["compiled"] = compiled = len(sources) - len(found.failures)
    found.lines.append(f"{compiled} of {len(sources)} compiled by Xcode as Metal {language}")
    if language != wanted:
        found.lines.append(f"MLX asks for Metal {wanted} here, which this Xcode does not know")


def language_of(macos: str) -> str:
    """The version of Metal that MLX asks for on a version of macOS. The oldest one if that is
    not known."""
    major = macos.partition(".")[0]
    system = int(major) if major.isdecimal() else 0
    fitting = (language for first, language in LANGUAGES.items() if first <= system)
    return next(fitting, LANGUAGES[min(LANGUAGES)])


def _newest_known(folder: Path, wanted: str) -> str:
    """The newest version up to this one that Xcode knows: it may be older than macOS. The version
    itself if it knows none, so that its words are on the page."""
    older = [language for language in LANGUAGES.values() if language <= wanted]
    source = "// nothing\n"
    known = (each for each in older if not _compile(folder, each, "nothing", source))
    return next(known, wanted)


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


def _compile(folder: Path, language: str, kernel: str, source: str) -> str:
    """The first lines of the compiler's message if it refuses the source, else nothing."""
    path = folder / f"{kernel}.metal"
    path.write_text(source)
    command = [*COMPILE, f"-std=metal{language}", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER)
    except subprocess.TimeoutExpired:
        return f"no answer in {SECONDS_TO_ANSWER} s"
    lines = (done.stderr or f"exit status {done.returncode}").splitlines()
    return "\n  ".join(lines[:MAX_MESSAGE_LINES]) if done.returncode else ""
