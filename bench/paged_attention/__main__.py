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
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from bench.command import GIB, INTERRUPTED, print_result
from bench.flags.clock import Clock
from bench.flags.paged_attention import parse
from bench.machine import check_machine, cores, describe, gemm_gflops, measure_read
from bench.paged_attention.cases import Case, chunk_cases, decode_cases
from bench.paged_attention.report import case_lines, ceiling_lines, plot
from bench.paged_attention.timing import time_case
from mlx_paged.doctor.speed import MemoryReader
from mlx_paged.kv.memory import physical_memory

GEMM_REPEATS = 20


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
