"""Arguments of ``python -m mlx_paged.generate``, named as in mlx_lm.generate."""

import argparse

from mlx_paged import cli
from mlx_paged.cli import COUNT, COUNT_OR_NONE, FRACTION, KV_BLOCK_SIZES, Parser, number

MAX_TOKENS = 100
PENALTIES = {
    "repetition": "divides the logits of tokens among the last 20; 1 is off",
    "presence": "subtracted from the logits of tokens among the last 20",
    "frequency": "the same, once for each time that the token occurs there",
}


def make_parser() -> Parser:
    parser = Parser(
        prog="mlx_paged.generate",
        description="Generate text for one or many prompts at once from a paged KV pool.",
    )
    cli.add_model(parser.add_argument_group("model"))
    _add_prompts(parser.add_argument_group("prompts"))
    _add_sampling(parser.add_argument_group("sampling"))
    _add_branching(parser.add_argument_group("several completions"))
    _add_engine(parser.add_argument_group("engine"))
    _add_output(parser.add_argument_group("output"))
    cli.add_metrics(parser.add_argument_group("metrics"))
    return parser


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompt", "-p", action="append", default=[], help="a prompt; repeatable; '-' reads stdin"
    )
    group.add_argument(
        "--prompts-file",
        metavar="FILE.jsonl",
        help='one request a line: {"prompt": ...} or {"messages": [...]}, and optionally '
        "n, priority, id and sampling options named as in SamplingParams",
    )
    group.add_argument("--system-prompt", help="system message for the chat template")
    group.add_argument(
        "--ignore-chat-template", action="store_true", help="use prompts as they are"
    )


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-tokens",
        "-m",
        type=COUNT,
        default=MAX_TOKENS,
        help="tokens to generate at most (default: %(default)s)",
    )
    cli.add_sampling(group)
    group.add_argument(
        "--xtc-probability", type=FRACTION, default=0.0, help="how often XTC acts on a token"
    )
    group.add_argument(
        "--xtc-threshold",
        type=number(float, 0, 0.5, "a number from 0 to 0.5"),
        default=0.1,
        help="probability above which XTC drops all but the least likely token",
    )
    for name, meaning in PENALTIES.items():
        group.add_argument(
            f"--{name}-penalty", type=number(float, -1e6, 1e6, "a number"), help=meaning
        )
    cli.add_seed(group, "of all requests' random streams")
    group.add_argument(
        "--stop", action="append", default=[], help="text that ends a completion; repeatable"
    )
    group.add_argument(
        "--logprobs",
        type=COUNT_OR_NONE,
        default=0,
        metavar="N",
        help="most likely tokens written to --output with each token",
    )


def _add_branching(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--n", type=COUNT, default=1, help="completions of each prompt, which is computed once"
    )
    group.add_argument(
        "--best-of",
        type=COUNT,
        metavar="N",
        help="generate N completions and keep the --n with the highest mean log-probability",
    )
    group.add_argument(
        "--beams", type=COUNT, metavar="N", help="beam search with N hypotheses instead of sampling"
    )
    group.add_argument(
        "--length-penalty",
        type=number(float, -100, 100, "a number from -100 to 100"),
        default=1.0,
        help="of beams: above 0 favours long hypotheses (default: %(default)s)",
    )
    group.add_argument(
        "--early-stopping", action="store_true", help="end beams with the first N hypotheses"
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--kv-block-size",
        type=int,
        choices=KV_BLOCK_SIZES,
        default=16,
        help="tokens in a KV block (default: %(default)s)",
    )
    group.add_argument(
        "--max-running",
        type=COUNT,
        default=32,
        metavar="N",
        help="requests computed side by side at most (default: %(default)s)",
    )
    group.add_argument(
        "--prefill-chunk",
        type=COUNT,
        default=512,
        metavar="TOKENS",
        help="prompt tokens computed in a step at most (default: %(default)s)",
    )
    cli.add_engine(group)
    group.add_argument(
        "--lookahead",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="launch each step before the one before it has been read (default: yes)",
    )
    group.add_argument(
        "--no-prewarm",
        action="store_true",
        help="compile GPU pipelines when they are first used (a CPU has none to compile)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output", metavar="FILE.jsonl", help="write results as JSONL, input order")
    group.add_argument("--stats-json", metavar="FILE", help="write statistics as JSON")
