"""The documents: their prose, code in quotes and snippets; the parsers of their commands."""

import argparse
import contextlib
import io
import re
import runpy
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"((?:^<!-- [^\n]* -->\n)?)^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    """Those that speak of this project: metal-precedents.md names the code of others, and has a
    test of its own."""
    notes = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/notes/*.md"), ROOT / "scripts/README.md"]
    return [ROOT / "README.md", *sorted(set(notes) - {ROOT / "docs/metal-precedents.md"})]


@dataclass(frozen=True)
class Snippet:
    """Code between fences. A comment in the line before may say why it is not run."""

    document: Path
    line: int  # of its first line
    language: str
    code: str
    marker: str


def snippets(text: str, document: Path) -> list[Snippet]:
    return [
        Snippet(document, text.count("\n", 0, found.start(3)) + 1, found[2], found[3], found[1])
        for found in FENCE.finditer(text)
    ]


def prose(text: str) -> str:
    """A document without its snippets."""
    return FENCE.sub("", text)


def spans(text: str) -> list[str]:
    """What stands in code quotes, each in one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


class _ParserFound(BaseException):
    pass


@contextlib.contextmanager
def _stopped_at_parsing(found: list[argparse.ArgumentParser], parse: bool) -> Iterator[None]:
    """Commands end at the parser: before it has parsed its arguments, or after."""
    kind = argparse.ArgumentParser

    def stopped(original):
        def stop(parser, *arguments, **options):
            found.append(parser)
            if parse:
                with patch.object(kind, "parse_known_args", parse_known):
                    original(parser, *arguments, **options)
            raise _ParserFound

        return stop

    parse_known = kind.parse_known_args
    with (
        patch.object(kind, "parse_args", stopped(kind.parse_args)),
        patch.object(kind, "parse_known_args", stopped(parse_known)),
    ):
        yield


@cache
def parse(module: str, arguments: Sequence[str] = (), check: bool = False):
    """The parser of ``python -m module``, or None; with `check` it parses the arguments too. Raises
    ValueError with its message if it refuses them."""
    found: list[argparse.ArgumentParser] = []
    output = io.StringIO()
    argv, folders = [module, *arguments], [str(ROOT), *sys.path]
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # the module may be imported already
            _stopped_at_parsing(found, check),
            patch.object(sys, "argv", argv),
            patch.object(sys, "path", folders),
            contextlib.redirect_stderr(output),
        ):
            runpy.run_module(module, run_name="__main__", alter_sys=False)
    except _ParserFound:
        return found[0]
    except SystemExit:
        raise ValueError(output.getvalue().strip()) from None
    return None


@cache
def flags(module: str) -> frozenset[str]:
    """The flags of a command and of its subcommands."""
    parser = parse(module)
    parsers, names = [parser] if parser else [], set()
    while parsers:
        for action in parsers.pop()._actions:
            names |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return frozenset(names)
