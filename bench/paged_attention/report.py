"""What bench.paged_attention measured, as text and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.paged_attention.cases import Case

Row = dict[str, Any]

NAMES = {
    "paged": "paged op",
    "plain": "paged op, not quantized",
    "gather": "gather + MLX attention",
    "contiguous": "MLX attention, contiguous",
    "torch": "torch sdpa, contiguous",
    "torch_folded": "torch sdpa, GQA folded",
    "ggml": "ggml flash, contiguous",
}
X_LABELS = {"context": "context", "length": "chunk"}


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


def plot(path: Path, result: dict[str, Any]) -> None:
    """Draw decodes over contexts and chunks over lengths, a column for each dtype.

    Raises:
        ImportError: without matplotlib.
        OSError, ValueError: the file cannot be written, or not in this format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    machine, ceilings = result["machine"], result["ceilings"]
    heads = result["cases"][0]["heads"]
    rows = [row for row in result["cases"] if row["heads"] == heads]
    nearest = min((abs(row["block_size"] - 16) for row in rows if row["length"] == 1), default=0)
    singles = [r for r in rows if r["length"] == 1 and abs(r["block_size"] - 16) == nearest]
    decodes = _commonest(singles, "batch")
    chunks = _commonest([row for row in rows if row["length"] > 1], "context")
    read, gemm = max(ceilings["read_gb_s"].values()), ceilings["gemm_gflops"]
    panels = [("context", "best_gb_s", decodes, read), ("length", "best_gflop_s", chunks, gemm)]
    panels = [panel for panel in panels if panel[2]]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    size = (max(8.4, 1 + 3.8 * len(dtypes)), 1.4 + 2.9 * len(panels))
    figure, axes = pyplot.subplots(
        len(panels), len(dtypes), figsize=size, sharey="row", squeeze=False, layout="constrained"
    )
    for (x, y, of_kind, ceiling), row_axes in zip(panels, axes, strict=True):
        for dtype, axis in zip(dtypes, row_axes, strict=True):
            _draw(axis, [row for row in of_kind if row["dtype"] == dtype], x, y)
            axis.axhline(ceiling, color="grey", linestyle="--", linewidth=1, label="ceiling")
        row_axes[0].set_ylabel("GB/s of live K/V" if x == "context" else "GFLOP/s")
    lines = {line.get_label(): line for axis in axes.flat for line in axis.lines}
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=3, frameon=False)
    partial = "; PARTIAL" if result["partial"] else ""
    figure.suptitle(
        f"Attention, {heads} (query heads : KV heads : dim); fastest round, {result['clock']} time;"
        f" ceilings: memory read, float32 GEMM\n{machine['cpu']}, {machine['cores']} cores;"
        f" BLAS: {machine['blas']}{partial}",
        fontsize=10,
    )
    figure.savefig(path, dpi=200)
    pyplot.close(figure)


def _commonest(rows: Sequence[Row], key: str) -> list[Row]:
    """Those with the value of `key` that most rows have."""
    values = [row[key] for row in rows]
    commonest = max(values, key=lambda value: (values.count(value), value), default=0)
    return [row for row in rows if row[key] == commonest]


def _draw(axis: Any, rows: Sequence[Row], x: str, y: str) -> None:
    for name, label in NAMES.items():
        points = sorted((row[x], row["ways"][name][y]) for row in rows if name in row["ways"])
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
    axis.set(xscale="log", yscale="log", xlabel=f"{X_LABELS[x]} (tokens)")
    values = sorted({row[x] for row in rows})
    axis.set_xticks(values, [f"{value:,}" for value in values])
    axis.xaxis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)
    for row in rows[:1]:
        what = "batch {batch}" if x == "context" else "context {context}"
        title = f"{{dtype}}, {what}, blocks of {{block_size}}".format(**row)
        axis.set_title(title, fontsize=9)
