"""What the commands share: the parser, groups of arguments, and how a model is loaded."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import mlx.nn as nn
from mlx_lm import load
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.ops.formats import checked_bits
from mlx_paged.runner.ranks import rank
from mlx_paged.scheduler.ngram import MAX_DRAFTS
from mlx_paged.scheduler.policies import Policy, PreemptionPolicy
from mlx_paged.vision.host import load_seeing

NUM_DRAFTS = 3
GB = 10**9
KV_BLOCK_SIZES = (8, 16, 32)
QUANTIZATION = {"--kv-group-size": 64, "--quantized-kv-start": 5000}
"""Flags of mlx-lm for its quantized caches, with the only values that are accepted."""


class HelpFormatter(argparse.HelpFormatter):
    """Shows the default of an option after its help text."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        has_none = (
            action.default in (None, "", [], (), argparse.SUPPRESS) or action.default is False
        )
        return text if has_none or "(default" in text else f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """Shows defaults; reports a mistake in one line and exits with 2."""

    def __init__(self, prog: str, usage: str | None = None, **options: Any) -> None:
        super().__init__(prog, usage, formatter_class=HelpFormatter, **options)

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


def _kv_bits(text: str) -> int | None:
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


Flag = tuple[str, Any, Any, str, str]
"""Names, type, default, metavar, help. The type may be a list of values, or options of argparse."""

SWITCH = {"action": "store_true"}
ON_OFF = {"action": argparse.BooleanOptionalAction}
TEMPERATURE = number(float, 0, 1e6, "a number >= 0")
SEED = number(int, 0, 2**63, "a whole number >= 0")
MEMORY = number(float, 1e-9, 1e6, "a number of GB above 0")
DRAFTS = number(int, 1, MAX_DRAFTS, f"a whole number from 1 to {MAX_DRAFTS}")
ORDERS, VICTIMS = [*map(str, Policy)], [*map(str, PreemptionPolicy)]

MODEL: tuple[Flag, ...] = (
    ("--model", str, None, "", "directory or Hugging Face id (default: the built-in demo model)"),
    ("--adapter-path", str, None, "DIR", "directory with trained adapter weights"),
    ("--trust-remote-code", SWITCH, False, "", "let the tokenizer run code of the model"),
    ("--vision", SWITCH, False, "", "load it by mlx-vlm: its prompts may have images"),
)
SAMPLING: tuple[Flag, ...] = (
    ("--temp", TEMPERATURE, 0.0, "T", "sampling temperature; 0 is greedy decoding"),
    ("--top-p", FRACTION, 1.0, "P", "sample from the likeliest tokens of this mass; 1 is off"),
    ("--top-k", COUNT_OR_NONE, 0, "K", "sample from the K most likely tokens; 0 is off"),
    ("--min-p", FRACTION, 0.0, "P", "drop tokens below this part of the top probability; 0 is off"),
    ("--seed", SEED, None, "N", "seed for requests that have none of their own (default: random)"),
)
METRICS: tuple[Flag, ...] = (
    ("--metrics-jsonl", str, None, "FILE", "write one JSON line after each step"),
    ("--spike-ms", MILLISECONDS, None, "MS", "longer steps are spikes (default: 3 x usual, >= 50)"),
    ("--profile", SWITCH, False, "", "time each phase of every step; this makes steps slower"),
)


def engine_flags(max_stall_ms: float = 0) -> list[Flag]:
    """`max_stall_ms` is a default; a command that has none does not take 0 as a value either."""
    stall = "limit for the time of a step while requests are decoding"
    stall += "; 0 is no limit" if max_stall_ms else " (default: no limit)"
    milliseconds = MILLISECONDS_OR_NONE if max_stall_ms else MILLISECONDS
    return [
        ("--kv-memory", MEMORY, None, "GB", "of the KV pool (default: what the device can spare)"),
        ("--cache-limit", MEMORY, None, "GB", "of freed buffers that MLX keeps (default: a tenth)"),
        ("--kv-bits", _kv_bits, None, "8|6|4", "bits of stored keys and values (default: all)"),
        *((flag, _only(n), n, "N", f"only {n}") for flag, n in QUANTIZATION.items()),
        ("--max-stall-ms", milliseconds, max_stall_ms or None, "MS", stall),
        ("--policy", ORDERS, ORDERS[0], "", "order in which waiting requests start"),
        ("--preempt", VICTIMS, VICTIMS[0], "", "who loses its KV blocks when the pool is full"),
        ("--compile", ON_OFF, None, "", "decode by graphs (default: on a CPU, if it is faster)"),
        ("--cpu-linear", ON_OFF, None, "", "on a CPU: own kernels for linear layers (default: on)"),
        ("--cascade", ON_OFF, True, "", "read K/V once that running requests share"),
        ("--no-prefix-cache", SWITCH, False, "", "do not share K/V of prompts that begin alike"),
        ("--kv-disk", str, None, "DIR", "keep K/V in this directory too, beyond the process"),
        ("--kv-disk-gb", MEMORY, None, "N", "GB in it at most (default: 20)"),
        ("--speculate", ["ngram"], None, "", "guess tokens by n-grams; the output stays the same"),
        ("--draft-model", str, None, "PATH", "smaller model of the same vocabulary that guesses"),
        ("--num-draft-tokens", DRAFTS, NUM_DRAFTS, "N", "its guesses for a request in a step"),
    ]


