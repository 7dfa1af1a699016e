"""Arguments of ``mlx_paged bench admission``."""

import argparse

from bench.command import add_model, add_rounds, make_parser
from mlx_paged.cli import COUNT

ABOUT = "What it costs that a sequence joins, leaves or forks beside much live K/V."


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("admission", ABOUT)
    add = parser.add_argument
    add("--rows", type=COUNT, default=8, help="sequences with live K/V")
    add("--tokens", type=COUNT, default=4096, help="tokens of each of these sequences")
    add("--admitted-tokens", type=COUNT, default=128, help="tokens of the sequence that joins")
    add(
        "--visitor-tokens", type=COUNT, default=8, help="tokens of the prompt that joins and leaves"
    )
    add_rounds(parser, 5)
    add_model(parser, default="many-kv-heads")
    return parser.parse_args(argv)
