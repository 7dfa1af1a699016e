"""A streamed answer is the whole one, in every format, whatever the model writes."""

import json
import random
import sys

import pytest

from mlx_paged.formats import scan
from mlx_paged.formats.channels import Channels
from mlx_paged.formats.events import Call
from mlx_paged.formats.function_gemma import FunctionGemma
from mlx_paged.formats.gemma4 import Gemma4
from mlx_paged.formats.glm import Glm
from mlx_paged.formats.harmony import Harmony
from mlx_paged.formats.lfm2 import Lfm2
from mlx_paged.formats.llama4 import Llama4
from mlx_paged.formats.minicpm5 import MiniCpm5
from mlx_paged.formats.minimax_m2 import MiniMaxM2
from mlx_paged.formats.olmo3 import Olmo3
from mlx_paged.formats.parser import Begin
from mlx_paged.formats.registry import FORMATS
from tests.support.formats.harness import TOOLS, Mark, made, read

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


def calls_of_functions(form, text):
    """How many functions of Python run while an answer is read, 4 characters at a time."""
    count = 0

    def count_calls(frame, event, arg):
        nonlocal count
        count += event == "call"

    model = made(form, ())
    sys.setprofile(count_calls)
    try:
        read(model, [text], 4)
    finally:
        sys.setprofile(None)
    return count


REPEATED = [
    (MiniCpm5, '<function name="f"></function>', "so"),
    (MiniCpm5, '<function name="f"><param name="x">  a </param></function>', ""),
    (MiniMaxM2, '<minimax:tool_call><invoke name="g"></invoke></minimax:tool_call>', "so"),
    (Glm, "<tool_call>f\n</tool_call>", "so"),
    (Olmo3, "<function_calls>g()</function_calls>", ""),
    (Lfm2, "<|tool_call_start|>[f(x='<|tool_call_end|>')]<|tool_call_end|>", ""),
    (Llama4, '[f(x="1", n=2), g()]', ""),
    (Gemma4, 'call:f{x:<|"|>a<|"|>}<tool_call|>', ""),
]


@pytest.mark.parametrize(("form", "part", "end"), REPEATED)
def test_an_answer_takes_work_in_proportion_to_its_length(form, part, end, monkeypatch):
    monkeypatch.setattr(scan, "MAX_STATES", 4000)
    few, many = (calls_of_functions(form, part * count + end) for count in (200, 800))
    assert many < 6 * few


def test_calls_in_a_row_are_read_in_one_search():
    part = '<function name="f"><param name="x">  a </param></function>'
    events = read(made(MiniCpm5, ()), [part * 3000], 10_000)
    assert events == [Call("f", '{"x": "  a "}')] * 3000


INLINE = [form for form in FORMATS if not issubclass(form, Channels)]


@pytest.mark.parametrize("form", INLINE, ids=lambda form: form.name)
def test_white_space_is_looked_at_once(form):
    """What may still be white space beside a call waits apart from what is searched for marks."""
    parser = made(form, ()).parser(TOOLS, Begin.START)
    for _ in range(500):
        assert parser.feed(None, "  \n ") == []
    assert len(parser._rest) < 20
    told = parser.feed(None, "so.") + parser.finish(False)
    assert "".join(event.text for event in told).endswith(" so.")


def test_a_header_that_never_ends_is_told():
    parser = made(Harmony, ()).parser(TOOLS, Begin.START)
    told = [event for _ in range(100) for event in parser.feed(None, "<|channel|>final ")]
    assert sum(len(event.text) for event in told) > 1000


def test_what_is_told_has_no_code_of_a_token():
    parts = ["call:f{x:{", '"', Mark(FunctionGemma.tokens[2]), '": 1}}']
    marks = FunctionGemma.tokens
    events = read(made(FunctionGemma, marks), [Mark(marks[0]), *parts, Mark(marks[1])], 4)
    for event in events:
        (event.arguments if isinstance(event, Call) else event.text).encode()
