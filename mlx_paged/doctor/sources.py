"""Assembles the Metal sources that MLX would get, and compiles them where Xcode is."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.doctor.findings import MAX_MESSAGE_LINES, Findings
from mlx_paged.doctor.variants import QUICK_STEP, Variant, all_variants, attention_call

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


def launches_of(variant: Variant) -> list[dict[str, Any]]:
    """What a GPU gets for a variant: kernels, pipelines, sources."""
    metal = ops.metal
    if variant.op == "attention":
        arrays, options = attention_call(variant)
        plan = metal.plan_attention(*arrays, scale=1.0, **options)
    else:
        shape, size = variant.shape, variant.block_size
        dims, heads = shape.row_dims, shape.n_kv_heads
        formats = list(zip(shape.formats, dims, strict=True))
        caches = [
            mx.zeros((heads, 2, size, form.columns(dim)), form.dtype) for form, dim in formats
        ]
        rows = [mx.zeros((1, heads, dim), shape.dtype) for dim in dims]
        scales = {
            name: mx.zeros((heads, 2, size, form.scale_columns(dim)), mx.float16)
            for name, (form, dim) in zip(("k_scales", "v_scales"), formats, strict=True)
            if form.has_scales
        }
        if variant.op == "write":
            plan = metal.plan_write_kv(*rows, *caches, mx.zeros((1,), mx.int32), **scales)
        else:
            plan = metal.plan_copy_blocks(*caches, mx.zeros((1, 2), mx.int32))
    return list(plan["launches"])


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
