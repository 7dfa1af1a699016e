"""Arguments of ``mlx_paged bench retention``."""

import argparse

from bench.command import make_parser
from bench.retention.traces import TRACES
from bench.retention.works import WORKS

ABOUT = "Tokens that an engine computes a second time, for each order of eviction."


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("retention", ABOUT)
    about = f"of {', '.join(TRACES)} (default: all)"
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=[*TRACES], help=about)
    parser.add_argument("--seed", type=int, default=0, help="of the traces' numbers (default 0)")
    about = "whose operations a block saves (default: SmolLM2-135M); tokens: each takes as many"
    parser.add_argument("--model", choices=WORKS, default="SmolLM2-135M", help=about)
    return parser.parse_args(argv)
