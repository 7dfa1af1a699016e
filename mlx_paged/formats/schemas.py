"""Values of arguments that a format writes as plain text, by the schema of their parameters."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from mlx_paged.formats.events import Call
from mlx_paged.formats.json_text import is_json, is_number, written

Schema = Any  # a JSON schema; what a client sends can be anything

MAX_DIGITS = 18  # of an index of a list
MAX_STEPS = 100  # of references and combined schemas that are followed

ALIASES = {
    **dict.fromkeys(("str", "text", "char", "varchar", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "long", "short", "uint", "unsigned"), "integer"),
    **dict.fromkeys(("float", "double", "num", "decimal"), "number"),
    **dict.fromkeys(("bool", "binary"), "boolean"),
    **dict.fromkeys(("dict", "map", "struct"), "object"),
    **dict.fromkeys(("list", "arr", "tuple", "set"), "array"),
    **dict.fromkeys(("none", "nil"), "null"),
}
"""Names of types that schemas of clients have, by those of JSON schemas."""

TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}
"""Names of JSON types by Python's types, except strings."""

NAMES = {"string", "integer", "number", "boolean", "object", "array", "null"}


class Tools:
    """The functions that a request declares.

    Args:
        tools: in the form of OpenAI's chat completions. Tools of another form are passed over.
        is_data: the content follows a schema, so that it can look like a call without marks.
        allowed: the names that may be called; None: every name.

    Attributes:
        given: `tools` as they were given.
    """

    def __init__(
        self,
        tools: Sequence[Any] = (),
        is_data: bool = False,
        allowed: Collection[str] | None = None,
    ) -> None:
        self.given = list(tools)
        self._is_data = is_data
        self._allowed = allowed
        self._schemas: dict[str, Schema] = {}
        for tool in tools:
            function = tool.get("function") if isinstance(tool, dict) else None
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                self._schemas[function["name"]] = function.get("parameters")

    def allow(self, calls: Sequence[Call]) -> bool:
        """Whether all these calls may be made."""
        return self._allowed is None or all(call.name in self._allowed for call in calls)

    def is_certain(self, name: str) -> bool:
        """Whether a text without marks that is a call of `name` can be nothing else."""
        return not self._is_data or name in self._schemas

    def keys(self, name: str) -> frozenset[str] | None:
        """The parameters of a function; None: any can be given, for nothing is declared."""
        schema = self._schemas.get(name)
        if not isinstance(schema, dict) or schema.get("additionalProperties"):
            return None
        properties = schema.get("properties")
        return frozenset(properties) if isinstance(properties, dict) else None

    def value(self, name: str, key: str, text: str) -> str:
        """The JSON of an argument whose value is written as plain text. A parameter that is not
        declared is a string."""
        root = self._schemas.get(name)
        properties = root.get("properties") if isinstance(root, dict) else None
        if not isinstance(properties, dict) or key not in properties:
            return written(text)
        return value_of(text, properties[key], root)


def value_of(text: str, schema: Schema, root: Schema) -> str:
    """The JSON that `text` is by a schema: what the model wrote if that is JSON of a declared type,
    else a string.

    If a string is allowed, a text is the string, with two exceptions: ``null`` if the type null is
    allowed, too, and objects and arrays if their types are.

    Args:
        root: the schema that references of `schema` point into.
    """
    choices = choices_of(schema, root)
    if choices is not None:
        if text in choices:
            return written(text)
        if any(_is_same(text.strip(), choice) for choice in choices):
            return text.strip()
    types = types_of(schema, root)
    if text == "null" and "null" in (types or ()):
        return text
    found = _type_of(text.strip())
    if found in ("object", "array"):
        return text.strip() if types is None or found in types else written(text)
    if types is None or "string" in types:
        return written(text)
    return text.strip().lower() if _is_allowed(text.strip(), found, types) else written(text)


def _is_allowed(text: str, found: str | None, types: frozenset[str]) -> bool:
    if found == "number":
        return "number" in types or ("integer" in types and float(text).is_integer())
    return found in types or (found == "integer" and "number" in types)


def _type_of(text: str) -> str | None:
    """The JSON type of a text without white space around it; None if it is no JSON, or a string.
    Python's True and False are booleans, for templates write them so."""
    if text in ("true", "false", "True", "False"):
        return "boolean"
    if text == "null":
        return "null"
    if is_number(text):
        return "number" if any(mark in text for mark in ".eE") else "integer"
    if text[:1] in ("{", "["):
        return {"{": "object", "[": "array"}[text[0]] if is_json(text) else None
    return None


def _is_same(text: str, choice: Any) -> bool:
    """Whether a text is the JSON of one of a schema's constants that is no string."""
    return not isinstance(choice, str) and text == written(choice)


def resolved(schema: Schema, root: Schema) -> Schema:
    """What a schema's `$ref` points to within `root`; the schema itself if it has none."""
    for _ in range(MAX_STEPS):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            return schema
        schema = _pointed(reference, root)
    return {}


def _pointed(reference: str, root: Schema) -> Schema:
    if not reference.startswith("#"):
        return {}
    found = root
    for part in filter(None, reference[1:].split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        elif isinstance(found, list) and _is_index(key) and int(key) < len(found):
            found = found[int(key)]
        else:
            return {}
    return found


def _is_index(key: str) -> bool:
    """Whether a part of a reference can be an index. Python reads no number of some thousand
    digits."""
    return len(key) <= MAX_DIGITS and key.isdecimal()


def choices_of(schema: Schema, root: Schema) -> list[Any] | None:
    """The constants that a schema allows; None if it names none."""
    found, waiting, is_known = list[Any](), [schema], False
    seen = set[int]()  # many references may point to one long list
    for _ in range(MAX_STEPS):
        if not waiting:
            break
        part = resolved(waiting.pop(), root)
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        if "const" in part:
            is_known = True
            found.append(part["const"])
        if isinstance(part.get("enum"), list):
            is_known = True
            found += part["enum"]
        waiting += [x for name in ("anyOf", "oneOf", "allOf") for x in _list(part.get(name))]
    return found if is_known else None


def types_of(
    schema: Schema, root: Schema, steps: Iterator[int] | None = None
) -> frozenset[str] | None:
    """The JSON types that a schema allows; None if it says nothing of them, or too much: `steps`
    is the number of schemas that may be looked at, :data:`MAX_STEPS` at first."""
    steps = iter(range(MAX_STEPS)) if steps is None else steps
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or next(steps, None) is None:
        return None
    found = _named_types(schema)
    for part in _list(schema.get("allOf")):
        types = types_of(part, root, steps)
        found = found if types is None else types if found is None else found & types
    for name in ("anyOf", "oneOf"):
        parts = [types_of(part, root, steps) for part in _list(schema.get(name))]
        if parts and found is None and None not in parts:
            found = frozenset[str]().union(*(part for part in parts if part is not None))
    return found


def _named_types(schema: dict[str, Any]) -> frozenset[str] | None:
    """The types that a schema itself names, or that follow from its constants and parts."""
    given = schema.get("type")
    names = [given] if isinstance(given, str) else _list(given)
    if names:
        lower = {name.lower() for name in names if isinstance(name, str)}
        types = {ALIASES.get(name, name) for name in lower}
        types |= {"null"} if schema.get("nullable") is True else set()
        return frozenset(types) if types <= NAMES else None
    constants = _list(schema.get("enum")) + ([schema["const"]] if "const" in schema else [])
    if constants:
        return frozenset(TYPES.get(kind, "string") for kind in set(map(type, constants)))
    if isinstance(schema.get("properties"), dict):
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
