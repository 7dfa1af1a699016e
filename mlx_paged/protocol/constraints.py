"""What the fields of a request demand of its text, as options of SamplingParams. Imports no mlx."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mlx_paged.formats.format import Format
from mlx_paged.formats.grammar import Function, json_rule
from mlx_paged.formats.parser import Begin
from mlx_paged.protocol.json_text import parse_inner

Options = Mapping[str, Any]
NOTHING: Options = MappingProxyType({})


def of_fields(body: Mapping[str, Any]) -> tuple[str, Options]:
    """The field for structured outputs that a body has, and the option that it asks for.

    Raises:
        ValueError: several are given, or one of a wrong form.
    """
    found: list[tuple[str, Options]] = []
    response = body.get("response_format") or {"type": "text"}
    if isinstance(response, dict) and response.get("type") == "json_object":
        found.append(("response_format", {"json_schema": {"type": "object"}}))
    elif isinstance(response, dict) and response.get("type") == "json_schema":
        wrapped = response.get("json_schema")
        schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
        found.append(("response_format", _option("response_format", "json", schema)))
    else:
        is_text = isinstance(response, dict) and response.get("type") == "text"
        types = "the type text, json_object or json_schema"
        require(is_text, "response_format", types, response)
    several = body.get("structured_outputs") or {}
    require(isinstance(several, dict), "structured_outputs", "an object", several)
    given = [(f"structured_outputs.{kind}", kind, value) for kind, value in several.items()]
    given += [(f"guided_{kind}", kind, body.get(f"guided_{kind}")) for kind in KINDS]
    found += [
        (name, _option(name, kind, value)) for name, kind, value in given if value is not None
    ]
    if len(found) > 1:
        raise ValueError(f"{found[1][0]}: expected nothing beside {found[0][0]}")
    return found[0] if found else ("", NOTHING)


def _option(name: str, kind: str, value: Any) -> Options:
    if kind not in KINDS:
        raise ValueError(f"{name}: expected one of {', '.join(KINDS)}")
    if kind == "choice":
        is_list = isinstance(value, list) and value
        is_valid = is_list and all(isinstance(text, str) and text for text in value)
        require(is_valid, name, "a list of texts", value)
        return {"grammar": f"start: {' | '.join(map(json.dumps, value))}"}
    kinds, expected = (str | dict, "a JSON schema") if kind == "json" else (str, "a text")
    require(isinstance(value, kinds) and value != "", name, expected, value)
    return {KINDS[kind]: value}


def require(condition: object, name: str, expected: str, value: object) -> None:
    """Raise ValueError, which names the field, unless `condition` holds."""
    if not condition:
        given = "nothing" if value is None else repr(str(value)[:80])
        raise ValueError(f"{name}: expected {expected}, got {given}")


def require_json(text: Any, name: str) -> None:
    """Raise ValueError, which names the field, unless `text` is JSON, empty or an object."""
    try:
        require(isinstance(text, str | dict | None), name, "JSON", text)
        parse_inner(text if text and isinstance(text, str) else "{}")
    except ValueError as error:
        raise ValueError(f"{name}: expected JSON, got {str(text)[-80:]!r} at its end") from error


KINDS = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "grammar"}
"""Fields of `structured_outputs`, and of a body behind "guided_"; the options that obey them."""


def of_tools(form: Format, tools: list[dict[str, Any]], name: str | None) -> Options:
    """A grammar of one or more calls in the model's own format: of the tool `name`, or of any.

    Raises:
        ValueError: there is no such tool, or no grammar of this model's format.
    """
    functions = [tool.get("function") or {} for tool in tools]
    called = [f for f in functions if name in (None, f.get("name"))]
    if not called or any(not isinstance(f.get("name"), str) for f in called):
        raise ValueError(f"tool_choice: expected one of the tools, got {name or 'required'!r}")
    each = [Function(f["name"], f.get("parameters")) for f in called]
    rules = form.rules(each, name is None)
    if rules is None:
        raise ValueError(
            f"tool_choice: expected auto or none, for no grammar is known of this model's format "
            f"of tool calls ({form.name or 'none'})"
        )
    return {"grammar": "\n".join(["start: calls", *rules])}


def leaves_calls(form: Format, options: Options) -> bool:
    """Whether :func:`of_answer` knows a grammar of calls, or else of a text that follows these
    options."""
    return "regex" not in options and form.rules([Function("f", None)], True) is not None


def of_answer(form: Format, begin: Begin, content: Options, calls: Options) -> Options:
    """What a whole answer follows: its content, or calls of tools, or one of both; a thought before
    these is free.

    Raises:
        ValueError: the content is a regular expression, which cannot be nested, but must be.
    """
    parts = [name for name, part in (("content", content), ("calls", calls)) if part]
    rules = form.around(begin, parts) if parts else []
    if not rules:
        return content or calls
    if "regex" in content:
        raise ValueError(
            "regex: expected a prompt that does not end in reasoning; "
            "many chat templates take enable_thinking: false in chat_template_kwargs"
        )
    rules += [f"content: {_nested(content)}"] if content else []
    rules += [f"calls: {_nested(calls)}"] if calls else []
    return {"grammar": "\n".join(rules)}


def _nested(options: Options) -> str:
    """What the options demand, inside a grammar. A regular expression cannot be nested."""
    if "json_schema" in options:
        schema = options["json_schema"]
        return json_rule(parse_inner(schema) if isinstance(schema, str) else schema)
    return f"%lark {{\n{options['grammar']}\n}}"
