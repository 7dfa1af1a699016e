"""Arguments of ``python -m mlx_paged.generate``, named as in mlx_lm.generate."""

import argparse
from pathlib import Path
from typing import Any

from mlx_paged import cli
from mlx_paged.cli import (
    COUNT,
    COUNT_OR_NONE,
    FRACTION,
    KV_BLOCK_SIZES,
    ON_OFF,
    SWITCH,
    Parser,
    json_object,
    number,
)
from mlx_paged.config_file import CONFIG_FILE, ConfiguredParser
from mlx_paged.option_kinds import OneOf
from mlx_paged.vision.flags import VISION

DIVISOR = number(float, 0, 1e6, "a number >= 0")
PENALTY = number(float, -1e6, 1e6, "a number")
PENALTIES = {
    "repetition": (DIVISOR, "divide the logits of the last 20 tokens by this; 1 is off"),
    "presence": (PENALTY, "subtract this from the logits of the last 20 tokens; 0 is off"),
    "frequency": (PENALTY, "subtract this for each occurrence in the last 20 tokens; 0 is off"),
}

REFUSED = {
    "--min-tokens-to-keep": "min-p keeps at least 1 token; no other number is supported",
    "--use-default-chat-template": "tokenizers have no default chat template",
    "--max-kv-size": "there are no rotating caches; --kv-memory limits the pool",
    "--prompt-cache-file": "saved caches need `python -m mlx_paged.run mlx_lm.generate`",
    "--quantize-activations -qa": "not tested: MLX has no such matrix product on a CPU",
}
"""Flags of mlx_lm.generate that are mistakes here, with the reasons."""

FIELDS_OF_BODIES = (
    *("prompt", "image", "system_prompt", "ignore_chat_template", "prefill_response"),
    *("xtc_probability", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop"),
    *("json_schema", "logprobs", "no_logprobs"),
    *("n", "best_of", "beams", "length_penalty", "early_stopping"),
)
"""Arguments that say nothing about OpenAI's batch lines: the bodies do."""

VERBOSE = {"true": True, "t": True, "false": False, "f": False}


def make_parser() -> Parser:
    parser = ConfiguredParser(
        prog="mlx_paged.generate",
        usage="python -m mlx_paged.generate --prompt TEXT [options]",
        description="Generate text for one prompt or for many prompts at once. "
        "The text goes to stdout, statistics go to stderr.",
    )
    cli.add_groups(parser, FLAGS)
    return parser


def check_batch_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for a flag that has no effect on OpenAI's batch lines."""
    parser = make_parser()
    for name in FIELDS_OF_BODIES:
        if getattr(args, name) != parser.get_default(name):
            raise ValueError(
                f"--{name.replace('_', '-')} is given beside OpenAI's batch lines in"
                f" {args.prompts_file}: expected fields of each body"
            )


def _json_file(path: str) -> dict[str, Any]:
    try:
        return json_object(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        if path.lstrip().startswith("{"):
            expected = f"expected the name of a file that has the schema, got {path:.60}"
            raise argparse.ArgumentTypeError(expected) from None
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{path}: not UTF-8: {error.reason}") from None
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None


def _stop(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected a non-empty string")
    return text


def _switch(text: str) -> bool:
    if text.lower() not in VERBOSE:
        raise argparse.ArgumentTypeError(f"expected True or False, got {text!r}")
    return VERBOSE[text.lower()]


TEXTS = {"action": "append"}
STOPS = {"action": "append", "type": _stop}
TOKENS = {"nargs": "+"}
FILES = {"nargs": "+", "action": "extend"}
THRESHOLD = number(float, 0, 0.5, "a number from 0 to 0.5")
LENGTH_PENALTY = number(float, -100, 100, "a number from -100 to 100")
CONFIG = "arguments for the chat template, e.g. '{\"enable_thinking\": false}'"
PROMPTS_FILE = 'JSON lines with "prompt" or "messages", or OpenAI\'s batch lines; \'-\' reads stdin'
KEEP_SPACE = "keep the first space of a text (default: unless a chat template made the prompt)"
REFUSAL = {"action": cli.Refused, "nargs": "*"}

FLAGS: dict[str, tuple[cli.Flag, ...]] = {
    "file": (CONFIG_FILE,),
    "model": (*cli.MODEL, VISION),
    "prompts: --prompt, --prompts-file or both": (
        ("--prompt -p", TEXTS, [], "TEXT", "prompt text; '-' reads stdin; may be repeated"),
        ("--prompts-file", str, None, "FILE.jsonl", PROMPTS_FILE),
        ("--image", FILES, [], "FILE", "images for each --prompt, with --vision; may be repeated"),
        ("--system-prompt", str, None, "TEXT", "system message for the chat template"),
        ("--ignore-chat-template", SWITCH, False, "", "do not apply the model's chat template"),
        ("--chat-template-config", json_object, None, "JSON", CONFIG),
        ("--use-adapter", str, None, "NAME", "the --adapter of prompts that name none"),
        ("--prefill-response", str, None, "TEXT", "start each chat answer with this text"),
    ),
    "sampling": (
        ("--max-tokens -m", COUNT, 100, "N", "maximum new tokens"),
        *cli.SAMPLING,
        ("--xtc-probability", FRACTION, 0.0, "P", "chance that XTC acts on a token; 0 is off"),
        ("--xtc-threshold", THRESHOLD, 0.1, "P", "probability above which XTC drops tokens"),
        *((f"--{name}-penalty", t, None, "X", text) for name, (t, text) in PENALTIES.items()),
        ("--stop", STOPS, [], "TEXT", "text that ends a completion; may be repeated"),
        ("--extra-eos-token", TOKENS, (), "TOKEN", "more tokens that end a completion"),
        ("--keep-space", ON_OFF, None, "", KEEP_SPACE),
        ("--json-schema", _json_file, None, "FILE", "JSON schema that the text must match"),
        ("--logprobs", COUNT_OR_NONE, 0, "N", "also write the N likeliest tokens to --output"),
    ),
    "several completions": (
        ("--n", COUNT, 1, "N", "completions per prompt"),
        ("--best-of", COUNT, None, "N", "generate N; keep the --n with the highest mean logprob"),
        ("--beams", COUNT, None, "N", "use beam search with N beams instead of sampling"),
        ("--length-penalty", LENGTH_PENALTY, 1.0, "X", "for --beams: above 0 favours long texts"),
        ("--early-stopping", SWITCH, False, "", "for --beams: stop when N beams have ended"),
    ),
    "engine": (
        cli.flag_of("block_size", OneOf(KV_BLOCK_SIZES), metavar=""),
        cli.flag_of("max_running"),
        cli.flag_of("prefill_chunk"),
        *cli.engine_flags(),
        cli.flag_of("lookahead"),
        cli.flag_of("prewarm"),
    ),
    "output": (
        ("--output", str, None, "FILE.jsonl", "write completions as JSON lines when they finish"),
        ("--resume", SWITCH, False, "", "skip prompts whose answers are in the --output file"),
        ("--overwrite", SWITCH, False, "", "replace an --output file that is not empty"),
        ("--no-logprobs", SWITCH, False, "", "leave the log-probabilities out of --output"),
        ("--stats-json", str, None, "FILE", "write statistics of the run as JSON"),
        ("--verbose", _switch, True, "{True,False}", "False: no progress and statistics on stderr"),
    ),
    "metrics": cli.METRICS,
    "flags of mlx_lm.generate that are refused": tuple(
        (names, REFUSAL, argparse.SUPPRESS, "X", reason) for names, reason in REFUSED.items()
    ),
}
