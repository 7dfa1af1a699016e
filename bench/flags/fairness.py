"""Arguments of ``mlx_paged bench fairness``."""

import argparse

from bench.command import make_parser
from mlx_paged.cli import COUNT, COUNT_OR_NONE

ABOUT = "How many steps one client's requests delay another client's first token, over HTTP."


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("fairness", ABOUT)
    add = parser.add_argument
    add("--model", help="folder of a model (default: the demo model)")
    add("--requests", type=COUNT, default=500, help="requests of the client with many")
    add("--probes", type=COUNT, default=100, help="requests of the other client, one by one")
    add("--prompt-tokens", type=COUNT, default=40, help="words of the other client's prompts")
    add("--max-tokens", type=COUNT, default=200, help="of each request of the client with many")
    add("--queue", type=COUNT_OR_NONE, help="--max-queue of the server (default: room for all)")
    add("--policy", choices=["fair", "fcfs"], default="fair", help="--policy of the server")
    add(
        "--step-ms",
        type=COUNT_OR_NONE,
        default=0,
        help="each step takes so many milliseconds longer, as with a larger model",
    )
    return parser.parse_args(argv)
