"""Attention over paged K/V beside a gather before MLX's attention, and that on contiguous K/V.

    python -m bench.paged_attention --quick
    python -m bench.paged_attention --heads 32:8:128 --dtypes bfloat16 --plot curve.png

All ways to compute a case take turns, a read of memory among them. Single tokens are compared with
that read, chunks with a matrix product. After Ctrl-C the bench reports what it has measured.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from bench.command import AT_LEAST_TWO, GIB, INTERRUPTED, make_parser, print_result
from bench.machine import (
    Clock,
    check_machine,
    cores,
    describe,
    gemm_gflops,
    measure_read,
)
from bench.paged_attention.cases import DTYPES, Case, HeadCounts, chunk_cases, decode_cases
from bench.paged_attention.ggml import is_installed
from bench.paged_attention.report import case_lines, ceiling_lines, plot
from bench.paged_attention.timing import time_case
from mlx_paged.arguments import missing
from mlx_paged.cli import COUNT, KV_BLOCK_SIZES, Parser, number
from mlx_paged.doctor.speed import MemoryReader
from mlx_paged.kv.memory import physical_memory
from mlx_paged.options import checked_bits

GEMM_REPEATS = 20

FULL: dict[str, Any] = {
    "heads": [HeadCounts(8, 2, 64), HeadCounts(32, 8, 128), HeadCounts(32, 4, 128)],
    "dtypes": list(DTYPES),
    "batches": [8, 16, 32, 64],
    "contexts": [512, 4096, 16384],
    "block_sizes": list(KV_BLOCK_SIZES),
    "kv_bits": [None],
    "chunk_lengths": [16, 64, 128, 512],
    "chunk_contexts": [512, 2048, 6144],
    "rounds": 7,
}
QUICK = FULL | {
    "heads": [HeadCounts(8, 2, 64)],
    "batches": [8, 32],
    "contexts": [512, 4096],
    "block_sizes": [16],
    "chunk_lengths": [16, 128],
    "chunk_contexts": [512, 2048],
    "rounds": 3,
}


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="a small part of the grid, 3 rounds")
    only = "measure decodes or prefill chunks only (default: both)"
    add("--only", choices=("decodes", "chunks"), help=only)
    add(
        "--heads",
        type=HeadCounts.parse,
        nargs="+",
        metavar="H:H_KV:D",
        help="query heads, K/V heads, head dimension: 32:8:128",
    )
    add("--dtypes", choices=DTYPES, nargs="+")
    add("--batches", type=COUNT, nargs="+", help="batch sizes of decodes")
    add("--contexts", type=COUNT, nargs="+", help="context lengths of decodes")
    sizes = "tokens per block; chunks use the size nearest to 16"
    add("--block-sizes", type=int, choices=KV_BLOCK_SIZES, nargs="+", help=sizes)
    bits = "none, 8, 6 or 4: K/V of the pool; 8, 6 and 4 are compared with the unquantized K/V"
    add("--kv-bits", type=_kv_bits, nargs="+", metavar="BITS", help=bits)
    add("--chunk-lengths", type=AT_LEAST_TWO, nargs="+", help="tokens of a chunk")
    add(
        "--chunk-contexts", type=COUNT, nargs="+", help="context lengths at the end of later chunks"
    )
    add("--rounds", type=COUNT, help="number of rounds; times are medians over the rounds")
    seconds = number(float, 0, 1e6, "a number of seconds >= 0")
    limit = "seconds after which a case starts no more rounds"
    add("--case-seconds", type=seconds, default=10.0, help=limit)
    memory = number(float, 1e-3, 1e6, "a number of GiB above 0")
    skip = "skip cases that need more memory (default: half of the machine's memory)"
    add("--memory", type=memory, metavar="GiB", help=skip)
    add(
        "--clock",
        type=Clock,
        choices=list(Clock),
        default=Clock.WALL,
        help="wall clock, or processor time of all threads divided by the cores, for a busy"
        " machine; with processor give BLAS one thread (default: wall)",
    )
    add("--torch", action="store_true", help="compare with torch's attention, too")
    add("--ggml", action="store_true", help="compare with ggml's flash attention (llama.cpp), too")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw a chart for the first of --heads to this file",
    )


def _kv_bits(text: str) -> int | None:
    try:
        return None if text == "none" else checked_bits("--kv-bits", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("paged_attention", __doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    if args.ggml and not is_installed():
        parser.error(f"--ggml: {missing('llama-cpp-python', 'peers')}")
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def grid(args: argparse.Namespace) -> list[Case]:
    cases: list[Case] = []
    if args.only != "chunks":
        cases += decode_cases(args)
    if args.only != "decodes":
        cases += chunk_cases(args)
    return cases


def fitting(cases: list[Case], limit: float) -> tuple[list[Case], list[dict[str, Any]]]:
    """The cases that fit into memory, and the others with the reason."""
    skipped = [
        case.as_dict()
        | {"reason": f"needs {case.memory_bytes / GIB:.3g} GiB of at most {limit / GIB:.3g}"}
        for case in cases
        if case.memory_bytes > limit
    ]
    return [case for case in cases if case.memory_bytes <= limit], skipped


def measure_ceilings(clock: Clock) -> dict[str, Any]:
    """By name: "read_gb_s" (by number of threads), "gemm_gflops", "load_average"."""
    machine = check_machine()
    gemm = max(machine["gemm_gflops"], gemm_gflops(clock, GEMM_REPEATS))
    return {**machine, "gemm_gflops": gemm, "read_gb_s": measure_read(clock)}


def raise_ceilings(ceilings: dict[str, Any], clock: Clock, rows: list[dict[str, Any]]) -> None:
    """Measure again and keep the highest: a busy machine rarely reaches its ceilings."""
    reads, every_core = ceilings["read_gb_s"], str(cores())
    reads[every_core] = max([reads[every_core], *(row["best_read_gb_s"] for row in rows)])
    again = gemm_gflops(clock, GEMM_REPEATS)
    ceilings["gemm_gflops"] = max(ceilings["gemm_gflops"], again)


def measure(args: argparse.Namespace, cases: list[Case], rows: list[dict[str, Any]]) -> None:
    """Append the times of each case to `rows`, and print them."""
    reader = MemoryReader(cores())
    for case in tqdm(cases, unit="case", disable=None):
        rows.append(time_case(case, reader, args))
        mx.clear_cache()
        tqdm.write("\n".join(case_lines(case, rows[-1])))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    started = time.perf_counter()
    machine, ceilings = describe(), measure_ceilings(args.clock)
    print("\n".join(ceiling_lines(machine, ceilings)))
    limit = physical_memory() / 2 if args.memory is None else args.memory * GIB
    cases, skipped = fitting(grid(args), limit)
    for case in skipped:
        print("skipped:", *(f"{name} {value}" for name, value in case.items()))
    rows: list[dict[str, Any]] = []
    partial = False
    try:
        measure(args, cases, rows)
    except KeyboardInterrupt:
        partial = True
        print(f"interrupted after {len(rows)} of {len(cases)} cases", file=sys.stderr)
    except ArithmeticError as error:
        sys.exit(f"bench.paged_attention: {error}")
    raise_ceilings(ceilings, args.clock, rows)
    result = {
        "machine": machine,
        "clock": args.clock,
        "ceilings": ceilings,
        "partial": partial,
        "seconds": round(time.perf_counter() - started, 1),
        "skipped": skipped,
        "cases": rows,
    }
    if args.plot is not None and rows:
        try:
            plot(args.plot, result)
        except (ImportError, OSError, ValueError) as error:
            print(f"no picture: {error}", file=sys.stderr)
    print_result("paged_attention", result)
    if partial:
        raise SystemExit(INTERRUPTED)


if __name__ == "__main__":
    main()
