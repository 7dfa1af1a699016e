"""Arguments of ``mlx_paged bench paged_attention``."""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.command import AT_LEAST_TWO, make_parser
from bench.flags.clock import Clock
from bench.flags.head_counts import DTYPES, HeadCounts
from mlx_paged.arguments import missing
from mlx_paged.cli import COUNT, KV_BLOCK_SIZES, Parser, number
from mlx_paged.options import checked_bits

ABOUT = (
    "Attention over paged K/V beside a gather before MLX's attention, and that on contiguous K/V."
)


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
    parser = make_parser("paged_attention", ABOUT)
    add_arguments(parser)
    args = parser.parse_args(argv)
    if args.ggml and importlib.util.find_spec("llama_cpp") is None:
        parser.error(f"--ggml: {missing('llama-cpp-python', 'peers')}")
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args
