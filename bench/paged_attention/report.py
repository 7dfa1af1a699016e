"""What bench.paged_attention measured: as text, as a picture, and as the dispatcher's table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.paged_attention.cases import Case, HeadCounts
from mlx_paged.path_table import Heads, PathTable, Timing

Row = dict[str, Any]

NAMES = {
    "paged": "paged op",
    "gather": "gather + MLX attention",
    "contiguous": "MLX attention, contiguous",
    "torch": "torch sdpa, contiguous",
    "torch_folded": "torch sdpa, GQA folded",
    "ggml": "ggml flash, contiguous",
}


def ceiling_lines(machine: dict[str, Any], ceilings: dict[str, Any]) -> list[str]:
    reads = ", ".join(
        f"{rate:.1f} GB/s on {threads} thread{'s' * (threads != '1')}"
        for threads, rate in ceilings["read_gb_s"].items()
    )
    return [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; BLAS: {machine['blas']}",
        f"Ceilings: memory read {reads}; float32 GEMM {ceilings['gemm_gflops']:.0f} GFLOP/s"
        f" (load average {ceilings['load_average']:.1f})",
    ]


def case_lines(case: Case, row: Row) -> list[str]:
    """One line for each way: decodes in GB/s and percent of the read, chunks in GFLOP/s."""
    lines = []
    for name, way in row["ways"].items():
        if case.length == 1:
            rate = f"{way['gb_s']:7.2f} GB/s {way['percent_of_read']:5.1f} % of read"
        else:
            rate = f"{way['gflop_s']:7.2f} GFLOP/s"
        line = f"{case}  {NAMES[name]:26} {way['ms']:9.3f} ms (best {way['best_ms']:.3f}) {rate}"
        if name != "paged":
            line += f"  paged is {way['speedup']:.2f} x as fast ({way['best_speedup']:.2f})"
        lines.append(line)
    return lines


def path_table(result: dict[str, Any]) -> PathTable:
    """The dispatcher's table: the best times of both ways, for each length and context.

    Of several cases with the same length and context, the one with the blocks nearest to 16 tokens
    and the smallest batch counts.
    """
    chosen: dict[Heads, dict[tuple[int, int], Row]] = {}
    machine = result["machine"]
    for row in sorted(result["cases"], key=lambda r: (abs(r["block_size"] - 16), r["batch"])):
        heads = _case(row).key(machine["device"])
        chosen.setdefault(heads, {}).setdefault((row["length"], row["context"]), row)
    timings = {
        heads: [
            Timing(length, context, *(row["ways"][way]["best_ms"] for way in ("paged", "gather")))
            for (length, context), row in sorted(of_heads.items())
        ]
        for heads, of_heads in chosen.items()
    }
    return PathTable(timings, machine | result["ceilings"] | {"clock": result["clock"]})


def _case(row: Row) -> Case:
    names = ("dtype", "length", "batch", "context", "block_size")
    return Case(HeadCounts.parse(row["heads"]), **{name: row[name] for name in names})


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw decodes over contexts and chunks over lengths, a column for each dtype.

    Raises:
        ImportError: without matplotlib.
        OSError, ValueError: the file cannot be written, or not in this format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    machine, rows = result["machine"], result["cases"]
    heads = rows[0]["heads"]
    rows = [row for row in rows if row["heads"] == heads]
    decodes, chunks = _decodes(rows), _chunks(rows)
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    panels = [(kind, name) for kind, name in ((decodes, "decode"), (chunks, "chunk")) if kind]
    size = (1 + 4.3 * len(dtypes), 0.9 + 3.4 * len(panels))
    figure, axes = pyplot.subplots(
        len(panels), len(dtypes), figsize=size, sharey="row", squeeze=False, layout="constrained"
    )
    for (kind, name), row_axes in zip(panels, axes, strict=True):
        for dtype, axis in zip(dtypes, row_axes, strict=True):
            of_dtype = [row for row in kind if row["dtype"] == dtype]
            draw = _draw_decodes if name == "decode" else _draw_chunks
            draw(axis, of_dtype, result["ceilings"])
        row_axes[0].set_ylabel("GB/s of live K/V" if name == "decode" else "GFLOP/s")
    axes[0, 0].legend(fontsize=8)
    partial = "; PARTIAL" if result["partial"] else ""
    figure.suptitle(
        f"Attention, {heads} (query heads : KV heads : dim), blocks of"
        f" {(decodes + chunks)[0]['block_size']}; fastest round,"
        f" {result['clock']} time\n"
        f"{machine['cpu']}, {machine['cores']} cores; BLAS: {machine['blas']}{partial}",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _decodes(rows: Sequence[Row]) -> list[Row]:
    """Single tokens in one block size, of the batch with the most cases."""
    decodes = [row for row in rows if row["length"] == 1]
    block_size = min((row["block_size"] for row in decodes), key=lambda s: abs(s - 16), default=0)
    decodes = [row for row in decodes if row["block_size"] == block_size]
    batches = [row["batch"] for row in decodes]
    most = max(batches, key=lambda batch: (batches.count(batch), batch), default=0)
    return [row for row in decodes if row["batch"] == most]


def _chunks(rows: Sequence[Row]) -> list[Row]:
    """Chunks that end at the context with the most cases."""
    chunks = [row for row in rows if row["length"] > 1]
    contexts = [row["context"] for row in chunks]
    most = max(contexts, key=lambda c: (contexts.count(c), c), default=0)
    return [row for row in chunks if row["context"] == most]


def _draw_decodes(axis: Any, rows: Sequence[Row], ceilings: dict[str, Any]) -> None:
    _draw(axis, rows, "context", "best_gb_s")
    for (threads, rate), above in zip(ceilings["read_gb_s"].items(), (False, True), strict=False):
        _draw_ceiling(axis, rate, f"memory read, {threads} thread{'s' * (threads != '1')}", above)
    if rows:
        axis.set_title(f"decode, {rows[0]['dtype']}, batch {rows[0]['batch']}", fontsize=9)
    axis.set_xlabel("context, tokens")


def _draw_chunks(axis: Any, rows: Sequence[Row], ceilings: dict[str, Any]) -> None:
    _draw(axis, rows, "length", "best_gflop_s")
    _draw_ceiling(axis, ceilings["gemm_gflops"], "float32 GEMM", above=True)
    if rows:
        axis.set_title(f"chunk, {rows[0]['dtype']}, context {rows[0]['context']}", fontsize=9)
    axis.set_xlabel("chunk, tokens")


def _draw_ceiling(axis: Any, rate: float, label: str, above: bool) -> None:
    axis.axhline(rate, color="grey", linestyle="--", linewidth=1)
    axis.annotate(
        label,
        (0.02, rate),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2 if above else -8),
        textcoords="offset points",
        fontsize=7,
    )


def _draw(axis: Any, rows: Sequence[Row], x: str, y: str) -> None:
    for name, label in NAMES.items():
        points = sorted((row[x], row["ways"][name][y]) for row in rows if name in row["ways"])
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
    values = sorted({row[x] for row in rows})
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(values, [str(value) for value in values])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
