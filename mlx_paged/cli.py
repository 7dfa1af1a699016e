"""What the commands share: the parser, groups of arguments, and how a model is loaded."""

import argparse
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import mlx.nn as nn
from mlx_lm import load
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.ops.formats import KVBits, checked_bits
from mlx_paged.scheduler.ngram import MAX_DRAFTS
from mlx_paged.scheduler.policies import Policy, PreemptionPolicy

NUM_DRAFTS = 3
GB = 10**9
KV_BLOCK_SIZES = (8, 16, 32)
QUANTIZATION = {"--kv-group-size": 64, "--quantized-kv-start": 5000}
"""Flags of mlx-lm for its quantized caches, with the only values that are accepted."""


class HelpFormatter(argparse.HelpFormatter):
    """Shows the default of an option after its help text."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        has_none = action.default in (None, "", [], argparse.SUPPRESS) or action.default is False
        return text if has_none or "(default" in text else f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line and exits with 2."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2)


class Refused(argparse.Action):
    """A flag of mlx-lm's command that this one refuses; its help says why."""

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        raise argparse.ArgumentError(self, f"refused: {self.help}")


def number(
    parse: Callable[[str], float], low: float, high: float, expected: str
) -> Callable[[str], float]:
    """An argument type: a number in [low, high]."""

    def convert(text: str) -> float:
        try:
            value = parse(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return convert


COUNT = number(int, 1, 2**31, "a whole number >= 1")
COUNT_OR_NONE = number(int, 0, 2**31, "a whole number >= 0")
FRACTION = number(float, 0, 1, "a number from 0 to 1")
MILLISECONDS = number(float, 1e-3, 1e9, "a number of milliseconds above 0")
MILLISECONDS_OR_NONE = number(float, 0, 1e9, "a number of milliseconds >= 0")


def _kv_bits(text: str) -> KVBits:
    try:
        return checked_bits("generate", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).partition("] ")[2]) from None


def _only(value: int) -> Callable[[str], int]:
    """An argument type: one number, which another engine could change."""

    def convert(text: str) -> int:
        if text != str(value):
            reason = "--kv-bits has groups of its own, and all K/V is quantized"
            raise argparse.ArgumentTypeError(f"expected {value}, got {text!r}: {reason}")
        return value

    return convert


def add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", help="model directory or Hugging Face id (default: the built-in demo model)")
    add("--adapter-path", metavar="DIR", help="directory with trained adapter weights")
    remote = "let the tokenizer run code that comes with the model"
    add("--trust-remote-code", action="store_true", help=remote)


