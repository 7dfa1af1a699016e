"""Random functions, and calls of them whose arguments have everything that goes wrong."""

import random
from typing import Any

NAMES = ("f", "read_file", "Edit", "mcp__server__run-it", "a.b")
KEYS = ("x", "path", "new_string", "n", "größe", "if", "a-b", "name", "arguments")
TEXTS = (
    *("", " ", "\n", "a", "null", "true", "123", "0800", "12:00", "[1]", '{"a": 1}', "NaN"),
    *("    return 1\n", "\tx\r\n", "\n\n  y  \n", "é🙂漢", "a\\nb", '"quoted"', "it's", "&lt;"),
    *("def f(x):\n\treturn {x: [1, 2]}\n", "<b>x</b>", "{{ x }}", "```json\n{}\n```", "\u2028"),
)
SCHEMAS: tuple[dict[str, Any], ...] = (
    *({"type": "string"},) * 6,
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": ["string", "null"]},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"type": "array", "items": {}},
    {"type": "object"},
    {"enum": ["red", "green", "null"]},
    {"const": 7},
    {"$ref": "#/$defs/count"},
    {"$ref": "#/$defs/text"},
)
DEFS = {"count": {"type": "integer"}, "text": {"anyOf": [{"type": "string"}, {"type": "null"}]}}


def random_tools(rng: random.Random) -> list[dict[str, Any]]:
    """One to three functions."""
    tools = []
    for name in rng.sample(NAMES, rng.randint(1, 3)):
        keys = rng.sample(KEYS, rng.randint(0, 4))
        properties = {key: rng.choice(SCHEMAS) for key in keys}
        schema = {"type": "object", "properties": properties, "$defs": DEFS}
        tools.append({"type": "function", "function": {"name": name, "parameters": schema}})
    return tools


def random_call(
    rng: random.Random, tools: list[dict[str, Any]], quotes: Any
) -> tuple[str, dict[str, Any]]:
    """A call of one of the functions, with some of its arguments in any order."""
    function = rng.choice(tools)["function"]
    properties = function["parameters"]["properties"]
    keys = rng.sample(sorted(properties), rng.randint(0, len(properties)))
    return function["name"], {key: random_value(rng, properties[key], quotes) for key in keys}


def random_value(rng: random.Random, schema: dict[str, Any], quotes: Any) -> Any:
    """A value that follows one of :data:`SCHEMAS`."""
    if "$ref" in schema:
        return random_value(rng, DEFS[schema["$ref"].rpartition("/")[2]], quotes)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    kinds = [part["type"] for part in schema.get("anyOf", [schema])]
    kinds = kinds[0] if isinstance(kinds[0], list) else kinds
    kind = rng.choice(kinds)
    if kind == "string":
        text = random_text(rng, quotes)
        return "nil" if text == "null" and "null" in kinds else text
    return _plain(rng, kind, quotes)


def random_text(rng: random.Random, quotes: Any) -> str:
    pieces = [rng.choice((*TEXTS, *quotes)) for _ in range(rng.choice((1, 1, 2, 4)))]
    return "".join(pieces)


def _plain(rng: random.Random, kind: str, quotes: Any, depth: int = 0) -> Any:
    """A value of a JSON type."""
    if kind == "null":
        return None
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "integer":
        return rng.choice((0, -1, 7, 2**53 + 1, -(2**63), 1234567890123456789, 10**40))
    if kind == "number":
        return rng.choice((0, 1.5, -0.25, 1e20, 2.0, 3, 1e-7))
    kinds = ("null", "boolean", "integer", "number", "string", "array", "object")
    inner = [rng.choice(kinds[: 5 if depth else 7]) for _ in range(rng.randint(0, 3))]
    values = [
        random_text(rng, quotes) if each == "string" else _plain(rng, each, quotes, depth + 1)
        for each in inner
    ]
    if kind == "array":
        return values
    return {rng.choice((*KEYS, '"', "<x>", "")): value for value in values}
