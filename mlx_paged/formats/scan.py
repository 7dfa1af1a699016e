"""Reads a call from coded text that comes in pieces.

A format describes its calls as a generator that takes parts of the text from a :class:`Scan` and
returns the calls. It yields where more text is needed, and goes on when that has come, so that each
character is read once. It raises NoCall as soon as the text can be no call.
"""

import re
from collections.abc import Generator
from typing import TypeVar

from mlx_paged.formats.events import Call, NoCall
from mlx_paged.formats.json_text import JsonScan
from mlx_paged.formats.marks import is_token

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a call that is read in steps."""

MAX_NAME = 256  # characters of a function's name
MAX_HEAD = 2 * MAX_NAME  # characters of a tag with a name in it
MAX_STATES = 200_000  # that searches of one answer look at; a text that needs more is no call
_SPACE = re.compile(r"\s*")


class Effort:
    """What the searches of one answer may still do.

    Attributes:
        left: states that they may look at.
    """

    def __init__(self) -> None:
        self.left = MAX_STATES


class Scan:
    """Coded text that begins with the mark of a call.

    Args:
        effort: what the searches of the answer with this text may still do.

    Attributes:
        text: what has come so far.
        at: how far it is read.
        is_ended: no more text follows.
        is_cut: the answer ended before the model ended it.
        kept: calls that are complete, whatever comes after them in their wrapper.
        kept_at: where the calls of `kept` end.
    """

    def __init__(self, text: str, effort: Effort | None = None) -> None:
        self.text = text
        self.effort = effort or Effort()
        self.at = 0
        self.is_ended = False
        self.is_cut = False
        self.kept: list[Call] = []
        self.kept_at = 0

    def keep(self, calls: list[Call]) -> None:
        """The calls so far are complete. What has been read of the wrapper belongs to them."""
        self.kept, self.kept_at = list(calls), self.at

    def more(self) -> Steps[None]:
        """Wait for more text."""
        if self.is_ended:
            raise NoCall
        yield

    def take(self, literal: str) -> Steps[None]:
        """Read a text that must follow."""
        while len(self.text) < self.at + len(literal):
            if not literal.startswith(self.text[self.at :]):
                raise NoCall
            yield from self.more()
        if not self.text.startswith(literal, self.at):
            raise NoCall
        self.at += len(literal)

    def maybe(self, literal: str) -> Steps[bool]:
        """Read a text if it follows; returns whether it follows."""
        while literal.startswith(self.text[self.at :]) and len(self.text) < self.at + len(literal):
            if self.is_ended:
                return False
            yield
        is_there = self.text.startswith(literal, self.at)
        self.at += len(literal) * is_there
        return is_there

    def close(self, literal: str) -> Steps[None]:
        """Read the last mark of a call, which a model that ends its answer there may omit."""
        yield from self.space()
        if self.at == len(self.text) and not self.is_cut:
            return
        yield from self.take(literal)

    def space(self) -> Steps[None]:
        """Read white space up to the next character, or up to the end of the answer."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text) or self.is_ended:
                return
            yield

    def name(self, *ends: str) -> Steps[str]:
        """Read a name of a function up to one of the texts `ends`, which stays."""
        start = self.at
        while True:
            found = [at for end in ends if (at := self.text.find(end, start)) >= 0]
            name = self.text[start : min(found)] if found else self.text[start:]
            if len(name) > MAX_NAME or _has_space(name if found else name.rstrip()):
                raise NoCall
            if found:
                self.at = min(found)
                return checked_name(name)
            yield from self.more()

    def until(self, end: str, limit: int | None = None) -> Steps[str]:
        """Read the text before the next `end`, and this.

        Args:
            limit: characters that the text may have.
        """
        start = looked = self.at
        while (found := self.text.find(end, looked)) < 0:
            looked = max(start, len(self.text) - len(end) + 1)
            if limit is not None and looked - start > limit:
                raise NoCall
            yield from self.more()
        if limit is not None and found - start > limit:
            raise NoCall
        self.at = found + len(end)
        return self.text[start:found]

    def json(self, first: str = "{[") -> Steps[str]:
        """Read a JSON value that begins with one of the characters `first`."""
        while self.at == len(self.text):
            yield from self.more()
        if self.text[self.at] not in first:
            raise NoCall
        start, scan = self.at, JsonScan()
        while True:
            self.at, is_whole = scan.feed(self.text, self.at, self.is_ended)
            if is_whole:
                return self.text[start : self.at]
            yield from self.more()


def at_once(steps: Steps[T]) -> T:
    """The result of steps over a text that is complete. Raises NoCall as they do."""
    try:
        next(steps)
    except StopIteration as done:
        result: T = done.value
        return result
    raise NoCall


def checked_name(name: str) -> str:
    """The name of a function, which has no white space and no mark that is a token. Raises NoCall
    for another text."""
    if not name or len(name) > MAX_NAME or _has_space(name) or is_token(name):
        raise NoCall
    return name


def _has_space(text: str) -> bool:
    return any(character.isspace() for character in text)


Calls = Steps[list[Call]]
"""The calls that a wrapper holds, read in steps."""
