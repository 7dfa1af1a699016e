"""Arguments of ``mlx_paged chat``, named as in mlx_lm.chat."""

import argparse

from mlx_paged import cli
from mlx_paged.cli import COUNT, FRACTION, SWITCH, Parser, check_flags, json_object, number

THRESHOLD = number(float, 0, 0.5, "a number from 0 to 0.5")
TEMPLATE = "arguments for the chat template, e.g. '{\"enable_thinking\": false}'"
REFUSED = {
    "--max-kv-size": "K/V is never cut to a size; --kv-memory limits the pool",
    "--pipeline": "mlx.launch divides layers among machines: docs/several-macs.md",
    "--image --vision": "a chat here has no images; mlx_paged generate --vision takes images",
    "--prompt -p": "type the message in the chat; mlx_paged generate answers a --prompt",
}
"""Flags of mlx_lm.chat and of other commands that are mistakes here, with the reasons."""

FLAGS: dict[str, tuple[cli.Flag, ...]] = {
    "model": (
        ("--model", str, None, "", "directory or Hugging Face id of a chat model; required"),
        *cli.MODEL[1:],
    ),
    "chat": (
        ("--system-prompt", str, None, "TEXT", "system message at the beginning of the chat"),
        ("--chat-template-config", json_object, None, "JSON", TEMPLATE),
        ("--hide-thoughts", SWITCH, False, "", "do not print what the model thinks"),
    ),
    "sampling": (
        ("--max-tokens -m", COUNT, 2048, "N", "maximum new tokens of an answer"),
        *cli.SAMPLING,
        ("--xtc-probability", FRACTION, 0.0, "P", "chance that XTC acts on a token; 0 is off"),
        ("--xtc-threshold", THRESHOLD, 0.1, "P", "XTC drops all but the least likely above this"),
    ),
    "engine": (
        cli.flag_of("prefill_chunk", names="--prefill-step-size"),
        *cli.engine_flags(),
    ),
    "metrics": cli.METRICS,
    "flags that are refused": tuple(
        (name, {"action": cli.Refused, "nargs": "*"}, argparse.SUPPRESS, "X", reason)
        for name, reason in REFUSED.items()
    ),
}


def make_parser() -> Parser:
    parser = Parser(
        prog="mlx_paged chat",
        usage="mlx_paged chat --model MODEL [options]",
        description="Chat with a model in this terminal. Ctrl-C stops an answer; q leaves.",
    )
    cli.add_groups(parser, FLAGS)
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise ValueError if there is no model, or if flags do not fit."""
    if not args.model:
        raise ValueError(
            "--model is not given: expected a chat model, such as mlx-community/Qwen3-0.6B-4bit"
        )
    check_flags(args)
