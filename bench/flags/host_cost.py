"""Arguments of ``mlx_paged bench host_cost``."""

import argparse

from bench.command import make_parser
from mlx_paged.cli import COUNT

ABOUT = "What a decode step costs the host, part by part, and what the allocator's methods cost."


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("host_cost", ABOUT)
    add, rows = parser.add_argument, [1, 8, 32, 128, 256]
    add("--rows", type=COUNT, nargs="+", default=rows, help="running requests")
    add("--blocks", type=COUNT, default=512, help="KV blocks of each request")
    add("--steps", type=COUNT, default=40, help="steps of each engine in a round")
    add("--rounds", type=COUNT, default=5, help="number of rounds")
    late = "read the tokens of each step before the next step is launched"
    add("--no-lookahead", action="store_true", help=late)
    add("--layers", type=COUNT, default=28, help="layers of the model whose graph is built")
    return parser.parse_args(argv)
