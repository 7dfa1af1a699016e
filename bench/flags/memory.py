"""Arguments of ``mlx_paged bench memory``."""

import argparse

from bench.command import AT_LEAST_TWO, add_model, make_parser
from mlx_paged.cli import COUNT, COUNT_OR_NONE, KV_BLOCK_SIZES

ABOUT = (
    "What sharing saves: blocks, copies on write and bytes of samples, beams and shared prefixes."
)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("memory", ABOUT)
    add = parser.add_argument
    add("--prompt-tokens", type=COUNT, default=500, help="tokens of the shared prompt")
    own = "maximum prompt tokens after the shared prefix"
    add("--own-tokens", type=AT_LEAST_TWO, default=100, help=own)
    add("--n", type=COUNT, default=16, help="number of samples, beams and requests")
    add("--max-tokens", type=AT_LEAST_TWO, default=64, help="maximum new tokens of each sequence")
    sizes = KV_BLOCK_SIZES
    add("--block-size", type=int, choices=sizes, default=16, help="tokens in a KV block")
    add("--kv-bits", metavar="8|6|4", help="quantized K/V, beside mlx-lm's quantized caches")
    rounds = "also time samples and forks, in so many rounds (default: no times)"
    add("--rounds", type=COUNT_OR_NONE, default=0, help=rounds)
    add_model(parser)
    return parser.parse_args(argv)
