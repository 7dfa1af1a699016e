"""Random changes of valid requests, made from the tables of fields that the server obeys."""

import json
import random
from copy import deepcopy
from typing import Any

from mlx_paged.protocol.fields import API_OF, ONLY, OWN, RANGES, SAMPLING, all_fields
from scripts.api_fields import PATHS
from scripts.attack.wire import Request, post
from scripts.soak_clients import SCHEMA, TOOL

PATIENCE_S = 60.0
LEAVES_S = 12.0  # where the number of tokens was changed
COUNT_TOKENS = "/v1/messages/count_tokens"
TOKEN_PATHS = ("/tokenize", "/detokenize", "/apply-template", "/v1/estimate")
DEPTHS = (150, 250, 980, 5000, 60_000)

TEXTS: tuple[str, ...] = (
    *("", "a", "\ud800", "x\udfff", "\0", "\x1b[31m", "é" * 300, "x" * 70_000, "<|im_end|>"),
    *("default_model", "auto", "none", "required", "json_object", "\u202e", "🙂" * 40, "../.."),
)
NUMBERS: tuple[int | float, ...] = (
    *(0, 1, -1, 2, 20, 21, 1791, 1792, 2**31 - 1, 2**31, -(2**31), 2**40 + 5, 2**53, 2**63, 2**64),
    *(10**30, -(10**30), 10**400, 10**5000, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), -float("inf")),
)
RAW = "raw JSON, which json.dumps cannot write: "
"""How a text begins that stands for what follows it."""


def valid(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body that the server answers."""
    text = rng.choice(("def main():\n", "hello", "class Reader(object):\n    def"))
    messages: list[Any] = [{"role": "user", "content": text}]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": "short"}]})
    few = rng.randint(1, 8)
    api = rng.choice((*PATHS, "count", "tokens"))
    if api == "count":
        return COUNT_TOKENS, {"messages": messages[-1:]}
    if api == "tokens":
        bodies = ({"content": text}, {"tokens": [1, 2, 3]}, {"messages": messages})
        return rng.choice(TOKEN_PATHS), dict(rng.choice(bodies))
    body: dict[str, Any] = {"stream": rng.random() < 0.4, "seed": rng.randrange(9)}
    if api == "completions":
        prompts = (text, [text, text], [1, 2, 3], [[1, 2], [3]])
        body |= {"prompt": rng.choice(prompts), "max_tokens": few, "logprobs": rng.randint(0, 3)}
    elif api == "chat":
        body |= {"messages": messages, "max_tokens": few}
        body |= rng.choice(({}, {"tools": [TOOL]}, {"response_format": _schema()}))
    elif api == "messages":
        body |= {"messages": messages[-1:], "max_tokens": few, "system": "short"}
        body |= rng.choice(({}, {"stop_sequences": ["x"]}, {"metadata": {"user_id": "u"}}))
    else:
        body |= {"input": rng.choice((text, messages)), "max_output_tokens": few}
        body |= rng.choice(({}, {"metadata": {"a": "b"}}, {"instructions": "short"}))
    return PATHS[api], body


def _schema() -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "fact", "schema": SCHEMA}}


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any value of JSON, and some that JSON has not."""
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind in (1, 2):
        return rng.choice(NUMBERS)
    if kind in (3, 4):
        return rng.choice(TEXTS)
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {rng.choice(TEXTS): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    levels = rng.choice(DEPTHS)
    opened, closed = rng.choice((("[", "]"), ('{"a":', "}")))
    return RAW + opened * levels + "1" + closed * levels


def of_field(rng: random.Random, name: str) -> Any:
    """A value that the field `name` may have, or any other."""
    if rng.random() < 0.4:
        return value(rng)
    if ONLY.get(name):
        return rng.choice(ONLY[name])
    if name in RANGES:
        low, high = RANGES[name]
        return rng.choice((low, high, low - 1, high + 1, (low + high) / 2))
    if name in SAMPLING:
        return rng.choice((0, 1, 0.5, 1e-9, -1, 100, True))
    defaults = [rules[name][0] for rules in API_OF.values() if name in rules]
    return rng.choice((*defaults, True, 1, "a", ["a"], {"a": 1}, []))


def mutated(rng: random.Random, key: str) -> Request:
    """A valid request with up to four more fields, and up to two changed places."""
    path, before = valid(rng)
    body = deepcopy(before)
    names = sorted(all_fields() | OWN["messages"] | OWN["responses"])
    for _ in range(rng.randrange(5)):
        name = rng.choice(names)
        if not name.startswith("max_"):
            body[name] = of_field(rng, name)
    for _ in range(rng.choice((0, 0, 1, 2))):
        _change(rng, body)
    is_long = any(name.startswith("max_") for name in _changed(before, body))
    is_long = is_long or any(name in body for name in ("n", "best_of", "min_tokens", "ignore_eos"))
    content = dumped(body)
    if rng.random() < 0.05:  # bytes that are no JSON
        cut = rng.randrange(len(content))
        content = rng.choice(
            (content[:cut], content + b"}", b"\xff" + content, b"", b"null", b"[]")
        )
    raw = post(path, content, key)
    return Request(raw, patience=LEAVES_S if is_long else PATIENCE_S, may_leave=is_long)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    names = before.keys() | after.keys()
    return {name for name in names if name not in after or before.get(name) != after[name]}


def _change(rng: random.Random, body: dict[str, Any]) -> None:
    """Replace, remove, copy or rename one place of the body."""
    places = list(_places(body))
    if not places:
        return
    owner, key = rng.choice(places)
    how = rng.randrange(5)
    if how == 0 and isinstance(owner, dict):
        del owner[key]
    elif how == 1 and isinstance(owner, dict):
        owner[rng.choice(TEXTS)] = owner.pop(key)
    elif how == 2 and isinstance(owner, list):
        owner += [owner[key]] * rng.choice((1, 3, 300))
    else:
        owner[key] = value(rng)


def _places(node: Any) -> Any:
    """Each list or object within `node`, with each index or key of it."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for key, child in list(pairs):
        yield node, key
        if isinstance(child, dict | list):
            yield from _places(child)


def dumped(body: Any) -> bytes:
    """JSON of `body`, with NaN, halves of characters and numbers of any length."""
    return "".join(_written(body)).encode("utf-8", "surrogatepass")


def _written(node: Any) -> Any:
    if isinstance(node, dict):
        yield "{"
        for i, (key, child) in enumerate(node.items()):
            yield ("," if i else "") + json.dumps(key) + ":"
            yield from _written(child)
        yield "}"
    elif isinstance(node, list):
        yield "["
        for i, child in enumerate(node):
            yield "," if i else ""
            yield from _written(child)
        yield "]"
    elif isinstance(node, str) and node.startswith(RAW):
        yield node.removeprefix(RAW)
    elif type(node) is int and abs(node) >= 10**4000:  # Python refuses to write it
        yield "1" + "0" * 5000
    else:
        yield json.dumps(node)
