"""Random JSON schemas whose texts are short."""

import random
from typing import Any

WORDS = ("a", "id", "name", "größe", 'say "x"', "two words", "back\\slash", "x_1", "tags", "äß☃")


def random_schema(seed: int) -> dict[str, Any]:
    """An object, so that its text has fixed keys."""
    return _object(random.Random(f"schema {seed}"), depth=2)


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _plain, _enum]
    if depth:
        kinds += [_object, _array, _choice]
    return rng.choice(kinds)(rng, depth - 1)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    if rng.random() < 0.3:
        pattern = rng.choice(["^[a-f]{1,4}$", "^(x|y)+z?$", "^\\d{2}-\\d{2}$"])
        return {"type": "string", "pattern": pattern, "maxLength": 9}
    if rng.random() < 0.2:
        return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-200, 200)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 999)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-9, 9)
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 50)}


def _plain(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, 2.5, None, True, [1, "a"], {"k": 0}], rng.randint(1, 4))}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    array = {"type": "array", "items": _any(rng, depth), "minItems": least}
    return array | {"maxItems": least + rng.randint(0, 2)}


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(1, 3))]}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 4))
    properties = {name: _any(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.8]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
