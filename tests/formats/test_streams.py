"""A streamed answer is the whole one, in every format, whatever the model writes."""

import json
import random

import pytest

from mlx_paged.formats.channels import Channels
from mlx_paged.formats.parser import Begin
from mlx_paged.formats.registry import FORMATS
from tests.support.formats.harness import Mark, made, read

TEXTS = (" ", "\n", "so", "a < b", "<", "{", "}", '"', "[", "é🙂", "</", "<|", "to=functions.f")
OBJECTS = ('{"name": "f", "arguments": {"x": "1"}}', '{"x": 1}', '{"name": "g"', "{}", "null")


def marks_of(form):
    """The marks that a format has coded when it was made with all of them as text."""
    seen = []

    class Spy(dict):
        def get(self, mark, default=None):
            seen.append(mark)
            return default

    form(type(made(form, ()).marks)(Spy()), None)
    return sorted({*seen, "<think>", "</think>"})


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_streamed_answer_is_the_whole_one(form):
    rng, marks = random.Random(0), marks_of(form)
    pieces = [*map(Mark, marks), *map(Mark, marks), *marks, *TEXTS, *OBJECTS]
    pieces += ["<function=f>", "</function>", "<parameter=x>", "</parameter>", "f", json.dumps("x")]
    for i in range(300):
        parts = [rng.choice(pieces) for _ in range(rng.randint(1, 14))]
        options = {"is_cut": rng.random() < 0.5, "is_data": rng.random() < 0.2}
        options["begin"] = rng.choice([*Begin])
        model = made(form, marks if i % 2 else ())
        whole = read(model, parts, 10_000, **options)
        for width in (1, 2, rng):
            assert read(model, parts, width, **options) == whole, (parts, options)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_without_tools_nothing_is_a_call_and_no_text_is_lost(form):
    rng, marks = random.Random(1), marks_of(form)
    pieces = [*map(Mark, marks), *TEXTS, *OBJECTS]
    for i in range(100):
        parts = [rng.choice(pieces) for _ in range(rng.randint(1, 14))]
        model = made(form, marks if i % 2 else (), None)
        events = read(model, parts, rng, tools=[])
        told = "".join(event.text for event in events)
        if not issubclass(form, Channels) and not model.silent:  # which is no text, as headers
            assert told == "".join(parts)
