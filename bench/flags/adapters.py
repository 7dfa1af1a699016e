"""Arguments of ``mlx_paged bench adapters``."""

import argparse

from bench.command import AT_LEAST_TWO, add_model, add_rounds, make_parser
from mlx_paged.cli import COUNT

ABOUT = "How fast rows decode with one adapter, and with one adapter each, beside none."


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("adapters", ABOUT)
    add = parser.add_argument
    add("--rows", type=COUNT, default=16, help="requests that decode together")
    add("--rank", type=COUNT, default=16, help="of the adapters")
    add("--prompt-tokens", type=COUNT, default=16, help="prompt tokens of each request")
    add("--max-tokens", type=AT_LEAST_TWO, default=24, help="new tokens of each request")
    add_rounds(parser, 3)
    add_model(parser)
    return parser.parse_args(argv)
