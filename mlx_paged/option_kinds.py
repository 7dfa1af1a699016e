"""Kinds of values that options have. A kind checks a caller's value and reads the text of a flag.
Knows no mlx."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from os import PathLike
from os.path import exists, isfile
from typing import Any

from mlx_paged.arguments import (
    GB,
    choice,
    integer,
    is_real,
    require,
    require_choices,
    require_flags,
    require_paths,
    require_positive,
)

LARGEST_COUNT = 2**31
"""The largest whole number that the text of a flag may have, unless the option has a limit."""


def read_number(
    text: str, parse: Callable[[str], float], low: float, high: float, expected: str
) -> float:
    """The number that a text has. Raises ValueError unless the number is in [low, high]."""
    try:
        value = parse(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise ValueError(f"expected {expected}, got {text!r}")
    return value


@dataclass(frozen=True)
class Kind:
    """A kind of values. This one takes any value: only the engine can check its options."""

    def check(self, op: str, name: str, value: Any) -> Any:
        """The value as the package uses it.

        Raises:
            ValueError: the value is of another kind or out of range.
        """
        return value

    def read(self, text: str) -> Any:
        """The value that the text of a flag means.

        Raises:
            ValueError: the text means none; the message says what is expected.
        """
        return text

    def problem(self, value: Any) -> str | None:
        """Why a command cannot use the value of a flag, as far as its files show; None: it can."""
        return None


@dataclass(frozen=True)
class Whole(Kind):
    """Whole numbers from `minimum` to `maximum`. `largest_read` limits the text of a flag."""

    minimum: int
    maximum: int | None = None
    is_optional: bool = False
    largest_read: int = LARGEST_COUNT

    def check(self, op: str, name: str, value: Any) -> int | None:
        if value is None and self.is_optional:
            return None
        return integer(op, name, value, self.minimum, self.maximum)

    def read(self, text: str) -> float:
        if self.maximum is None:
            expected = f"a whole number >= {self.minimum}"
            if text.isdecimal() and len(text) > len(str(self.minimum)):  # it is too large
                expected = f"a whole number from {self.minimum} to {self.largest_read}"
            return read_number(text, int, self.minimum, self.largest_read, expected)
        expected = f"a whole number from {self.minimum} to {self.maximum}"
        return read_number(text, int, self.minimum, self.maximum, expected)


@dataclass(frozen=True)
class Bytes(Kind):
    """A number of bytes, or None. The text of a flag is a number of GB."""

    minimum: int

    def check(self, op: str, name: str, value: Any) -> int | None:
        return None if value is None else integer(op, name, value, self.minimum)

    def read(self, text: str) -> int:
        return int(GIGABYTES.read(text) * GB)


@dataclass(frozen=True)
class SomeBytes(Bytes):
    """A number of bytes. The text of a flag is a number of GB."""

    def check(self, op: str, name: str, value: Any) -> int:
        return integer(op, name, value, self.minimum)


@dataclass(frozen=True)
class Gigabytes(Kind):
    """A number of GB above 0."""

    def check(self, op: str, name: str, value: Any) -> float:
        is_size = is_real(value) and 0 < value < math.inf
        require(is_size, op, name, value, "a number > 0")
        return float(value)

    def read(self, text: str) -> float:
        return read_number(text, float, 1e-9, 1e6, "a number of GB above 0")


@dataclass(frozen=True)
class Part(Kind):
    """A part of something: a number from 0 to 1."""

    def check(self, op: str, name: str, value: Any) -> float:
        require(is_real(value) and 0 <= value <= 1, op, name, value, "a number from 0 to 1")
        return float(value)

    def read(self, text: str) -> float:
        return read_number(text, float, 0, 1, "a number from 0 to 1")


GIGABYTES = Gigabytes()


@dataclass(frozen=True)
class Milliseconds(Kind):
    """A number of milliseconds above 0, or None."""

    def check(self, op: str, name: str, value: Any) -> float | None:
        require_positive(op, name, value)
        number: float | None = value
        return number

    def read(self, text: str) -> float:
        return read_number(text, float, 1e-3, 1e9, "a number of milliseconds above 0")


@dataclass(frozen=True)
class OnOff(Kind):
    """True or False. None is a value, too, if the engine `may_choose`."""

    may_choose: bool = False

    def check(self, op: str, name: str, value: Any) -> bool | None:
        (require_choices if self.may_choose else require_flags)(op, **{name: value})
        is_on: bool | None = value
        return is_on


@dataclass(frozen=True)
class Choice(Kind):
    """The members of an enumeration, or their names."""

    members: type[StrEnum]

    def check(self, op: str, name: str, value: Any) -> StrEnum:
        return choice(op, name, self.members, value)


@dataclass(frozen=True)
class Name(Kind):
    """One of some names, or None. `expected` says so in a message."""

    names: Sequence[str]
    expected: str

    def check(self, op: str, name: str, value: Any) -> str | None:
        is_name = value is None or (isinstance(value, str) and value in self.names)
        require(is_name, op, name, value, self.expected)
        given: str | None = value
        return given


@dataclass(frozen=True)
class OneOf(Kind):
    """Some whole numbers, of which the flag of a command takes one."""

    numbers: Sequence[int]

    def read(self, text: str) -> int:
        return int(text)


@dataclass(frozen=True)
class Path(Kind):
    """A path, or None."""

    def check(self, op: str, name: str, value: Any) -> str | PathLike[str] | None:
        require_paths(op, **{name: value})
        path: str | PathLike[str] | None = value
        return path


@dataclass(frozen=True)
class Directory(Path):
    """The path of a directory, which need not exist, or None."""

    def problem(self, value: Any) -> str | None:
        is_file = value is not None and isfile(value)
        return "it is a file: expected a directory" if is_file else None


@dataclass(frozen=True)
class PathOrAuto(Path):
    """A path, or None. The text of a flag may be "auto": the folder of the command's model, which
    has `what`."""

    what: str

    def is_auto(self, value: Any) -> bool:
        """Whether the value of a flag is "auto"."""
        return str(value) == "auto"

    def problem(self, value: Any) -> str | None:
        is_there = value is None or self.is_auto(value) or exists(value)
        return None if is_there else "no such file or directory"


@dataclass(frozen=True)
class NamedPaths(Kind):
    """Paths by names that are not empty, or None."""

    def check(self, op: str, name: str, value: Any) -> dict[str, str | PathLike[str]] | None:
        expected = "a mapping of names to paths, or None"
        require(value is None or isinstance(value, Mapping), op, name, value, expected)
        for key, path in (value or {}).items():
            is_name = isinstance(key, str) and bool(key)
            require(is_name and isinstance(path, str | PathLike), op, name, value, expected)
        return None if value is None else dict(value)

    def read(self, text: str) -> dict[str, str]:
        name, _, path = text.partition("=")
        if not (name and path):
            raise ValueError(f"expected NAME=PATH, got {text!r}")
        if not name.isprintable():
            raise ValueError(f"expected NAME=PATH with a printable name, got {text!r}")
        return {name: path}


@dataclass(frozen=True)
class Paths(Kind):
    """Any number of paths."""

    def check(self, op: str, name: str, value: Any) -> Sequence[str | PathLike[str]]:
        is_many = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        are_paths = is_many and all(isinstance(path, str | PathLike) for path in value)
        require(are_paths, op, name, value, "a sequence of paths")
        paths: Sequence[str | PathLike[str]] = value
        return paths


SAME = object()
"""In place of the default of a flag: the option's default."""


@dataclass(frozen=True, slots=True)
class OptionFlag:
    """The flag of an option, in the commands that have this option.

    Attributes:
        names: the flag and its other names. A flag that begins with ``--no-`` turns the option off.
        help: what the command's help says. The command adds the default, if the option has one and
            `help` does not say "(default".
        metavar: stands for the value in the help; "" for a flag without a value, or with choices.
        default: of the flag, if it is another one than the option's.
        beside: names of options: without the flag of one of them this flag has no meaning. Empty:
            it needs none.
        not_beside: names of options beside whose flags this flag is a mistake.
        is_model: the flag names a model, which the command loads.
    """

    names: str
    help: str
    metavar: str = ""
    default: Any = SAME
    beside: tuple[str, ...] = ()
    not_beside: tuple[str, ...] = ()
    is_model: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """What the table says of an option, beside its type and its default.

    Attributes:
        kind: checks the option's value, and reads the text of its flag.
        text: what the documents say of the option.
        flag: of the commands; None: no command has one.
    """

    kind: Kind
    text: str
    flag: OptionFlag | None = None
