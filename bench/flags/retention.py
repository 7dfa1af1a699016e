"""Arguments of ``mlx_paged bench retention``."""

import argparse

from bench.command import make_parser
from bench.retention.traces import TRACES

ABOUT = "Tokens that an engine computes a second time, for each order of eviction."


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("retention", ABOUT)
    about = f"of {', '.join(TRACES)} (default: all)"
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=[*TRACES], help=about)
    return parser.parse_args(argv)
