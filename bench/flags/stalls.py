"""Arguments of ``mlx_paged bench stalls``."""

import argparse

from bench.command import AT_LEAST_TWO, add_model, add_rounds, make_parser
from mlx_paged.cli import COUNT, MILLISECONDS

ABOUT = "How long a long prompt delays running streams: mlx_paged beside mlx-lm's BatchGenerator."


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("stalls", ABOUT)
    add = parser.add_argument
    add("--streams", type=COUNT, default=8, help="requests that decode")
    add("--stream-tokens", type=COUNT, default=256, help="prompt tokens of each of these requests")
    add("--prompt-tokens", type=AT_LEAST_TWO, default=6000, help="tokens of the long prompt")
    add("--max-stall-ms", type=MILLISECONDS, default=150.0, help="mlx_paged's --max-stall-ms")
    add("--warm-up-tokens", type=COUNT, default=1024, help="tokens of the warm-up prompt")
    add("--prefill-chunk", type=COUNT, default=512, help="prefill chunk of mlx_paged")
    add("--small-step", type=COUNT, default=128, help="prefill step of mlx-lm")
    add_rounds(parser, 3)
    add_model(parser)
    return parser.parse_args(argv)
