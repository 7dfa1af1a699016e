"""Arguments of ``mlx_paged bench adapters``."""

import argparse

from bench.command import add_model, make_parser
from mlx_paged.cli import COUNT

ABOUT = "How fast rows decode with one adapter, and with one adapter each, beside none."


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("adapters", ABOUT)
    add = parser.add_argument
    add("--rows", type=COUNT, default=16, help="requests that decode together")
    add("--rank", type=COUNT, default=16, help="of the adapters")
    add("--prompt-tokens", type=COUNT, default=16, help="prompt tokens of each request")
    add("--many", type=COUNT, metavar="N", help="load N adapters beside streams, instead")
    add("--max-stall-ms", type=COUNT, help="of the engine with --many: the bound on a step")
    add("--steps", type=COUNT, default=40, help="timed steps of each course")
    add_model(parser)
    return parser.parse_args(argv)
