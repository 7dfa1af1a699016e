"""Arguments of ``python -m mlx_paged.server``, named as in mlx_lm.server."""

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlx_paged import cli
from mlx_paged.cli import COUNT, COUNT_OR_NONE, SWITCH, Parser, json_object, number
from mlx_paged.config_file import CONFIG_FILE, ConfiguredParser
from mlx_paged.formats.registry import FORMATS
from mlx_paged.formats.thoughts import NONE, STYLES
from mlx_paged.option_kinds import Kind, read_number
from mlx_paged.options import Policy
from mlx_paged.protocol.fields import MAX_SAMPLES
from mlx_paged.protocol.model_paths import DEFAULT
from mlx_paged.server import keys, tls
from mlx_paged.server.keys import API_KEY_VARIABLE
from mlx_paged.server.log_format import FORMATS as LOG_FORMATS
from mlx_paged.vision.flags import VISION

FORMAT_NAMES = [form.name for form in FORMATS]
STYLE_NAMES = [*STYLES, NONE]
LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


def _names(text: str) -> list[str]:
    return text.split(",")


def _size(text: str) -> int:
    """An argument type: a number of bytes."""
    from mlx_lm.utils import _parse_size  # slow to import, and seldom needed

    try:
        return int(_parse_size(text))
    except (KeyError, ArithmeticError):
        raise argparse.ArgumentTypeError(f"expected a size such as 2GB, got {text!r}") from None


def _template(text: str) -> str:
    """An argument type: a chat template, or a file that has one; every template has a brace."""
    try:
        return text if "{" in text or not text else Path(text).read_text()
    except (OSError, UnicodeDecodeError) as error:
        expected = f"expected a template or a file that has one, got {text!r}: {error}"
        raise argparse.ArgumentTypeError(expected) from None


def _collector(text: str) -> str:
    """An argument type: the URL of a collector of traces; without a path, OTLP's own is meant."""
    with suppress(ValueError):  # of an address or a port that is none
        found = urlsplit(text if text.isascii() and text.isprintable() else "")
        if found.scheme in ("http", "https") and found.hostname and found.port != 0:
            has_path = found.path not in ("", "/") or found.query or found.fragment
            return text if has_path else text.rstrip("/") + OTLP_PATH
    expected = f"expected a URL such as http://localhost:4318{OTLP_PATH}, got {text!r}"
    raise argparse.ArgumentTypeError(expected)


OTLP_PATH = "/v1/traces"
SECONDS = number(float, 0, 1e9, "a number of seconds >= 0")
PORT = number(int, 0, 65535, "a port from 0 to 65535")
MAX_STALL_MS = 150.0  # a stream waits no longer for its next token because of prompts


class MillisecondsOrNone(Kind):
    """A number of milliseconds; 0 means None."""

    def read(self, text: str) -> float | None:
        expected = "a number of milliseconds >= 0"
        return read_number(text, float, 0, 1e9, expected) or None


STALL = cli.flag_of(
    "max_stall_ms",
    MillisecondsOrNone(),
    default=MAX_STALL_MS,
    help="upper limit for the time of a step while requests are decoding; 0 is no limit",
)

REFUSED: tuple[cli.Flag, ...] = (
    ("--prompt-concurrency", int, 8, "X", "a limit of prompts beside --prefill-step-size"),
    ("--pipeline", SWITCH, False, "", "more than one device"),
)
"""Flags of mlx_lm.server that take their defaults only; their help is what others ask for."""

MODEL_NAMES = "more models that requests may name (default: the hub's cache on a loopback host)"

