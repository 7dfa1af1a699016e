"""``--config FILE``: flags of a command in a TOML or JSON file. Knows no mlx."""

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mlx_paged.arguments import did_you_mean, one_line, shown
from mlx_paged.cli import Flag, Joined, Parser, json_object

MOST_BYTES = 1 << 20
"""Bytes of a file. A longer one is no list of flags."""

CONFIG_FILE: Flag = (
    "--config",
    str,
    None,
    "FILE",
    "TOML or JSON file of flags; the command line wins",
)

Settings = Mapping[str, Any]


class ConfiguredParser(Parser):
    """A parser with the flag ``--config``, whose file has flags by their names without dashes. A
    flag of the command line replaces the one of the file."""

    def __init__(self, **options: Any) -> None:
        self._given = set[str]()  # destinations of the flags that are parsed
        self._source = ""  # what messages name first
        super().__init__(**options)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """The arguments of the command line and of the file. A mistake exits with 2; the message
        names the file if the mistake is there."""
        words = sys.argv[1:] if args is None else [*args]
        self._given = set()
        found: argparse.Namespace = super().parse_args(words, namespace)
        if found.config is None:
            return found
        try:
            settings = read(found.config)
            self._source = f"{found.config}: "
            more = [word for each in self._words(settings, self._given) for word in each]
            found = super().parse_args([*more, *words])
        except (OSError, ValueError) as error:
            self.error(one_line(error))
        self._source = ""
        return found

    def error(self, message: str) -> NoReturn:
        super().error(f"{self._source}{message}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        self._given.add(action.dest)
        return super()._get_values(action, arg_strings)

    def _words(self, settings: Settings, given: Collection[str]) -> list[list[str]]:
        """The words of each flag of the file, without those that are `given`. Raises ValueError for
        a name that no flag has, or a value that the flag cannot have."""
        actions = {name: action for action in self._actions for name in names_of(action)}
        found, seen = [], set()
        for key, value in settings.items():
            action = actions.get(key.replace("_", "-"))
            if action is None:
                hint = did_you_mean(key, actions)
                raise ValueError(f"{shown(key)} is no flag of {self.prog}{hint}")
            if action.dest in seen:
                raise ValueError(f"{shown(key)} is given twice: expected one name of the flag")
            seen.add(action.dest)
            if action.dest not in given:
                found.append(words_of(action, key, value))
        return found


def names_of(action: argparse.Action) -> list[str]:
    """The names that a flag may have in a file: without its dashes; of a flag that only turns
    something off, the name of what it turns off."""
    if action.dest in ("help", "config"):
        return []
    flags = [each.removeprefix("--") for each in action.option_strings if each.startswith("--")]
    if isinstance(action, argparse.BooleanOptionalAction):
        return [name for name in flags if not name.startswith("no-")]
    return [name.removeprefix("no-") for name in flags] if action.const is False else flags


def words_of(action: argparse.Action, key: str, value: Any) -> list[str]:
    """The words of a command line that mean the value of a flag. Raises ValueError if there are
    none."""
    flag = next(each for each in action.option_strings if each.startswith("--"))
    is_switch = isinstance(action.const, bool)
    if is_switch or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"{key} is {shown(value)}: expected true or false")
        if not is_switch:
            return [flag if value else f"--no-{flag.removeprefix('--')}"]
        return [flag] if value is action.const else []
    if isinstance(value, dict) and isinstance(action, Joined):
        return [f"{flag}={name}={_text(f'{key}.{name}', each)}" for name, each in value.items()]
    if isinstance(value, dict) and action.type is json_object:
        return [f"{flag}={json.dumps(value)}"]
    takes_many = action.nargs == "+" or isinstance(action, argparse._AppendAction)
    if isinstance(value, list) and takes_many:
        texts = [_text(key, each) for each in value]
        return [flag, *texts] if action.nargs and texts else [f"{flag}={each}" for each in texts]
    return [f"{flag}={_text(key, value)}"]


def _text(key: str, value: Any) -> str:
    """A number or a text as a word of a command line."""
    is_word = isinstance(value, str | int | float) and not isinstance(value, bool)
    if not is_word or "\0" in str(value):
        raise ValueError(f"{key} is {shown(value)}: expected a number or a text, as after the flag")
    str(value).encode()  # else it is half of a surrogate pair
    return str(value)


def read(path: str) -> Settings:
    """What a file of flags says. Raises ValueError for a file that is none, OSError for one that
    cannot be read."""
    kinds: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": _json}
    parse = kinds.get(Path(path).suffix.lower())
    if parse is None:
        raise ValueError(f"--config {path}: expected a file whose name ends with .toml or .json")
    with Path(path).open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"--config {path}: expected at most {MOST_BYTES} bytes")
    try:
        settings = parse(raw.decode())
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from None
    except RecursionError:
        raise ValueError(f"--config {path}: nested too deep") from None
    if not isinstance(settings, dict):
        raise ValueError(f"--config {path}: expected an object of flags")
    return settings


def _json(text: str) -> Any:
    """The value of a JSON text, whose objects have each name once."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"{shown(name)} is there twice")
            found[name] = value
        return found

    return json.loads(text, object_pairs_hook=unique)
