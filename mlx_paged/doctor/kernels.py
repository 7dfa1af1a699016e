"""Compares every variant of the kernels with float64."""

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.doctor import float64
from mlx_paged.doctor.apart import found_apart
from mlx_paged.doctor.findings import MAX_MESSAGE_LINES, Findings, message
from mlx_paged.doctor.flags import KINDS
from mlx_paged.doctor.variants import (
    FAINT,
    QUICK_STEP,
    Variant,
    all_variants,
    attention_call,
    form_of,
    normal,
)
from mlx_paged.kv.blocks import BlockCopy
from mlx_paged.kv.pool import KVPool, as_int32
from mlx_paged.ops.dispatch import VARIABLE as SWITCH
from mlx_paged.ops.formats import dequantized, quantized

SUMS = 32 * 2.0**-23  # relative error that sums and functions of float32 may leave in a row
TF32 = 2.0**-8  # relative error where plain MLX multiplies float32 matrices with 11 bits on a GPU
MAX_FAILURES = 10  # of a kind of variants, which ends then

COMMAND = "python -m mlx_paged.doctor --only"


def check_kernels(found: Findings, quick: bool) -> None:
    """every variant of the kernels against float64"""
    if mx.default_device() == mx.Device(mx.cpu):
        compare(chosen(quick), found)
    else:
        compare_apart(quick, found)


def chosen(quick: bool, kind: str | None = None) -> list[Variant]:
    """The variants of a check, or those of one kind among them."""
    variants = all_variants()[:: QUICK_STEP if quick else 1]
    if kind is None and mx.default_device() == mx.Device(mx.cpu):  # whose kernels have one form
        return [variant for variant in variants if not variant.is_simplest]
    return [variant for variant in variants if kind in (None, variant.kind)]


def compare_apart(quick: bool, found: Findings) -> None:
    """Compare each kind in a process of its own: whatever happens there, the others are judged."""
    found.numbers |= {"kinds": {}, "refused": {}, "plain": []}
    try:
        for kind in found.progress(KINDS, "kind"):
            of_kind = Findings(kind)
            try:
                found_apart(of_kind, quick)
            finally:
                _add_kind(found, of_kind, quick)
    finally:
        _tell_refused(found)


def _add_kind(found: Findings, of_kind: Findings, quick: bool) -> None:
    kind, numbers = of_kind.name, of_kind.numbers
    found.failures += of_kind.failures
    found.num_wrong += of_kind.num_wrong
    found.numbers["kinds"][kind] = numbers
    found.numbers["refused"] |= numbers.get("refused", {})
    found.numbers["plain"] += numbers.get("plain", [])
    done = f"{numbers.get('run', 0)} of {len(chosen(quick, kind))} variants run"
    found.lines.append(f"{kind}: {of_kind.state}, {done}")
    if of_kind.unfinished:
        late = f"{kind}: {of_kind.unfinished}"
        found.unfinished = f"{found.unfinished}; {late}" if found.unfinished else late


def _tell_refused(found: Findings) -> None:
    """Say which kernels the GPU's compiler refuses: no failure, because their simplest forms and
    plain MLX are right, too."""
    refused, plain = found.numbers["refused"], found.numbers["plain"]
    for kernel, text in refused.items():
        short = "\n  ".join(text.strip().splitlines()[:MAX_MESSAGE_LINES])
        instead = "plain MLX" if kernel in plain else "another form of it"
        found.lines.append(f"REFUSED by the compiler, so {instead} runs: {kernel}: {short}")
    if refused:
        found.verdict = f"{len(refused)} kernels are refused"


def compare(variants: list[Variant], found: Findings) -> None:
    """Run each variant on the default device; a wrong one is a failure."""
    worst = {variant.dtype: (0.0, "none", 0.0) for variant in variants}
    num_failed: Counter[str] = Counter()
    num_flushed: Counter[str] = Counter()
    found.numbers |= {"variants": len(variants), "run": 0, "kernels": kernels_in_use()}
    for variant in found.progress(variants, "variant"):
        if num_failed[variant.kind] == MAX_FAILURES:
            continue
        try:
            error, allowed = error_of(variant, num_flushed)
            found.numbers["run"] += 1
            if np.isfinite(error):
                worst[variant.dtype] = max(worst[variant.dtype], (error, variant.name, allowed))
            reason = "" if error <= allowed else f"error {error:.2g}, tolerance {allowed:.2g}"
            found.num_wrong += bool(reason)
        except Exception as raised:
            reason = message(raised)
        if reason:
            found.failures.append(f"{variant.name}: {reason}\n  repeat: {COMMAND} {variant.name}")
            num_failed[variant.kind] += 1
            if num_failed[variant.kind] == MAX_FAILURES:
                found.failures.append(f"gave up on {variant.kind} after {MAX_FAILURES} failures")
    found.numbers |= {"refused": dict(ops.refused), "plain": sorted(ops.plain)}
    _tell_refused(found)
    run, kernels = found.numbers["run"], found.numbers["kernels"]
    found.lines.append(f"{run} of {len(variants)} variants run, on {kernels}")
    found.lines.append(
        "largest relative error of an output row; tolerance: eps / 2 of the output's dtype"
        f" + {SUMS:.1e} for float32 sums, elements below the smallest normal number count as"
        " this number; writes and copies: exact"
    )
    found.numbers["flushed"] = dict(num_flushed)
    found.lines += [
        f"{count} subnormal outputs of {dtype} are zeros: this device flushes them"
        for dtype, count in num_flushed.items()
    ]
    for dtype, (error, name, allowed) in worst.items():
        found.numbers[dtype] = {"worst_error": error, "variant": name, "tolerance": allowed}
        found.lines.append(f"{dtype}: {error:.2e} of {allowed:.2e} ({name})")


