"""What the commands of the benches share: arguments, tables, and the last line of the output."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from bench.names import REAL, SIZES, real_model
from mlx_paged.cli import COUNT, Parser, number

AT_LEAST_TWO = number(int, 2, 2**31, "a whole number >= 2")
ABOVE_ZERO = number(float, 1e-6, 1e9, "a number above 0")
INTERRUPTED = 130  # exit status after Ctrl-C
MIB = 2**20
GIB = 2**30


def make_parser(name: str, about: str, package: str = "bench") -> Parser:
    """The parser of one bench, or of a script that `package` has."""
    return Parser(prog=f"{package}.{name}", description=about)


def add_model(parser: Parser, default: str = "reference") -> None:
    text = f"{', '.join(SIZES)} (random weights) or {', '.join(REAL)} (default: %(default)s)"
    options: dict[str, Any] = {"choices": (*SIZES, *REAL), "metavar": "NAME", "help": text}
    parser.add_argument("--model", type=_model, default=default, **options)


def _model(name: str) -> str:
    """The name, unless it is a real model that is not there."""
    try:
        if name in REAL:
            real_model(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name


def add_rounds(parser: Parser, default: int) -> None:
    text = "number of rounds; times are medians over the rounds"
    parser.add_argument("--rounds", type=COUNT, default=default, help=text)


def text_of(value: Any, form: str) -> str:
    """A cell of a table; None becomes a dash."""
    return "-" if value is None else format(value, form)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as text, each column as wide as its widest cell; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])]
    return "\n".join("  ".join(forms).format(*row) for row in rows)


def print_result(bench: str, result: dict[str, Any]) -> None:
    """The last line of the output: one JSON object."""
    print(json.dumps({"bench": bench, **result}))
