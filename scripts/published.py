"""The tables of docs/benchmarks.md about block sizes, many sequences and the gather.

    LD_PRELOAD=libopenblas.so.0 python -m scripts.published blocks

Each part runs bench commands in this process, prints their ceiling, a Markdown table with the load
of the machine, and one JSON line. A part takes a few minutes on a machine with nothing else to do.
Where other processes compute, the processor time of `blocks` and `--clock processor` with
OPENBLAS_NUM_THREADS=1 still say something; other times do not.

    blocks   tokens/s and step times of a served trace, by block size, in turns
    op       decodes of 8 to 64 sequences, by block size, beside a read of memory
    active   64 sequences at once, open loop, 100,000 output tokens
    gather   what a gather in front of attention costs, up to 65,536 tokens; and in NumPy
"""

import argparse
import contextlib
import io
import json
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from bench.command import print_result
from bench.machine import Clock, cores
from bench.paged_attention import __main__ as paged_attention
from bench.paged_attention.cases import Case, HeadCounts, Inputs
from bench.paged_attention.timing import READ, in_turns
from bench.serving import __main__ as serving
from mlx_paged.cli import COUNT, KV_BLOCK_SIZES, Parser
from mlx_paged.doctor.speed import MemoryReader

SERVING = ["--preset=reference", "--no-static", "--prefill-chunk=96"]
ACTIVE = ["--target-active=64", "--tokens-target=100000", "--open-loop", "--request-rate=30"]
OP_GRID = ["--dtypes", *("float32", "bfloat16"), "--batches", *("8", "16", "32", "64")]
OP_GRID += ["--contexts", "4096"]
USUAL_BLOCK = 16
CONTEXTS = (4096, 16384, 65536)
HEADS = "8:2:64"
CASE_SECONDS = 5.0

Record = dict[str, Any]
Rows = list[list[str]]


