"""Tools of the Responses API that the client runs, as functions that a model can be offered.

A custom tool takes a text, which may follow a grammar: it is a function with one argument. The
tools of a namespace are functions with the namespace in their names.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mlx_paged.formats.grammar import TEXT_GRAMMAR
from mlx_paged.protocol.constraints import require
from mlx_paged.protocol.fields import Fields
from mlx_paged.protocol.json_text import written
from mlx_paged.protocol.messages import objects

INPUT = "input"
"""The argument of the function that a custom tool is."""

KINDS = ("function", "custom")
"""Kinds of tools that the client runs; a namespace has some of them."""

_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)


@dataclass(frozen=True)
class Own:
    """What a client calls a function."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def names(self) -> Fields:
        """The fields of a call that name it."""
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})


@dataclass
class Offered:
    """The tools of a request.

    Attributes:
        functions: in the form of chat completions.
        own: what the client calls each of them.
        first: the first of them that the client calls so, by this name and whether it is custom.
        ignored: names of tools, and of parts of tools, that cannot be obeyed.
    """

    functions: list[Fields] = field(default_factory=list)
    own: dict[str, Own] = field(default_factory=dict)
    first: dict[tuple[str, bool], str] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)

    def of(self, name: str) -> Own:
        """What the client calls the function that a model has called."""
        return self.own.get(name, Own(name))

    def named(self, name: Any, is_custom: bool) -> Any:
        """The function of a name in `tool_choice`: that of a tool, or of one in a namespace."""
        if not isinstance(name, str) or self.own.get(name) == Own(name, None, is_custom):
            return name
        return self.first.get((name, is_custom), name)


def flat(namespace: Any, name: str) -> str:
    """The name of a function in a namespace; all formats of calls can write it."""
    return f"{namespace}__{name}" if namespace else name


def read(tools: Any) -> Offered:
    """The tools of a request.

    Raises:
        ValueError: a tool is malformed, no tool is run by the client, or two have one name.
    """
    offered = Offered()
    given = list(_each(objects(tools, "tools") if tools else [], "tools", None, offered))
    for name, tool, own in given:
        before = offered.own.setdefault(flat(own.namespace, own.name), own)
        offered.first.setdefault((own.name, own.is_custom), flat(own.namespace, own.name))
        require(before == own, f"{name}.name", "another name than other tools have", own.name)
        offered.functions.append({"type": "function", "function": _function(tool, own, name)})
        if tool.get("strict"):
            offered.ignored.add("tools.strict")
    others = sorted(offered.ignored - {"tools.strict"})
    expected = "one of the type function or custom, which the client runs"
    require(given or not tools, "tools", expected, others)
    return offered


def _each(
    tools: list[Fields], name: str, namespace: Fields | None, offered: Offered
) -> Iterator[tuple[str, Fields, Own]]:
    """The tools that the client runs, with their place and what it calls them."""
    for i, tool in enumerate(tools):
        kind, place = tool.get("type", "function"), f"{name}[{i}]"
        if kind == "namespace" and namespace is None:
            _check_name(tool, place)
            inner = objects(tool.get("tools"), f"{place}.tools")
            yield from _each(inner, f"{place}.tools", tool, offered)
        elif kind in KINDS:
            _check_name(tool, place)
            space = namespace["name"] if namespace else None
            if namespace and namespace.get("description"):
                told = f"{namespace['description']}\n{tool.get('description') or ''}"
                tool = tool | {"description": told.strip()}
            yield place, tool, Own(tool["name"], space, kind == "custom")
        else:
            offered.ignored.add(f"tools.{kind!s:.80}")


def _check_name(tool: Fields, place: str) -> None:
    name, description = tool.get("name"), tool.get("description")
    require(isinstance(name, str) and name, f"{place}.name", "a text", name)
    is_text = isinstance(description, str | None)
    require(is_text, f"{place}.description", "a text", description)


def _function(tool: Fields, own: Own, place: str) -> Fields:
    name = {"name": flat(own.namespace, own.name)}
    if not own.is_custom:
        return name | {key: tool[key] for key in ("description", "parameters") if key in tool}
    schema = {"type": "string", **_format(tool.get("format"), f"{place}.format")}
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT]}
    own_text = {key: tool[key] for key in ("description",) if key in tool}
    return name | own_text | {"parameters": parameters | {"additionalProperties": False}}


def _format(given: Any, place: str) -> Fields:
    """What the schema of a text has of the format of a custom tool."""
    given = {"type": "text"} if given is None else given
    require(isinstance(given, dict), place, "an object", given)
    kind, syntax, definition = (given.get(key) for key in ("type", "syntax", "definition"))
    require(kind in ("text", "grammar"), f"{place}.type", "text or grammar", kind)
    if kind == "text":
        return {}
    require(syntax in ("lark", "regex"), f"{place}.syntax", "lark or regex", syntax)
    is_text = isinstance(definition, str) and definition
    require(is_text, f"{place}.definition", "a text", definition)
    if syntax == "regex":
        definition = f"start: TEXT\nTEXT: /{_SLASH.sub(_escaped, str(definition))}/"
    return {TEXT_GRAMMAR: definition}


def _escaped(part: re.Match[str]) -> str:
    return {"/": "\\/", "\n": "\\n"}.get(part[0], part[0])


def text_of_input(arguments: str) -> str:
    """The text of a call of a custom tool; all arguments if the model has written others."""
    try:
        given = json.loads(arguments)
    except ValueError:
        return arguments
    is_text = isinstance(given, dict) and list(given) == [INPUT] and isinstance(given[INPUT], str)
    return str(given[INPUT]) if is_text else arguments


def arguments_of_input(text: Any, name: str) -> str:
    """The arguments of a call of a custom tool. Raises ValueError if it has no text."""
    require(isinstance(text, str), name, "a text", text)
    return written({INPUT: text})