def add_sampling(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    greedy = "sampling temperature; 0 is greedy decoding"
    temperature = number(float, 0, 1e6, "a number >= 0")
    add("--temp", type=temperature, default=0.0, metavar="T", help=greedy)
    top_p = "sample from the most likely tokens whose probabilities add up to this; 1 is off"
    add("--top-p", type=FRACTION, default=1.0, metavar="P", help=top_p)
    top_k = "sample from the K most likely tokens; 0 is off"
    add("--top-k", type=COUNT_OR_NONE, default=0, metavar="K", help=top_k)
    min_p = "drop tokens below this fraction of the highest probability; 0 is off"
    add("--min-p", type=FRACTION, default=0.0, metavar="P", help=min_p)
    seed = "seed for requests that have none of their own (default: random)"
    whole = number(int, 0, 2**63, "a whole number >= 0")
    add("--seed", type=whole, metavar="N", help=seed)


def add_engine(group: argparse._ArgumentGroup, max_stall_ms: float = 0) -> None:
    """`max_stall_ms` is a default; a command that has none does not take 0 as a value either."""
    add = group.add_argument
    memory = number(float, 1e-9, 1e6, "a number of GB above 0")
    pool = "memory for the KV pool (default: what the device can spare)"
    add("--kv-memory", type=memory, metavar="GB", help=pool)
    bits = "store K/V with 8 bits an element, or values with 4 (default: as the model computes it)"
    add("--kv-bits", type=_kv_bits, metavar="8|8,4", help=bits)
    for flag, value in QUANTIZATION.items():
        add(flag, type=_only(value), default=value, metavar="N", help=f"only {value}")
    stall = "limit for the time of a step while requests are decoding"
    stall += "; 0 is no limit" if max_stall_ms else " (default: no limit)"
    kind, default = (MILLISECONDS_OR_NONE if max_stall_ms else MILLISECONDS), max_stall_ms or None
    add("--max-stall-ms", type=kind, default=default, metavar="MS", help=stall)
    waiting = "order in which waiting requests start"
    add("--policy", choices=[*map(str, Policy)], default=str(Policy.FCFS), help=waiting)
    add(
        "--preempt",
        choices=[*map(str, PreemptionPolicy)],
        default=str(PreemptionPolicy.NEWEST),
        help="request that loses its KV blocks when the pool is full",
    )
    graphs = "decode by compiled graphs (default: on a CPU, if these take less time)"
    add("--compile", action=argparse.BooleanOptionalAction, help=graphs)
    prefixes = "do not share K/V between prompts with a common prefix"
    add("--no-prefix-cache", action="store_true", help=prefixes)
    disk = "keep K/V in this directory too, beyond the pool and the process (default: no disk)"
    add("--kv-disk", metavar="DIR", help=disk)
    add("--kv-disk-gb", type=memory, metavar="N", help="GB in it at most (default: 20)")
    _add_speculation(group)


def _add_speculation(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    ngram = "guess tokens that followed the same tokens earlier; the output stays the same"
    add("--speculate", choices=["ngram"], help=ngram)
    small = (
        "a smaller model with the same vocabulary that guesses tokens; the output stays the same"
    )
    add("--draft-model", metavar="PATH", help=small)
    most = number(int, 1, MAX_DRAFTS, f"a whole number from 1 to {MAX_DRAFTS}")
    guesses = "guesses of the draft model for each request in a step at most (default: %(default)s)"
    add("--num-draft-tokens", type=most, default=NUM_DRAFTS, metavar="N", help=guesses)


def add_metrics(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--metrics-jsonl", metavar="FILE", help="write one JSON line after each step")
    spike = "count longer steps as spikes (default: 3 times the usual step, at least 50)"
    add("--spike-ms", type=MILLISECONDS, metavar="MS", help=spike)
    profile = "time each phase of every step; this makes steps slower"
    add("--profile", action="store_true", help=profile)


def _draft_model(path: str) -> nn.Module:
    try:
        return load_model(path)[0]
    except ValueError as error:
        raise ValueError(f"--draft-model: {error}") from error


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Options of :class:`Engine` whose flags are the same in both commands."""
    if args.speculate is not None and args.draft_model is not None:
        raise ValueError("--speculate is given beside --draft-model: expected one of them")
    if args.num_draft_tokens != NUM_DRAFTS and args.draft_model is None:
        raise ValueError("--num-draft-tokens is given: expected --draft-model beside it")
    if args.kv_disk_gb is not None and args.kv_disk is None:
        raise ValueError("--kv-disk-gb is given: expected --kv-disk beside it")
    names = "compile", "kv_bits", "policy", "num_draft_tokens", "preempt", "seed", "speculate"
    others = "metrics_jsonl", "spike_ms", "profile", "kv_disk"
    model_files = [args.model or demo_model_path(), args.adapter_path]
    return {
        "model_files": [path for path in model_files if path is not None],
        "kv_memory": None if args.kv_memory is None else int(args.kv_memory * GB),
        "prefix_cache": not args.no_prefix_cache,
        "max_stall_ms": args.max_stall_ms or None,
        "draft_model": None if args.draft_model is None else _draft_model(args.draft_model),
        "kv_disk_gb": args.kv_disk_gb or 20.0,
        **{name: getattr(args, name) for name in (*names, *others)},
    }


def demo_model_path() -> Path:
    """Directory of the demo model: a small model of Python code, part of the package."""
    return Path(str(files("mlx_paged") / "demo_model"))


def load_model(
    name: str | None = None, adapter_path: str | None = None, trust_remote_code: bool = False
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model and its tokenizer as ``mlx_lm.load`` does; None loads the demo model.

    Raises:
        ValueError: the model or the adapter does not exist or cannot be loaded.
    """
    path = str(demo_model_path()) if name is None else name
    if adapter_path is not None and not Path(adapter_path).is_dir():
        raise ValueError(f"adapter {adapter_path}: no such directory")
    if not Path(path).exists() and not _may_be_hub_id(path):
        raise ValueError(f"model {path}: no such directory")
    try:
        model, tokenizer, *_ = load(
            path,
            adapter_path=adapter_path,
            tokenizer_config={"trust_remote_code": trust_remote_code},
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:
        kind = "cannot be loaded" if Path(path).exists() else "not here and not from the hub"
        detail = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"model {path}: {kind} ({type(error).__name__}: {detail})") from error
    return model, tokenizer


def _may_be_hub_id(name: str) -> bool:
    owner, _, repo = name.partition("/")
    return bool(owner and repo) and "/" not in repo and not name.startswith((".", "~"))
