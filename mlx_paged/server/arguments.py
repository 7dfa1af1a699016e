"""Arguments of ``python -m mlx_paged.server``, named as in mlx_lm.server."""

import argparse
import json
import os
from typing import Any

from mlx_lm.utils import _parse_size

from mlx_paged import cli
from mlx_paged.cli import COUNT, COUNT_OR_NONE, GB, Parser, number

API_KEY_VARIABLE = "MLX_PAGED_API_KEY"

UNSUPPORTED = {
    "--draft-model": "speculative decoding",
    "--kv-bits": "a quantized K/V pool",
    "--pipeline": "more than one device",
}
"""Flags of mlx_lm.server that ask for something else than what is served here."""

WITHOUT_EFFECT = {
    "--num-draft-tokens": (int, 3),
    "--prompt-concurrency": (int, 8),
    "--kv-group-size": (int, 64),
    "--quantized-kv-start": (int, 5000),
}
"""Flags of mlx_lm.server that tune what is not needed here, with their types and defaults."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The server's arguments; a mistake is reported in one line and ends the process with 2."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    for flag, meaning in UNSUPPORTED.items():
        if getattr(args, _attribute(flag)):
            parser.error(f"{flag} is given: {meaning} is not supported")
    if not isinstance(args.chat_template_args, dict):
        parser.error("--chat-template-args: expected a JSON object")
    args.api_key = args.api_key or os.environ.get(API_KEY_VARIABLE)
    return args


def make_parser() -> Parser:
    parser = Parser(
        prog="mlx_paged.server",
        description="OpenAI-compatible HTTP server on a paged KV pool; flags as in mlx_lm.server.",
    )
    _add_model(parser.add_argument_group("model"))
    _add_network(parser.add_argument_group("network"))
    _add_limits(parser.add_argument_group("limits"))
    _add_sampling(parser.add_argument_group("defaults of requests"))
    _add_engine(parser.add_argument_group("engine"))
    cli.add_metrics(parser.add_argument_group("metrics"))
    _add_mlx_lm(parser.add_argument_group("of mlx_lm.server"))
    return parser


def _add_model(group: argparse._ArgumentGroup) -> None:
    cli.add_model(group)
    group.add_argument("--chat-template", default="", help="template instead of the tokenizer's")
    group.add_argument(
        "--use-default-chat-template",
        action="store_true",
        help="use the default template where the tokenizer has none",
    )
    group.add_argument(
        "--chat-template-args",
        type=json.loads,
        default="{}",
        metavar="JSON",
        help="arguments of the chat template, e.g. '{\"enable_thinking\": false}'",
    )


def _add_network(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    group.add_argument(
        "--port",
        type=number(int, 0, 65535, "a port"),
        default=8080,
        help="port; 0 takes a free one (default: %(default)s)",
    )
    group.add_argument(
        "--api-key",
        help=f"what clients must send as bearer token (default: ${API_KEY_VARIABLE}, else none)",
    )
    group.add_argument(
        "--allowed-origins",
        type=lambda text: text.split(","),
        default="*",
        help="origins of web pages that may read answers, comma-separated (default: *)",
    )
    group.add_argument(
        "--log-level",
        default="INFO",
        choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
        help="(default: %(default)s)",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-queue",
        type=COUNT_OR_NONE,
        default=256,
        metavar="N",
        help="completions that may wait for a place beside those computed; one more request is "
        "answered with 503 (default: %(default)s)",
    )
    group.add_argument(
        "--max-request-bytes",
        type=COUNT,
        default=16 << 20,
        metavar="N",
        help="larger request bodies are answered with 413 (default: %(default)s)",
    )
    group.add_argument(
        "--max-context",
        type=COUNT,
        metavar="TOKENS",
        help="prompt and max_tokens of a request together; more is answered with 400, as is what "
        "the KV pool could never hold (default: only the pool)",
    )
    group.add_argument(
        "--max-samples", type=COUNT, default=16, help="n of a request (default: %(default)s)"
    )


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    cli.add_sampling(group)
    group.add_argument("--max-tokens", type=COUNT, default=512, help="(default: %(default)s)")
    cli.add_seed(group, "of the random streams of requests without one")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--decode-concurrency",
        type=COUNT,
        default=32,
        metavar="N",
        help="completions computed side by side at most (default: %(default)s)",
    )
    group.add_argument(
        "--prefill-step-size",
        type=COUNT,
        default=512,
        metavar="TOKENS",
        help="prompt tokens computed in a step at most (default: %(default)s)",
    )
    group.add_argument("--kv-block-size", type=COUNT, default=16, help="tokens in a KV block")
    cli.add_engine(group)


def _add_mlx_lm(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompt-cache-size", type=int, default=10, help="0 switches the prefix cache off"
    )
    group.add_argument(
        "--prompt-cache-bytes",
        type=_size,
        metavar="SIZE",
        help="the same as --kv-memory, in bytes or with a unit as in 2GB",
    )
    for flag, (kind, default) in WITHOUT_EFFECT.items():
        group.add_argument(flag, type=kind, default=default, help="accepted, has no effect")
    group.add_argument("--draft-model", help="refused")
    group.add_argument("--kv-bits", type=int, help="refused")
    group.add_argument("--pipeline", action="store_true", help="refused")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of :class:`Engine`."""
    kv_memory = int((args.kv_memory or 0) * GB)
    return {
        "block_size": args.kv_block_size,
        "kv_memory": args.prompt_cache_bytes if args.kv_memory is None else kv_memory,
        "max_running": args.decode_concurrency,
        "prefill_chunk": args.prefill_step_size,
        "max_stall_ms": args.max_stall_ms,
        "policy": args.policy,
        "preempt": args.preempt,
        "seed": args.seed,
        "prefix_cache": not args.no_prefix_cache and args.prompt_cache_size != 0,
        **cli.metrics_options(args),
    }


def _size(text: str) -> int:
    """An argument type: a number of bytes."""
    try:
        return int(_parse_size(text))
    except (KeyError, ArithmeticError):
        raise argparse.ArgumentTypeError(f"expected a size such as 2GB, got {text!r}") from None


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