FLAGS: dict[str, tuple[cli.Flag, ...]] = {
    "file": (CONFIG_FILE,),
    "model": (
        *cli.MODEL,
        VISION,
        ("--adapters-dir", str, None, "DIR", "folder of adapters that requests may name"),
        ("--served-model-name", _names, None, "NAMES", "names of --model, comma-separated"),
        ("--max-models", COUNT_OR_NONE, 1, "N", "models in memory, with --model; 0: no others"),
        ("--models-dir", str, None, "DIR", "folder of models that requests may name"),
        ("--allow-models", _names, None, "NAMES", MODEL_NAMES),
        ("--unpin-default", SWITCH, False, "", "let other models replace --model in memory"),
        ("--swap-seconds", SECONDS, 10.0, "S", "time that a replaced model still takes requests"),
        ("--idle-seconds", SECONDS, None, "S", "unload a model after this time without requests"),
        (
            "--chat-template",
            _template,
            "",
            "TEMPLATE",
            "chat template, or a file with a chat template",
        ),
        (
            "--use-default-chat-template",
            SWITCH,
            False,
            "",
            "for tokenizers without a chat template",
        ),
        ("--chat-template-args", json_object, "{}", "JSON", "arguments for the chat template"),
        ("--tool-format", FORMAT_NAMES, None, "", "format of tool calls (default: detected)"),
        ("--reasoning-format", STYLE_NAMES, None, "", "format of thoughts (default: detected)"),
    ),
    "network": (
        ("--host", str, "127.0.0.1", "HOST", "address to listen on"),
        ("--port", PORT, 8080, "PORT", "port to listen on; 0 takes a free port"),
        ("--uds", str, None, "PATH", "listen on a Unix socket instead of --host and --port"),
        (
            "--api-key",
            {"action": "append"},
            None,
            "[NAME=]KEY",
            f"key that clients send; may be repeated (default: ${API_KEY_VARIABLE})",
        ),
        ("--api-key-file", str, None, "FILE", "file of keys: '[NAME] KEY' on each line"),
        ("--admin-key", str, None, "KEY", "key that also shows what the cache knows of all salts"),
        ("--allowed-origins", _names, None, "ORIGINS", "CORS origins, comma-separated"),
        ("--allowed-hosts", _names, None, "HOSTS", "Host headers to accept (default: loopback)"),
        ("--root-path", str, "", "PATH", "path under which a reverse proxy serves this server"),
        ("--ssl-certfile", str, None, "FILE", "TLS certificate"),
        ("--ssl-keyfile", str, None, "FILE", "private key of the TLS certificate"),
        ("--drain-seconds", SECONDS, 30.0, "S", "time for open answers to end after SIGTERM"),
        ("--log-level", LEVELS, "INFO", "", "minimum level of log messages"),
        ("--log-format", [*LOG_FORMATS], "text", "", "json: a JSON object in each line of the log"),
    ),
    "limits": (
        ("--max-connections", COUNT, 1000, "N", "open connections; more get status 503"),
        ("--max-queue", COUNT_OR_NONE, 256, "N", "waiting completions; more get status 503"),
        ("--max-request-bytes", COUNT, 16 << 20, "N", "bytes of a request body; more get 413"),
        ("--max-held-bytes", COUNT, 256 << 20, "N", "bytes of all bodies and unread answers"),
        ("--max-context", COUNT, None, "TOKENS", "prompt and completion (default: the model's)"),
        ("--max-prompts", COUNT, 4096, "N", "prompts times n of a request; more get 400"),
        ("--max-samples", COUNT, MAX_SAMPLES, "N", "maximum n of a request"),
        ("--strict-fields", SWITCH, False, "", "refuse requests with unknown fields"),
    ),
    "defaults for requests": (
        *cli.SAMPLING,
        ("--max-tokens", COUNT, 512, "N", "maximum new tokens"),
    ),
    "engine": (
        *cli.engine_flags(STALL, cli.flag_of("policy", default=Policy.FAIR)),
        cli.flag_of("max_running", names="--decode-concurrency"),
        cli.flag_of("prefill_chunk", names="--prefill-step-size", metavar="TOKENS"),
        cli.flag_of("block_size"),
    ),
    "metrics": (
        *cli.METRICS,
        ("--otlp-traces-endpoint", _collector, None, "URL", "send traces to a collector by OTLP"),
    ),
    "compatibility with mlx_lm.server": (
        ("--prompt-cache-size", int, 10, "N", "0 turns the prefix cache off"),
        ("--prompt-cache-bytes", _size, None, "SIZE", "same as --kv-memory; may be e.g. 2GB"),
        *((*row, f"not supported: {text}") for *row, text in REFUSED),
    ),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The server's arguments. A mistake prints one line and exits with 2."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    for flag, _, default, _, meaning in REFUSED:
        if getattr(args, flag.removeprefix("--").replace("-", "_")) != default:
            parser.error(f"{flag} is given: {meaning} is not supported")
    if args.prompt_cache_size not in (0, 10):
        parser.error("--prompt-cache-size: expected 0 or 10, for --kv-memory limits the cache")
    if args.models_dir is not None and not Path(args.models_dir).is_dir():
        parser.error(f"--models-dir is {args.models_dir}: expected a directory")
    if args.adapters_dir is not None and not Path(args.adapters_dir).is_dir():
        parser.error(f"--adapters-dir is {args.adapters_dir}: expected a directory")
    for name in args.adapters or ():
        if name in (DEFAULT, *(args.served_model_name or [args.model])):
            parser.error(f"--adapter has the name {name!r}: expected a name that no model has")
    try:
        tls.check(args)
        args.api_keys = keys.of_arguments(args)
        args.all_keys = keys.with_admin(args, args.api_keys)
    except ValueError as error:
        parser.error(str(error))
    return args


def make_parser() -> Parser:
    parser = ConfiguredParser(
        prog="mlx_paged.server",
        usage="python -m mlx_paged.server [--model MODEL] [options]",
        description="Serve a model over an OpenAI-compatible HTTP API. "
        "The flags of mlx_lm.server have the same names here.",
    )
    cli.add_groups(parser, FLAGS)
    return parser


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    from mlx_paged import loading  # it loads mlx, which help does not need

    options = loading.engine_options(args)
    if args.kv_memory is None:
        options["kv_memory"] = args.prompt_cache_bytes
    if args.prompt_cache_size == 0:
        options["prefix_cache"] = False
    options["max_running"] = args.decode_concurrency
    options["prefill_chunk"] = args.prefill_step_size
    return options
