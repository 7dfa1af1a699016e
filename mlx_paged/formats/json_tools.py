"""JSON between tags: Hermes, Qwen 2.5 and 3, and many others.

<tool_call>
{"name": "f", "arguments": {"x": 1}}
</tool_call>
"""

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from mlx_paged.formats.events import Call, NoCall
from mlx_paged.formats.format import Format
from mlx_paged.formats.grammar import Function, json_rule
from mlx_paged.formats.json_text import is_json, items, members
from mlx_paged.formats.marks import Marks, quoted
from mlx_paged.formats.scan import Calls, Scan, checked_name
from mlx_paged.formats.schemas import Tools


class JsonTools(Format):
    """Each wrapper holds JSON objects, one after the other or in a list."""

    name = "json_tools"
    aliases: ClassVar[tuple[str, ...]] = ("hermes",)
    tags: ClassVar[tuple[str, str]] = "<tool_call>", "</tool_call>"

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, *options)
        self.start, self.end = map(marks.code, self.tags)
        self.openers = (self.start,)

    def call(self, scan: Scan, tools: Tools) -> Calls:
        yield from scan.take(self.start)
        calls = yield from objects(scan, self.marks, self.end)
        return calls

    def rules(self, functions: Sequence[Function], several: bool) -> list[str]:
        return object_rules(
            self.marks.lark(self.start), self.marks.lark(self.end), functions, several
        )


def objects(scan: Scan, marks: Marks, end: str) -> Calls:
    """Read JSON objects, or a list of them, and the mark `end`."""
    calls = list[Call]()
    while True:
        yield from scan.space()
        value = yield from scan.json()
        calls += calls_of(marks.plain(value))
        yield from scan.space()
        if scan.at < len(scan.text) and scan.text[scan.at] in "{[":
            continue
        yield from scan.close(end)
        return calls


def calls_of(text: str) -> list[Call]:
    """The calls in a JSON object or in a JSON list of objects. Raises NoCall for others."""
    texts = items(text) if text[0] == "[" else [text]
    if not texts or any(each[0] != "{" for each in texts):
        raise NoCall
    return [call_of(each) for each in texts]


def call_of(text: str) -> Call:
    """The call that a JSON object is: it has "name", and "arguments" or "parameters", an object.
    An object in a string is one, too; a function without arguments may have none."""
    parts = dict(members(text))
    name = text_of(parts.get("name", ""))
    arguments = parts.get("arguments", parts.get("parameters", "{}"))
    own_id = parts.get("id", "null")
    return Call(
        checked_name(name), object_of(arguments), text_of(own_id) if own_id[0] == '"' else None
    )


def object_of(arguments: str) -> str:
    """The JSON object that arguments are. Raises NoCall if they are another value."""
    if arguments[:1] == '"':
        arguments = text_of(arguments).strip()
        if not is_json(arguments):
            raise NoCall
    if arguments[:1] != "{":
        raise NoCall
    return arguments


def text_of(value: str) -> str:
    """The text of a JSON string. Raises NoCall for another value."""
    if value[:1] != '"':
        raise NoCall
    return str(json.loads(value))


def object_rules(start: str, end: str, functions: Sequence[Function], several: bool) -> list[str]:
    """Rules of calls, each a JSON object in a line of its own between two marks."""
    more = '("\\n" call)*' if several else ""
    call = f'call: {start} "\\n" object "\\n" {end}'
    return [f"calls: call {more}", call, *json_objects(functions)]


def json_objects(functions: Sequence[Function]) -> list[str]:
    """The rule ``object``: a call of one of the functions as a JSON object."""
    rules = ["object: " + " | ".join(f"object_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        head = f'{{"name": {quoted(function.name)}, "arguments": '
        rules.append(f'object_{i}: {quoted(head)} {json_rule(function.schema)} "}}"')
    return rules