def run(
    command: Callable[[Sequence[str]], Any], arguments: Sequence[str], *, says: bool = True
) -> Record:
    """What a bench command prints in its last line; `says`: its lines about ceilings, too."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        status = command(arguments)
    if status:
        raise SystemExit(status)
    *lines, last = shown.getvalue().splitlines()
    for line in lines:
        if says and line.startswith(("Floor", "Ceiling", "Estimate")):
            print(line, flush=True)
    record: Record = json.loads(last)
    return record


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def median_of(records: Sequence[Record], *keys: str) -> float:
    values: list[Any] = list(records)
    for key in keys:
        values = [value[key] for value in values]
    return float(median(values))


def blocks(args: argparse.Namespace) -> tuple[str, Rows, Record]:
    """Every round serves the trace with each block size and begins with another one."""
    found: dict[int, list[Record]] = {size: [] for size in KV_BLOCK_SIZES}
    loads: list[float] = []
    for number in range(args.rounds):
        first = number % len(KV_BLOCK_SIZES)
        for size in (*KV_BLOCK_SIZES[first:], *KV_BLOCK_SIZES[:first]):
            options = [*SERVING, "--engines=mlx_paged", f"--kv-block-size={size}"]
            start_s = time.process_time()
            record = run(serving.main, options, says=not loads)
            cpu_s = time.process_time() - start_s
            found[size].append(record["engines"]["mlx_paged"] | {"cpu_s": round(cpu_s, 2)})
            loads.append(record["load_average"])
    rate, rows = "output_tokens_per_sec", []
    for size, records in found.items():
        pairs = list(zip(records, found[USUAL_BLOCK], strict=True))
        ratio = median(a[rate] / b[rate] for a, b in pairs)
        cpu_ratio = median(a["cpu_s"] / b["cpu_s"] for a, b in pairs)
        cpu = f"{median_of(records, 'cpu_s'):.1f} ({cpu_ratio:.2f} x)"
        ticks = (f"{median_of(records, 'tick_ms', p):.1f}" for p in ("p50", "p95", "p99"))
        waste = f"{median_of(records, 'kv_held_over_live'):.3f}"
        rows.append(
            [f"{size}", f"{median_of(records, rate):.0f}", f"{ratio:.2f} x", *ticks, waste, cpu]
        )
    head = "block size|output tokens/s|of blocks of 16|step p50, ms|p95|p99|K/V held over live"
    head += "|processor time, s"
    return head, rows, {"load_average": loads, "engines": found}


def op(args: argparse.Namespace) -> tuple[str, Rows, Record]:
    """Cases come one after the other, so the read of the same rounds is what compares them."""
    grid = ["--only=decodes", "--heads", HEADS, *OP_GRID]
    grid += ["--block-sizes", *map(str, KV_BLOCK_SIZES)]
    limits = [f"--rounds={args.rounds}", f"--case-seconds={CASE_SECONDS}", f"--clock={args.clock}"]
    record = run(paged_attention.main, [*grid, *limits])
    by_size: dict[tuple[str, int], list[str]] = {}
    for case in record["cases"]:
        way = case["ways"]["paged"]
        cells = by_size.setdefault((case["dtype"], case["batch"]), [])
        cells.append(f"{way['ms']:.2f} ms, {way['percent_of_read']:.0f} %")
    rows = [[dtype, f"{batch}", *cells] for (dtype, batch), cells in by_size.items()]
    head = "dtype|sequences|" + "|".join(f"blocks of {size}" for size in KV_BLOCK_SIZES)
    return head, rows, {"load_average": record["ceilings"]["load_average"], "op": record}


def active(args: argparse.Namespace) -> tuple[str, Rows, Record]:
    """More requests come than any engine here serves, so 64 run from the ramp to the tail."""
    record = run(
        serving.main, [*SERVING, *ACTIVE, f"--engines={args.engines}", f"--rounds={args.rounds}"]
    )
    rows = []
    for name, row in record["engines"].items():
        phases, spikes = row["phases"], row["phases"]["spikes"]
        share = phases["steady"]["time_s"] / row["wall_s"]
        ticks = " / ".join(f"{row['tick_ms'][p]:.1f}" for p in ("p50", "p95", "p99", "max"))
        cells = [f"{row['output_tokens']}", f"{row['output_tokens_per_sec']:.0f}"]
        cells += [f"{row['continuous_steady_tokens_per_sec']:.0f}", f"{share:.0%}", ticks]
        cells += [f"{spikes['count']}, {spikes['time_s'] / row['wall_s']:.1%}"]
        rows.append([name, *cells, f"{row['kv_held_over_live']:.3f}"])
    head = "engine|output tokens|tokens/s|steady|steady part of the time"
    head += "|step p50 / p95 / p99 / max, ms|spikes, part of the time|K/V held over live"
    return head, rows, {"load_average": record["load_average"], "serving": record}


def gather(args: argparse.Namespace) -> tuple[str, Rows, Record]:
    """One sequence: attention by the op, after a gather, on contiguous K/V; the gather alone."""
    grid = ["--only=decodes", "--heads", HEADS, "--dtypes", "float32", "--batches", "1"]
    grid += ["--contexts", *map(str, CONTEXTS), "--block-sizes", f"{USUAL_BLOCK}"]
    limits = [f"--rounds={args.rounds}", f"--case-seconds={CASE_SECONDS}", f"--clock={args.clock}"]
    record = run(paged_attention.main, [*grid, *limits])
    rows = []
    for case in record["cases"]:
        ways = case["ways"]
        times = [f"{ways[name]['ms']:.2f}" for name in ("paged", "contiguous", "gather")]
        tax = ways["gather"]["speedup"] / ways["contiguous"]["speedup"]
        alone = copies(case["context"], args)
        case["copies_ms"] = alone
        times += [f"{tax:.2f} x", *(f"{ms:.2f}" for ms in alone.values())]
        rows.append([f"{case['context']}", *times])
    head = "tokens|paged op, ms|MLX, contiguous|gather + MLX|tax"
    head += "|gather alone, ms|copy, contiguous|NumPy `cache[slots]`|NumPy, contiguous"
    return head, rows, {"load_average": record["ceilings"]["load_average"], "op": record}


def copies(context: int, args: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds to copy the keys and values of one sequence, by way."""
    heads = HeadCounts.parse(HEADS)
    inputs = Inputs(Case(heads, "float32", 1, 1, context, USUAL_BLOCK))
    num_slots = inputs.tables.size * USUAL_BLOCK
    slots = (np.array(inputs.tables)[0, :, None] * USUAL_BLOCK + np.arange(USUAL_BLOCK)).ravel()
    cache = np.ones((2, num_slots, heads.num_kv_heads, heads.head_dim), np.float32)
    layers = range(inputs.case.num_layers)
    ones = mx.array(1.0)
    reader = MemoryReader(cores())
    ways: dict[str, Callable[[], object]] = {
        "gather": lambda: mx.eval([inputs.gather(layer) for layer in layers]),
        "copy": lambda: mx.eval([x * ones for layer in layers for x in inputs.contiguous[layer]]),
        "numpy gather": lambda: [cache[:, slots[:context]] for _ in layers],
        "numpy copy": lambda: [cache[:, :context].copy() for _ in layers],
    }
    runs: dict[str, Callable[[], Any]] = {READ: reader.read, **ways}
    times = in_turns(runs, args.rounds, CASE_SECONDS, args.clock)
    return {name: round(1000 * median(times[name]) / len(layers), 3) for name in ways}


PARTS = {"blocks": blocks, "op": op, "active": active, "gather": gather}


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="scripts.published", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=PARTS, help="which table")
    rounds = "default: 3; 5 of the op and the gather; 1 of active"
    parser.add_argument("--rounds", type=COUNT, help=rounds)
    engines = "of active (default: %(default)s)"
    parser.add_argument("--engines", default="mlx_paged", help=engines)
    clock = "of op and gather; processor on a busy machine (default: %(default)s)"
    parser.add_argument("--clock", type=Clock, choices=[*Clock], default=Clock.WALL, help=clock)
    args = parser.parse_args(argv)
    args.rounds = args.rounds or {"blocks": 3, "active": 1}.get(args.part, 5)
    head, rows, record = PARTS[args.part](args)
    print("", markdown(head.split("|"), rows), sep="\n")
    print(f"\nLoad average: {record['load_average']}")
    print_result("published", {"part": args.part, **record})


if __name__ == "__main__":
    main()