def kernels_in_use() -> str:
    """Which kernels answer on the default device."""
    if mx.default_device() == mx.Device(mx.cpu):
        return f"the CPU kernels ({ops.cpu_features()})"
    if ops.kernel_for() == "native":
        return "the Metal kernels"
    if ops.are_switched_off():
        return f"plain MLX ({SWITCH} is 0)"
    return "plain MLX (this build has no kernels for this GPU)"


def tolerance(dtype: mx.Dtype, is_plain: bool) -> float:
    """Largest relative error of an output row; `is_plain`: of plain MLX."""
    return float(mx.finfo(dtype).eps) / 2 + (TF32 if is_plain else SUMS)


def error_of(variant: Variant, num_flushed: Counter[str] | None = None) -> tuple[float, float]:
    """Relative error of the worst row, NaN if it read what it must not; the largest right one.
    Adds to `num_flushed`, by dtype of the output, how many subnormal elements are zero."""
    with form_of(variant):
        return _error_of(variant, num_flushed)


def _error_of(variant: Variant, num_flushed: Counter[str] | None) -> tuple[float, float]:
    if variant.op != "attention":
        return _edit_error(variant), 0.0
    arrays, options = attention_call(variant)
    q, k, v, tables, lens = arrays
    scales = {name: options.pop(name) for name in ("k_scales", "v_scales") if name in options}
    of_layers: Any = {name: [array] for name, array in scales.items()}
    got = ops.paged_attention(q, [k], [v], tables, lens, **options, **of_layers)
    is_plain = ops.kernel_for() == "reference" or not ops.takes_attention(
        q, k, v, tables.shape[1], variant.tokens, **options
    )
    allowed = tolerance(q.dtype, is_plain)
    if scales:
        stored = zip((k, v), scales.values(), strict=True)
        with mx.stream(mx.cpu):  # whatever a GPU makes of denormal scales
            arrays[1:3] = [dequantized(*each, mx.float32) for each in stored]
    weights, _ = options.pop("return_attn", False), options.pop("shared_prefixes", None)
    options = {n: to_numpy(x) if isinstance(x, mx.array) else x for n, x in options.items()}
    with np.errstate(invalid="ignore"):  # of what is not finite
        want = float64.attention(*map(to_numpy, arrays), **options)
    out = to_numpy(got[0] if weights else got)
    if num_flushed is not None and (count := float64.flushed(out, want[0], q.dtype)):
        num_flushed[str(q.dtype)] += count
    error = float64.worst_row(out, want[0], q.dtype)
    if weights:
        of_weights = float64.worst_row(to_numpy(got[1]), want[1])
        # The weights are float32 and have its tolerance.
        scaled = of_weights * allowed / tolerance(mx.float32, is_plain)
        error = float(np.max([error, scaled]))  # NaN if one of them is
    return error, allowed


def to_numpy(array: mx.array) -> float64.Array:
    """Floats as float64, everything else as it is."""
    if mx.issubdtype(array.dtype, mx.floating):
        return np.array(array.astype(mx.float32)).astype(np.float64)
    return np.array(array)


def _edit_error(variant: Variant) -> float:
    """0 if a pool has exactly the rows that were written, or the blocks that were copied."""
    rng, shape, size = variant.rng(), variant.shape, variant.block_size
    pool = KVPool([shape], 6, size)
    slots = rng.permutation(6 * size)[: 5 * size].astype(np.int32)
    slots[3], slots[7] = -1, 6 * size  # skipped
    sizes = [(len(slots), shape.n_kv_heads, dim) for dim in shape.row_dims]
    rows = [normal(rng, *each) for each in sizes]
    if shape.kv_bits is not None:
        for numbers, (factor, offset) in zip(rows, FAINT, strict=True):
            numbers[0] = numbers[0] * factor + offset
    k, v = (mx.array(numbers).astype(shape.dtype) for numbers in rows)
    pool.write(0, k, v, as_int32(slots))
    want = []
    for row, form in zip((k, v), shape.formats, strict=True):
        if form.has_scales:
            with mx.stream(mx.cpu):
                row = dequantized(*quantized(row, form), shape.dtype)
        blocks = np.zeros((6 * size, *row.shape[1:]))
        inside = (slots >= 0) & (slots < 6 * size)
        blocks[slots[inside]] = to_numpy(row)[inside]
        want.append(blocks.reshape(6, size, *row.shape[1:]).transpose(2, 0, 1, 3))
    if variant.op == "copy":
        pairs = [(0, 3), (3, 5), (2, 0)]  # in this order
        pool.copy_blocks([BlockCopy(*pair) for pair in pairs])
        for blocks in want:
            for source, destination in pairs:
                blocks[:, destination] = blocks[:, source]
    got = map(to_numpy, pool.read(0, lambda array: array, as_written=True))
    return 0.0 if all(map(np.array_equal, got, want)) else float("inf")
