"""Reads lines of OpenAI's batch files: each is a request of the server's API. Imports no mlx."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlx_paged.protocol import request_body, responses
from mlx_paged.protocol.constraints import require
from mlx_paged.protocol.fields import MAX_SAMPLES, Fields
from mlx_paged.protocol.json_text import check_values
from mlx_paged.protocol.request_body import Refusal, refusing

MARKS = {"custom_id", "url", "body"}
"""Keys that no line of this package's own form has."""

KEYS = {*MARKS, "method"}
AS_CHAT: dict[str, Callable[[Fields], Fields] | None] = {
    "/v1/chat/completions": dict,
    "/v1/completions": None,
    responses.PATH: responses.as_chat,
}
"""By the url of a line: what makes a body for chat completions of its body."""


@dataclass
class BatchLine:
    """A request, or why there is none.

    Attributes:
        custom_id: as it is in the line; None if there is none.
        fields: as :func:`request_body.read` gives them, and the body itself as `body`.
        ignored: names of fields without effect.
    """

    custom_id: str | None
    url: str = ""
    fields: Fields = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    refusal: Refusal | None = None

    @property
    def names(self) -> dict[str, str]:
        """What fields of chat completions are called."""
        return responses.NAMES if self.url == responses.PATH else {}


def is_batch_line(entry: Any) -> bool:
    return isinstance(entry, dict) and not MARKS.isdisjoint(entry)


def read_line(entry: Any, taken: set[str]) -> BatchLine:
    """The request of a line. A mistake in it becomes its refusal.

    Args:
        entry: the line's value, or the ValueError that tells why there is none.
        taken: the ids of the lines before; it gets this line's.
    """
    given = entry.get("custom_id") if isinstance(entry, dict) else None
    line = BatchLine(given if isinstance(given, str) else None)
    try:
        with refusing():
            if isinstance(entry, ValueError):
                raise entry
            _read_head(entry, line, taken)
        with refusing(line.names):
            _read_body(entry["body"], line)
    except Refusal as error:
        line.refusal = error
    return line


def _read_head(entry: Any, line: BatchLine, taken: set[str]) -> None:
    require(isinstance(entry, dict), "the line", "an object with custom_id, url and body", entry)
    given = entry.get("custom_id")
    require(isinstance(given, str) and given, "custom_id", "a text that is not empty", given)
    require(given not in taken, "custom_id", "an id that no line before has", given)
    taken.add(given)
    require(entry.get("method") == "POST", "method", "POST", entry.get("method"))
    url = entry.get("url")
    known = isinstance(url, str) and url in AS_CHAT
    require(known, "url", f"one of {', '.join(AS_CHAT)}", url)
    line.url = str(url)
    unknown = sorted(entry.keys() - KEYS)
    require(not unknown, unknown[0] if unknown else "", f"only {', '.join(sorted(KEYS))}", "more")
    require(isinstance(entry.get("body"), dict), "body", "an object", entry.get("body"))
    check_values(entry)


def _read_body(body: Fields, line: BatchLine) -> None:
    check_values(body)
    as_chat = AS_CHAT[line.url]
    chat = as_chat(body) if as_chat else body
    fields, line.ignored = request_body.read(chat, as_chat is not None, MAX_SAMPLES)
    require(not fields["stream"], "stream", "false in a batch", True)
    line.fields = fields | {"body": body}
