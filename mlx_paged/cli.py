"""The parser and the flags that the commands share. Knows no mlx, so that help is shown at once."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from mlx_paged.arguments import UntestedVersionError, did_you_mean, require_versions
from mlx_paged.options import MAX_DRAFTS, Policy, PreemptionPolicy, checked_bits

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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError, with the choice that is most like `value`, if there is no such."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None

    def require_versions(self) -> None:
        """Exit with a line on stderr if the installed mlx or mlx-lm does not fit."""
        try:
            require_versions()
        except UntestedVersionError as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """Print the message, with the flag that is most like an unknown one, and exit with 2."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            message += did_you_mean(unknown.partition(" ")[0].partition("=")[0], flags)
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


def json_object(text: str) -> dict[str, Any]:
    """An argument type: a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise argparse.ArgumentTypeError(f"{place}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise argparse.ArgumentTypeError("not valid JSON: nested too deep") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r:.60}")
    return value


Flag = tuple[str, Any, Any, str, str]
"""Names, type, default, metavar, help. The type may be a list of values, or options of argparse."""

SWITCH = {"action": "store_true"}
ON_OFF = {"action": argparse.BooleanOptionalAction}
TEMPERATURE = number(float, 0, 1e6, "a number >= 0")
SEED = number(int, 0, 2**63, "a whole number >= 0")
MEMORY = number(float, 1e-9, 1e6, "a number of GB above 0")
MEMORY_OR_NONE = number(float, 0, 1e6, "a number of GB >= 0")
DRAFTS = number(int, 1, MAX_DRAFTS, f"a whole number from 1 to {MAX_DRAFTS}")
ORDERS, VICTIMS = [*map(str, Policy)], [*map(str, PreemptionPolicy)]

MODEL: tuple[Flag, ...] = (
    ("--model", str, None, "", "directory or Hugging Face id (default: the built-in demo model)"),
    ("--adapter-path", str, None, "DIR", "directory of adapters (LoRA, DoRA) from mlx_lm.lora"),
    ("--trust-remote-code", SWITCH, False, "", "let the tokenizer run code from the model"),
    ("--vision", SWITCH, False, "", "load the model with mlx-vlm, for prompts with images"),
)
SAMPLING: tuple[Flag, ...] = (
    ("--temp", TEMPERATURE, 0.0, "T", "sampling temperature; 0 is greedy decoding"),
    ("--top-p", FRACTION, 1.0, "P", "nucleus sampling: total probability of the tokens; 1 is off"),
    ("--top-k", COUNT_OR_NONE, 0, "K", "sample from the K most likely tokens; 0 is off"),
    ("--min-p", FRACTION, 0.0, "P", "minimum probability relative to the top token; 0 is off"),
    ("--seed", SEED, None, "N", "seed for requests without a seed (default: random)"),
)
SPIKE = "report longer steps as spikes (default: 3 times the usual time, at least 50 ms)"
METRICS: tuple[Flag, ...] = (
    ("--metrics-jsonl", str, None, "FILE", "write one JSON line after each step"),
    ("--spike-ms", MILLISECONDS, None, "MS", SPIKE),
    ("--profile", SWITCH, False, "", "time each phase of every step; steps get slower"),
)

POOL = "size of the KV pool in GB (default: what the device can spare)"
CACHE = "GB of freed buffers that MLX keeps (default: a tenth of GPU memory)"
BITS = "quantize stored keys and values to so many bits (default: not quantized)"
COMPILE = "decode with compiled graphs (default: on a CPU, if that is faster)"


def engine_flags(max_stall_ms: float = 0) -> list[Flag]:
    """`max_stall_ms` is a default; a command that has none does not take 0 as a value either."""
    stall = "upper limit for the time of a step while requests are decoding"
    stall += "; 0 is no limit" if max_stall_ms else " (default: no limit)"
    milliseconds = MILLISECONDS_OR_NONE if max_stall_ms else MILLISECONDS
    return [
        ("--kv-memory", MEMORY, None, "GB", POOL),
        ("--cache-limit", MEMORY, None, "GB", CACHE),
        ("--kv-bits", _kv_bits, None, "8|6|4", BITS),
        *((flag, _only(n), n, "N", f"only {n} is accepted") for flag, n in QUANTIZATION.items()),
        ("--max-stall-ms", milliseconds, max_stall_ms or None, "MS", stall),
        ("--policy", ORDERS, ORDERS[0], "", "order in which waiting requests start"),
        ("--preempt", VICTIMS, VICTIMS[0], "", "request that gives up K/V when the pool is full"),
        ("--compile", ON_OFF, None, "", COMPILE),
        ("--cpu-linear", ON_OFF, None, "", "own CPU kernels for linear layers (default: on)"),
        ("--cascade", ON_OFF, True, "", "read the K/V of a shared prefix once per step"),
        ("--no-prefix-cache", SWITCH, False, "", "do not share the K/V of equal prefixes"),
        ("--kv-disk", str, None, "DIR", "also keep K/V in this directory, for later processes"),
        ("--kv-disk-gb", MEMORY, None, "GB", "maximum size of that directory (default: 20 GB)"),
        ("--speculate", ["ngram"], None, "", "speculative decoding by n-grams; same output"),
        ("--draft-model", str, None, "PATH", "speculative decoding with this smaller model"),
        ("--num-draft-tokens", DRAFTS, NUM_DRAFTS, "N", "draft tokens of a request per step"),
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


def demo_model_path() -> Path:
    """Directory of the demo model, a small model of Python code that is part of the package.
    ``mlx_lm.load(mlx_paged.demo_model_path())`` loads it."""
    return Path(__file__).parent / "demo_model"
