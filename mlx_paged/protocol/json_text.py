"""JSON of clients, checked, and JSON for clients, which any parser reads. Imports no mlx."""

import json
import math
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 200  # lists and objects within each other; Python's own parser ends near 1,000
MAX_DIGITS = 100  # of an integer; Python writes no integer with more than 4,300
MAX_MARKS = 1 << 21  # commas and brackets; so Python's parser keeps other threads waiting shortly
MAX_FIELDS = 1000  # of an object that is a body

_ENCODER = json.JSONEncoder(allow_nan=False)  # json.dumps makes a new one for each call


def num_marks(raw: bytes) -> int:
    """Commas and brackets of a body, which has at most so many parts."""
    return sum(map(raw.count, (b",", b"[", b"{")))


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object that a body is. All of it can be written as JSON again.

    Raises:
        ValueError: the body is no JSON object in UTF-8 or has too many parts, or a field has a
            number that is not finite or too long, half of a surrogate pair, or too many levels;
            the message names the field.
    """
    marks = num_marks(raw)
    if marks > MAX_MARKS:
        raise ValueError(f"the body has {marks} commas and brackets: expected at most {MAX_MARKS}")
    try:
        body = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # bad UTF-8 raises a ValueError
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("the body is not a JSON object")
    check_values(body)
    return body


def check_values(body: dict[str, Any]) -> None:
    """Raise ValueError, which names the field, for a body with a value that :func:`parse` takes in
    no field."""
    check_fields(body)
    for name, value in body.items():
        if not _is_text(name):
            raise ValueError(f"field {name!r:.80}: expected a name without half a character")
        if expected := _expected(value):
            raise ValueError(f"{name[:80]}: expected {expected}")


def check_fields(body: dict[str, Any]) -> None:
    """Raise ValueError for an object with too many fields, each of which is looked at by name."""
    if len(body) > MAX_FIELDS:
        raise ValueError(f"the body has {len(body)} fields: expected at most {MAX_FIELDS}")


def parse_inner(text: str) -> Any:
    """The value of a JSON text that stands in a body. Raises ValueError if the text is no JSON, or
    has more than MAX_DEPTH lists and objects within each other: templates read them with
    recursion."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it has too many levels") from error
    if any(depth >= MAX_DEPTH for depth, _ in enumerate(_levels(value))):
        raise ValueError(f"it has more than {MAX_DEPTH} levels")
    return value


def _expected(value: Any) -> str:
    """What the first part of `value` that cannot be written should be; empty if all parts can."""
    for depth, level in enumerate(_levels(value)):
        if depth >= MAX_DEPTH:
            return f"at most {MAX_DEPTH} levels of lists and objects"
        for each in level:
            if isinstance(each, str):
                if not _is_text(each):
                    return f"text without half a character, got {each[-80:]!r}"
            elif isinstance(each, float):
                if not math.isfinite(each):
                    return f"finite numbers, got {each}"
            elif isinstance(each, int) and abs(each) >= 10**MAX_DIGITS:
                return f"numbers of at most {MAX_DIGITS} digits"
    return ""


def _levels(value: Any) -> Iterator[list[Any]]:
    """The parts of `value`, names of fields among them, by how many lists and objects hold them."""
    level = [value]
    while level:
        yield level
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.keys()
                below += each.values()
            elif isinstance(each, list):
                below += each
        level = below


def _is_text(text: str) -> bool:
    """Whether `text` has no half of a surrogate pair."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def written(content: Any) -> str:
    """`content` as JSON in ASCII. Raises ValueError for numbers that JSON has not."""
    return _ENCODER.encode(content)
