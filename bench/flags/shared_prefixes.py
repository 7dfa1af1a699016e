"""Arguments of ``mlx_paged bench shared_prefixes``."""

import argparse
import re
from dataclasses import dataclass

from bench.command import add_model, add_rounds, make_parser
from bench.flags.head_counts import DTYPES, HeadCounts
from mlx_paged.cli import COUNT

BLOCK_SIZE = 16
SAMPLED_TOKENS = 2000  # of the prompt that has several samples

ABOUT = "What it gains that sequences which begin with the same blocks attend to these together."


@dataclass(frozen=True)
class Batch:
    """So many sequences with shared and own keys each."""

    sequences: int
    shared: int
    own: int

    @staticmethod
    def parse(text: str) -> "Batch":
        """From a text such as "16x4096+64"."""
        numbers = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)
        found = Batch(*map(int, numbers.groups())) if numbers else Batch(0, 0, 0)
        if found.sequences < 2 or found.shared < BLOCK_SIZE or found.own < 1:
            form = "SEQUENCESxSHARED+OWN keys, e.g. 16x4096+64, at least 2x16+1"
            raise argparse.ArgumentTypeError(f"is {text!r}: expected {form}")
        return found

    def __str__(self) -> str:
        return f"{self.sequences}x{self.shared}+{self.own}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("shared_prefixes", ABOUT)
    add = parser.add_argument
    add(
        "--only", choices=("op", "served"), help="measure the op or the engine only (default: both)"
    )
    heads = [HeadCounts(32, 8, 128), HeadCounts(8, 2, 64)]
    add("--heads", type=HeadCounts.parse, nargs="+", default=heads, metavar="H:H_KV:D")
    add("--dtypes", choices=DTYPES, nargs="+", default=["float32", "bfloat16"])
    batches = [Batch(16, 4096, 64), Batch(32, 4000, 100), Batch(2, 512, 64)]
    add("--batches", type=Batch.parse, nargs="+", default=batches, metavar="NxSHARED+OWN")
    add_model(parser)
    add("--agents", type=COUNT, default=32, help="requests that share a system prompt")
    add("--shared-tokens", type=COUNT, default=4000, help="tokens of the system prompt")
    add("--samples", type=COUNT, default=16, help=f"samples of a prompt of {SAMPLED_TOKENS} tokens")
    add("--max-tokens", type=COUNT, default=128, help="maximum new tokens of each answer")
    add_rounds(parser, 7)
    return parser.parse_args(argv)