def add_groups(parser: Parser, groups: Mapping[str, Iterable[Flag]]) -> None:
    """Add the flags of each group, by its title."""
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for names, kind, default, metavar, text in flags:
            options: dict[str, Any] = {"metavar": metavar} if metavar else {}
            kinds = {"choices" if isinstance(kind, list) else "type": kind}
            options |= kind if isinstance(kind, dict) else kinds
            group.add_argument(*names.split(), default=default, help=text, **options)


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
    others = "cascade", "cpu_linear", "metrics_jsonl", "spike_ms", "profile", "kv_disk"
    model_files = [args.model or demo_model_path(), args.adapter_path]
    return {
        "model_files": [path for path in model_files if path is not None],
        "kv_memory": None if args.kv_memory is None else int(args.kv_memory * GB),
        "cache_limit": None if args.cache_limit is None else int(args.cache_limit * GB),
        "prefix_cache": not args.no_prefix_cache,
        "max_stall_ms": args.max_stall_ms or None,
        "draft_model": None if args.draft_model is None else _draft_model(args.draft_model),
        "kv_disk_gb": args.kv_disk_gb or 20.0,
        **{name: getattr(args, name) for name in (*names, *others)},
    }


def demo_model_path() -> Path:
    """Directory of the demo model, a small model of Python code that is part of the package.
    ``mlx_lm.load(mlx_paged.demo_model_path())`` loads it."""
    return Path(str(files("mlx_paged") / "demo_model"))


def load_model(
    name: str | None = None,
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
    sees: bool = False,
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model and its tokenizer as ``mlx_lm.load`` does; None loads the demo model. If it
    `sees`, mlx-vlm loads it. Raises ValueError if the model or the adapter does not exist or cannot
    be loaded."""
    path = str(demo_model_path()) if name is None else name
    return load_with_config(path, adapter_path, trust_remote_code, sees)[:2]


def load_with_config(
    path: str,
    adapter_path: str | None,
    trust_remote_code: bool,
    sees: bool = False,
    **tokenizer_config: str,
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """A model, its tokenizer and its configuration. Under mlx.launch the weights are read when they
    are used. Raises ValueError as :func:`load_model`."""
    if adapter_path is not None and not Path(adapter_path).is_dir():
        raise ValueError(f"adapter {adapter_path}: no such directory")
    if not Path(path).exists() and not _may_be_hub_id(path):
        raise ValueError(f"model {path}: no such directory")
    if sees and adapter_path is not None:
        raise ValueError("--adapter-path is given beside --vision: expected one of them")
    if sees and trust_remote_code:
        raise ValueError("--trust-remote-code is given beside --vision: expected one of them")
    try:
        if sees:
            return load_seeing(path, **tokenizer_config)
        loaded: tuple[nn.Module, TokenizerWrapper, dict[str, Any]] = load(
            path,
            adapter_path=adapter_path,
            tokenizer_config={"trust_remote_code": trust_remote_code} | tokenizer_config,
            return_config=True,
            trust_remote_code=trust_remote_code,
            lazy=rank() is not None,
        )
    except Exception as error:
        kind = "cannot be loaded" if Path(path).exists() else "not here and not from the hub"
        detail = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(f"model {path}: {kind} ({type(error).__name__}: {detail})") from error
    return loaded


def _may_be_hub_id(name: str) -> bool:
    owner, _, repo = name.partition("/")
    return bool(owner and repo) and "/" not in repo and not name.startswith((".", "~"))
