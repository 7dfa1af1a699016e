"""Arguments of ``mlx_paged bench host_cost``."""

import argparse
from shutil import which

from bench.command import make_parser
from mlx_paged.cli import COUNT

ABOUT = "What a decode step costs the host, part by part, and what the allocator's methods cost."

ROWS = [1, 8, 32, 128, 256]
GPU_ROWS = [1, 4, 16]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("host_cost", ABOUT)
    add = parser.add_argument
    about_rows = "running requests (default: %s; with --gpu %s)"
    shown = (" ".join(map(str, rows)) for rows in (ROWS, GPU_ROWS))
    add("--rows", type=COUNT, nargs="+", help=about_rows % tuple(shown))
    add("--blocks", type=COUNT, default=512, help="KV blocks of each request")
    add("--steps", type=COUNT, default=40, help="steps of each engine in a round")
    add("--rounds", type=COUNT, default=5, help="number of rounds")
    late = "read the tokens of each step before the next step is launched"
    add("--no-lookahead", action="store_true", help=late)
    add("--layers", type=COUNT, default=28, help="layers of the model whose graph is built")
    gpu = "only whole steps where ops choose as on a GPU, beside mlx-lm; a CPU computes them"
    add("--gpu", action="store_true", help=gpu)
    counted = "with --gpu: count instructions and cache misses by valgrind's callgrind, no times"
    add("--counted", action="store_true", help=counted)
    policies = "only whole steps of each number of rows under the policies fcfs and fair, in turns"
    add("--policies", action="store_true", help=policies)
    args = parser.parse_args(argv)
    if args.counted and not args.gpu:
        parser.error("--counted: expected --gpu beside it")
    if args.counted and not (which("valgrind") and which("cc")):
        parser.error("--counted: needs valgrind with its headers, and a C compiler named cc")
    args.rows = args.rows or (GPU_ROWS if args.gpu else ROWS)
    return args
