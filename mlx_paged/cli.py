"""The parser and the flags that the commands share. Knows no mlx, so that help is shown at once."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from mlx_paged.arguments import UntestedVersionError, did_you_mean, require_versions
from mlx_paged.model_folders import check_model
from mlx_paged.option_kinds import (
    SAME,
    Bytes,
    Choice,
    Kind,
    Milliseconds,
    Name,
    NamedPaths,
    OneOf,
    OnOff,
    OptionFlag,
    PathOrAuto,
    read_number,
)
from mlx_paged.options import DEFAULTS, MEMORY_FLAGS, OPTIONS, STEP_FLAGS

KV_BLOCK_SIZES = (8, 16, 32)
QUANTIZATION = {"--kv-group-size": 64, "--quantized-kv-start": 5000}
"""Flags of mlx-lm for its quantized caches, with the only values that are accepted."""


class HelpFormatter(argparse.HelpFormatter):
    """Shows the default of an option after its help text."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        has_none = action.default in (None, "", [], (), argparse.SUPPRESS)
        has_none |= action.default is False or action.const is False
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
            word = unknown.partition(" ")[0].partition("=")[0]
            if word.startswith("-"):
                message += did_you_mean(word, flags)
            elif self.usage:
                message += f"; {self.format_usage().strip()}"
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
            return read_number(text, parse, low, high, expected)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


COUNT = number(int, 1, 2**31, "a whole number >= 1")
COUNT_OR_NONE = number(int, 0, 2**31, "a whole number >= 0")
FRACTION = number(float, 0, 1, "a number from 0 to 1")


def argument(kind: Kind) -> Callable[[str], Any]:
    """An argument type: the value of an option that the text means."""

    def convert(text: str) -> Any:
        try:
            return kind.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


MEMORY = argument(Bytes(1))
MILLISECONDS = argument(Milliseconds())


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


class Joined(argparse.Action):
    """Joins the mappings that one flag gives at several places."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        before = getattr(namespace, self.dest) or {}
        if twice := sorted(before.keys() & values.keys()):
            parser.error(f"argument {option}: {twice[0]} is given twice: expected other names")
        setattr(namespace, self.dest, before | values)


def flag_of(name: str, kind: Kind | None = None, **changes: Any) -> Flag:
    """The flag of an engine's option. The parsed value has the option's name, or that of the flag
    if the command gives the flag other `names`.

    Args:
        kind: reads the text, instead of the option's own kind.
        changes: fields of :class:`OptionFlag` that a command has otherwise.
    """
    flag = replace(_option_flag(name), **changes)
    default = DEFAULTS[name] if flag.default is SAME else flag.default
    kinds = _argparse_of(kind or OPTIONS[name].kind, flag.names, default)
    if "names" not in changes:
        kinds = {"dest": name} | kinds
    return flag.names, kinds, default, flag.metavar, flag.help


def flag_default(name: str) -> Any:
    """The value of an option's flag in a command line without the flag."""
    default = _option_flag(name).default
    return DEFAULTS[name] if default is SAME else default


def _option_flag(name: str) -> OptionFlag:
    """The flag of an option that has one."""
    flag = OPTIONS[name].flag
    assert flag is not None, name
    return flag


def _argparse_of(kind: Kind, names: str, default: object) -> dict[str, Any]:
    """The arguments of argparse that make it read values of a kind."""
    if isinstance(kind, OnOff):
        if names.startswith("--no-"):
            return {"action": "store_false"}
        return SWITCH if default is False else ON_OFF
    if isinstance(kind, Choice):
        return {"choices": [*map(str, kind.members)]}
    if isinstance(kind, Name):
        return {"choices": [*kind.names]}
    if isinstance(kind, OneOf):
        return {"type": int, "choices": kind.numbers}
    if isinstance(kind, NamedPaths):
        return {"type": argument(kind), "action": Joined}
    return {"type": argument(kind)}


TEMPERATURE = number(float, 0, 1e6, "a number >= 0")
MEMORY_OR_NONE = number(float, 0, 1e6, "a number of GB >= 0")

MODEL: tuple[Flag, ...] = (
    ("--model", str, None, "", "directory or Hugging Face id (default: the built-in demo model)"),
    ("--adapter-path", str, None, "DIR", "directory of adapters (LoRA, DoRA) from mlx_lm.lora"),
    ("--trust-remote-code", SWITCH, False, "", "let the tokenizer run code from the model"),
)
SAMPLING: tuple[Flag, ...] = (
    ("--temp", TEMPERATURE, 0.0, "T", "sampling temperature; 0 is greedy decoding"),
    ("--top-p", FRACTION, 1.0, "P", "nucleus sampling: total probability of the tokens; 1 is off"),
    ("--top-k", COUNT_OR_NONE, 0, "K", "sample from the K most likely tokens; 0 is off"),
    ("--min-p", FRACTION, 0.0, "P", "minimum probability relative to the top token; 0 is off"),
    flag_of("seed"),
)
METRICS: tuple[Flag, ...] = (
    flag_of("metrics_jsonl"),
    flag_of("spike_ms"),
    flag_of("profile"),
)


def engine_flags(stall: Flag | None = None, policy: Flag | None = None) -> list[Flag]:
    """The flags of an engine that all commands have. `stall` is the command's own
    ``--max-stall-ms``, `policy` its own ``--policy``."""
    own = {"max_stall_ms": stall, "policy": policy}
    return [
        *map(flag_of, MEMORY_FLAGS),
        *((flag, _only(n), n, "N", f"only {n} is accepted") for flag, n in QUANTIZATION.items()),
        *(own.get(name) or flag_of(name) for name in STEP_FLAGS),
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


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError if flags of models and of the engine exclude each other, or if a model, an
    adapter or a directory that they name cannot be right."""
    for name in STEP_FLAGS:
        _check_flag(args, name)
    check_model(args.model or str(demo_model_path()), args.adapter_path)
    for name, option in OPTIONS.items():
        if option.flag is not None and option.flag.is_model and getattr(args, name) is not None:
            try:
                check_model(getattr(args, name))
            except ValueError as error:
                raise ValueError(f"{option.flag.names}: {error}") from None


def _check_flag(args: argparse.Namespace, name: str) -> None:
    """Raise ValueError if the flag of an option lacks the flag that it belongs to, stands beside
    one that it excludes, or names what cannot be right."""
    option, value = OPTIONS[name], getattr(args, name)
    flag, kind = option.flag, option.kind
    assert flag is not None, name
    if value is not None and value != flag_default(name):
        others = [_names(each) for each in flag.not_beside if getattr(args, each) is not None]
        if others:
            raise ValueError(f"{others[0]} is given beside {flag.names}: expected one of them")
        if flag.beside and all(getattr(args, each) is None for each in flag.beside):
            needed = " or ".join(map(_names, flag.beside))
            raise ValueError(f"{flag.names} is given: expected {needed} beside it")
    if isinstance(kind, PathOrAuto) and kind.is_auto(value) and args.model is None:
        raise ValueError(f"{flag.names} is auto: expected --model, whose folder has {kind.what}")
    problem = kind.problem(value)
    if problem is not None:
        raise ValueError(f"{flag.names} {value}: {problem}")


def _names(name: str) -> str:
    """The names of an option's flag."""
    flag = OPTIONS[name].flag
    assert flag is not None, name
    return flag.names
