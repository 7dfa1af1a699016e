"""Arguments of ``python -m mlx_paged.generate``, named as in mlx_lm.generate."""

import argparse
import json
from pathlib import Path
from typing import Any

from mlx_paged import cli
from mlx_paged.cli import COUNT, COUNT_OR_NONE, FRACTION, KV_BLOCK_SIZES, Parser, number

PENALTIES = {
    "repetition": "divide the logits of the last 20 tokens by this; 1 is off",
    "presence": "subtract this from the logits of the last 20 tokens; 0 is off",
    "frequency": "subtract this once for each occurrence in the last 20 tokens; 0 is off",
}

REFUSED = {
    "--image": "images are not supported",
    "--min-tokens-to-keep": "min-p keeps one token at least, and no other number",
    "--use-default-chat-template": "tokenizers have no default chat template",
    "--max-kv-size": "K/V is never cut to a size; --kv-memory limits the pool",
    "--prompt-cache-file": "saved caches need `python -m mlx_paged.run mlx_lm.generate`",
    "--quantize-activations -qa": "its matrix product is not tested here: MLX has none on a CPU",
}
"""Flags of mlx_lm.generate that are mistakes here, with the reasons."""

SWITCH = {"true": True, "t": True, "false": False, "f": False}


def make_parser() -> Parser:
    parser = Parser(
        prog="mlx_paged.generate",
        usage="python -m mlx_paged.generate --prompt TEXT [options]",
        description="Generate text for one prompt or for many prompts at once. "
        "The text goes to stdout, statistics go to stderr.",
        formatter_class=cli.HelpFormatter,
    )
    cli.add_model(parser.add_argument_group("model"))
    _add_prompts(parser.add_argument_group("prompts", "Give --prompt, --prompts-file or both."))
    _add_sampling(parser.add_argument_group("sampling"))
    _add_branching(parser.add_argument_group("several completions"))
    _add_engine(parser.add_argument_group("engine"))
    _add_output(parser.add_argument_group("output"))
    cli.add_metrics(parser.add_argument_group("metrics"))
    refused = parser.add_argument_group("flags of mlx_lm.generate that are refused")
    for flags, reason in REFUSED.items():
        options: dict[str, Any] = {"nargs": "*", "metavar": "X", "default": argparse.SUPPRESS}
        refused.add_argument(*flags.split(), action=cli.Refused, help=reason, **options)
    return parser


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    prompt = "prompt text; '-' reads stdin; may be repeated"
    add("--prompt", "-p", action="append", default=[], metavar="TEXT", help=prompt)
    lines = 'one JSON object per line with "prompt" or "messages", and options such as "max_tokens"'
    add("--prompts-file", metavar="FILE.jsonl", help=lines)
    add("--system-prompt", metavar="TEXT", help="system message for the chat template")
    template = "give prompts to the model without its chat template"
    add("--ignore-chat-template", action="store_true", help=template)
    config = "arguments for the chat template, e.g. '{\"enable_thinking\": false}'"
    add("--chat-template-config", type=_json_object, metavar="JSON", help=config)
    begun = "text with which the answers to chats begin; it is not printed"
    add("--prefill-response", metavar="TEXT", help=begun)


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-tokens", "-m", type=COUNT, default=100, metavar="N", help="maximum new tokens")
    cli.add_sampling(group)
    xtc = "probability that XTC sampling is applied to a token; 0 is off"
    add("--xtc-probability", type=FRACTION, default=0.0, metavar="P", help=xtc)
    threshold = number(float, 0, 0.5, "a number from 0 to 0.5")
    dropped = "XTC drops all tokens above this probability except the least likely of them"
    add("--xtc-threshold", type=threshold, default=0.1, metavar="P", help=dropped)
    penalty = number(float, -1e6, 1e6, "a number")
    for name, meaning in PENALTIES.items():
        add(f"--{name}-penalty", type=penalty, metavar="X", help=meaning)
    stop = "text that ends a completion; may be repeated"
    add("--stop", action="append", default=[], metavar="TEXT", help=stop)
    ends = "tokens that end a completion, beside the model's own"
    add("--extra-eos-token", nargs="+", default=(), metavar="TOKEN", help=ends)
    schema = "file with a JSON schema that the text follows"
    add("--json-schema", type=_json_file, metavar="FILE", help=schema)
    logprobs = "also write the N most likely tokens at each position to --output"
    add("--logprobs", type=COUNT_OR_NONE, default=0, metavar="N", help=logprobs)


def _add_branching(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--n", type=COUNT, default=1, metavar="N", help="completions per prompt")
    best = "generate this many per prompt, keep the --n with the highest mean log-probability"
    add("--best-of", type=COUNT, metavar="N", help=best)
    beams = "use beam search with N beams instead of sampling"
    add("--beams", type=COUNT, metavar="N", help=beams)
    penalty = number(float, -100, 100, "a number from -100 to 100")
    length = "for --beams: values above 0 favour long texts"
    add("--length-penalty", type=penalty, default=1.0, metavar="X", help=length)
    early = "for --beams: stop when N beams have ended"
    add("--early-stopping", action="store_true", help=early)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--kv-block-size", type=int, choices=KV_BLOCK_SIZES, default=16, help="tokens per KV block")
    running = "maximum number of sequences in a batch"
    add("--max-running", type=COUNT, default=32, metavar="N", help=running)
    chunk = "maximum number of prompt tokens in a step"
    names = ("--prefill-chunk", "--prefill-step-size")
    add(*names, type=COUNT, default=512, metavar="TOKENS", help=chunk)
    cli.add_engine(group)
    lookahead = "start each step before the result of the previous step is read"
    add("--lookahead", action=argparse.BooleanOptionalAction, default=True, help=lookahead)
    prewarm = "compile GPU pipelines and decodes at their first use instead of at the start"
    add("--no-prewarm", action="store_true", help=prewarm)


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--output", metavar="FILE.jsonl", help="write one JSON line per completion, in input order")
    add("--stats-json", metavar="FILE", help="write statistics of the run as JSON")
    quiet = "False: no progress and no statistics on stderr"
    add("--verbose", type=_switch, default=True, metavar="{True,False}", help=quiet)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def _json_file(path: str) -> dict[str, Any]:
    try:
        return _json_object(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None


def _switch(text: str) -> bool:
    if text.lower() not in SWITCH:
        raise argparse.ArgumentTypeError(f"expected True or False, got {text!r}")
    return SWITCH[text.lower()]
