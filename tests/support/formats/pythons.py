"""Writes calls as Python, and checks formats that have such calls."""

import json
import random

from tests.support.formats.harness import as_values, made, read
from tests.support.formats.random_calls import random_call, random_tools


def as_python(name, arguments, value=repr):
    """A call with keywords."""
    written = ", ".join(f"{key}={value(each)}" for key, each in arguments.items())
    return f"{name}({written})"


def as_json(value):
    return json.dumps(value, ensure_ascii=False)


def raw(quote):
    """How a template writes a value that does not escape strings: between two quotes."""

    def value(each):
        return f"{quote}{each}{quote}" if isinstance(each, str) else as_json(each)

    return value


def check_raw_strings(kind, marks, wrapped, quote, rounds):
    """Strings come back that a template writes without escapes. They have no backslash, for this
    begins an escape.

    Args:
        wrapped: gives the parts of a wrapper of several calls that are written.
    """
    rng = random.Random(1)
    for i in range(rounds):
        tools = random_tools(rng)
        calls = [random_call(rng, tools, ()) for _ in range(rng.choice((1, 1, 2)))]
        calls = [(name, {k: _plain(v) for k, v in arguments.items()}) for name, arguments in calls]
        parts = wrapped([as_python(*call, raw(quote)) for call in calls])
        form = made(kind, marks if i % 2 else (), None)
        assert as_values(read(form, parts, rng, tools=tools)) == calls, "".join(parts)


def _plain(value):
    return value.replace("\\", "/") if isinstance(value, str) else value
