"""How the log is written: as text or as JSON, without control characters, whatever clients send.
Imports no mlx."""

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

REQUEST_ID: ContextVar[str | None] = ContextVar("request id", default=None)
"""The id of the request on whose behalf the code runs."""


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


class JsonFormatter(logging.Formatter):
    """Writes each record as one line, a JSON object in ASCII: `time` (ISO 8601, UTC), `level`,
    `logger`, `message`; `request_id` if the record belongs to a request, `exception` if there is
    a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := REQUEST_ID.get()) is not None:
            line["request_id"] = request_id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


FORMATS = {
    "text": Formatter("%(asctime)s - %(levelname)s - %(message)s"),
    "json": JsonFormatter(),
}
"""The formatters by the values of --log-format."""
