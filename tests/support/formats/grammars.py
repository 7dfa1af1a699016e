"""Checks the grammar of a format's calls: what it lets a model write is read as a call."""

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jsonschema import validate
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from mlx_paged.formats.events import Call
from mlx_paged.formats.format import Format
from mlx_paged.formats.grammar import Function
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.parser import Begin
from mlx_paged.loading import load_model

DEFS = {"$defs": {"size": {"type": "integer", "minimum": 0, "maximum": 99}}}
FIRST = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 12},
        "size": {"$ref": "#/$defs/size"},
        "color": {"enum": ["red", "green"]},
        "deep": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        "note": {"anyOf": [{"enum": ["x"]}, {"type": "null"}]},
    },
    "required": ["path", "size", "deep"],
    "additionalProperties": False,
} | DEFS
SECOND = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [Function("first", FIRST), Function("second", SECOND)]
TOOLS = [
    {"type": "function", "function": {"name": f.name, "parameters": f.schema}} for f in FUNCTIONS
]
ENDS = ('"', "}", "1")


@lru_cache
def tokenizer(marks: tuple[str, ...]) -> Any:
    """The demo model's tokenizer with more tokens."""
    found = load_model()[1]._tokenizer
    found.add_special_tokens({"additional_special_tokens": list(marks)})
    return found


def check_grammar(
    kind: type[Format],
    marks: Sequence[str],
    *,
    ends: Sequence[str] = (),
    several: bool = True,
    rounds: int = 12,
) -> None:
    """Random texts that the grammar allows are calls of the functions, with proper arguments.

    Args:
        ends: texts that end a plain value.
        several: the format has a grammar of several calls.
    """
    for tokens in (tuple(marks), ()):
        inner = tokenizer(tokens)
        form = kind(Marks(inner.get_vocab()), None)
        rules = form.rules(FUNCTIONS, several)
        assert rules is not None
        grammar = LLMatcher.grammar_from_lark("\n".join(["start: calls", *rules]))
        known = from_tokenizer(inner, None)
        counts = set()
        for seed in range(rounds):
            calls = _read(form, inner, _written(grammar, known, inner, ends, random.Random(seed)))
            counts.add(len(calls))
            for call in calls:
                schema = next(f.schema for f in FUNCTIONS if f.name == call.name)
                arguments = json.loads(call.arguments)
                too_long = arguments.get("path", "")[12:]  # plain text has no length
                validate(arguments | ({"path": ""} if too_long else {}), schema)
        assert not several or max(counts) > 1, counts


def _written(
    grammar: str, known: Any, inner: Any, ends: Sequence[str], rng: random.Random
) -> list[int]:
    """Random tokens that a grammar allows; it ends where it may, by chance."""
    matcher = LLMatcher(known, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    found: list[int] = []
    while not matcher.is_stopped():
        tokens = matcher.compute_ff_tokens()
        if not tokens and matcher.is_accepting() and rng.random() < 0.5:
            break
        if not tokens and rng.random() < 0.3:  # end a value
            tokens = inner.encode(rng.choice((*ENDS, *ends)), add_special_tokens=False)
            if matcher.validate_tokens(tokens) < len(tokens):
                continue
        if not tokens:
            allowed = [i for i, bit in enumerate(matcher.compute_logit_bias()) if bit]
            tokens = [rng.choice(allowed)]
        if known.eos_token in tokens:
            break
        assert matcher.consume_tokens(tokens), matcher.get_error()
        found += tokens
        assert len(found) < 4000
    return found


def _read(form: Format, inner: Any, tokens: list[int]) -> list[Call]:
    parser, events = form.parser(TOOLS, Begin.START), []
    text = ""
    for i, token in enumerate(tokens):
        whole = inner.decode(tokens[: i + 1])
        is_open = whole.endswith("\ufffd") and i + 1 < len(tokens)
        piece = "" if is_open else whole[len(text) :]
        text += piece
        events += parser.feed(token, piece)
    events += parser.finish(False)
    assert events and all(isinstance(event, Call) for event in events), (text, events)
    return events
