"""How the log is written: without control characters, whatever clients send. Imports no mlx."""

import logging
from typing import Any


def printable(text: str) -> str:
    """The text with an escape for each character that is none to print, as Python writes it: what a
    client sends must not reach a terminal as a control sequence."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Formatter(logging.Formatter):
    """Writes records without control characters; a traceback keeps its line ends."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(printable, super().formatException(ei).split("\n")))
