"""Writes calls as the templates of Gemma do, after their documentation."""

import json

from tests.support.formats.harness import Mark


def gemma_value(value, quote):
    """The parts of a value: strings between marks, keys without quotes."""
    if isinstance(value, str):
        return [quote, value, quote]
    if isinstance(value, dict):
        parts = ["{"]
        for key in sorted(value, key=str.lower):
            parts += ["," if len(parts) > 1 else "", f"{key}:", *gemma_value(value[key], quote)]
        return [*parts, "}"]
    if isinstance(value, list):
        parts = ["["]
        for each in value:
            parts += ["," if len(parts) > 1 else "", *gemma_value(each, quote)]
        return [*parts, "]"]
    return ["None" if value is None else json.dumps(value)]


def gemma_call(name, arguments, start, end, quote):
    return [start, f"call:{name}", *gemma_value(arguments, quote), end]


def gemma_render(start, end, quote):
    """A renderer of random calls."""
    marks = Mark(start), Mark(end), Mark(quote)

    def render(calls, rng):
        return [gemma_call(*call, *marks) for call in calls]

    return render
