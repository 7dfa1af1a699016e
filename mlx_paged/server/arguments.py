"""Arguments of ``python -m mlx_paged.server``, named as in mlx_lm.server."""

import argparse
import json
import os
from typing import Any

from mlx_lm.utils import _parse_size

from mlx_paged import cli
from mlx_paged.cli import COUNT, COUNT_OR_NONE, Parser, number

API_KEY_VARIABLE = "MLX_PAGED_API_KEY"

UNSUPPORTED = {
    "--draft-model": "speculative decoding",
    "--pipeline": "more than one device",
}
"""Flags of mlx_lm.server that are mistakes here, with the feature that each of them needs."""

WITHOUT_EFFECT = {
    "--num-draft-tokens": (int, 3),
    "--prompt-concurrency": (int, 8),
}
"""Flags of mlx_lm.server that this server ignores, with their types and defaults."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The server's arguments. A mistake prints one line and exits with 2."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    for flag, meaning in UNSUPPORTED.items():
        if getattr(args, flag.removeprefix("--").replace("-", "_")):
            parser.error(f"{flag} is given: {meaning} is not supported")
    if not isinstance(args.chat_template_args, dict):
        parser.error("--chat-template-args: expected a JSON object")
    args.api_key = args.api_key or os.environ.get(API_KEY_VARIABLE)
    return args


def make_parser() -> Parser:
    parser = Parser(
        prog="mlx_paged.server",
        usage="python -m mlx_paged.server [--model MODEL] [options]",
        description="Serve a model over an OpenAI-compatible HTTP API. "
        "The flags of mlx_lm.server have the same names here.",
        formatter_class=cli.HelpFormatter,
    )
    _add_model(parser.add_argument_group("model"))
    _add_network(parser.add_argument_group("network"))
    _add_limits(parser.add_argument_group("limits"))
    _add_sampling(parser.add_argument_group("defaults for requests"))
    _add_engine(parser.add_argument_group("engine"))
    cli.add_metrics(parser.add_argument_group("metrics"))
    _add_mlx_lm(parser.add_argument_group("compatibility with mlx_lm.server"))
    return parser


def _add_model(group: argparse._ArgumentGroup) -> None:
    cli.add_model(group)
    add = group.add_argument
    template = "chat template that replaces the tokenizer's own"
    add("--chat-template", default="", metavar="TEMPLATE", help=template)
    default = "use the default chat template if the tokenizer has none"
    add("--use-default-chat-template", action="store_true", help=default)
    options = "arguments for the chat template, e.g. '{\"enable_thinking\": false}'"
    add("--chat-template-args", type=json.loads, default="{}", metavar="JSON", help=options)


def _add_network(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    port = number(int, 0, 65535, "a port")
    add("--port", type=port, default=8080, help="port to listen on; 0 takes a free port")
    key = f"bearer token that clients must send (default: ${API_KEY_VARIABLE}, or no token)"
    add("--api-key", metavar="KEY", help=key)
    origins = "comma-separated web origins that may call the server"
    add(
        "--allowed-origins",
        type=lambda text: text.split(","),
        default="*",
        metavar="ORIGINS",
        help=origins,
    )
    levels = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    add("--log-level", default="INFO", choices=levels, help="least severe messages to log")


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    queue = "maximum number of waiting completions; one more is answered with 503"
    add("--max-queue", type=COUNT_OR_NONE, default=256, metavar="N", help=queue)
    size = "maximum size of a request body; a larger one is answered with 413"
    add("--max-request-bytes", type=COUNT, default=16 << 20, metavar="N", help=size)
    context = (
        "maximum of prompt tokens plus max_tokens; more is answered with 400 (default: pool size)"
    )
    add("--max-context", type=COUNT, metavar="TOKENS", help=context)
    add("--max-samples", type=COUNT, default=16, metavar="N", help="maximum n of a request")


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    cli.add_sampling(group)
    group.add_argument(
        "--max-tokens", type=COUNT, default=512, metavar="N", help="maximum new tokens"
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    running = "maximum number of sequences in a batch"
    add("--decode-concurrency", type=COUNT, default=32, metavar="N", help=running)
    chunk = "maximum number of prompt tokens in a step"
    add("--prefill-step-size", type=COUNT, default=512, metavar="TOKENS", help=chunk)
    add("--kv-block-size", type=COUNT, default=16, metavar="N", help="tokens per KV block")
    cli.add_engine(group)


def _add_mlx_lm(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--prompt-cache-size",
        type=int,
        default=10,
        metavar="N",
        help="0 switches the prefix cache off",
    )
    cache = "same as --kv-memory, in bytes or with a unit such as 2GB"
    add("--prompt-cache-bytes", type=_size, metavar="SIZE", help=cache)
    for flag, (kind, default) in WITHOUT_EFFECT.items():
        add(flag, type=kind, default=default, metavar="N", help="accepted, but has no effect")
    add("--draft-model", metavar="MODEL", help="not supported: the server does not start")
    add("--pipeline", action="store_true", help="not supported: the server does not start")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of :class:`Engine`."""
    options = cli.engine_options(args)
    if args.kv_memory is None:
        options["kv_memory"] = args.prompt_cache_bytes
    if args.prompt_cache_size == 0:
        options["prefix_cache"] = False
    return options | {
        "block_size": args.kv_block_size,
        "max_running": args.decode_concurrency,
        "prefill_chunk": args.prefill_step_size,
    }


def _size(text: str) -> int:
    """An argument type: a number of bytes."""
    try:
        return int(_parse_size(text))
    except (KeyError, ArithmeticError):
        raise argparse.ArgumentTypeError(f"expected a size such as 2GB, got {text!r}") from None
