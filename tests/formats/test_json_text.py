"""JSON is found where Python's parser finds it, whatever the pieces are."""

import json
import random

import pytest

from mlx_paged.formats.events import NoCall
from mlx_paged.formats.json_text import JsonScan, is_json, items, members
from mlx_paged.formats.scan import Scan
from tests.support.formats.random_calls import SCHEMAS, random_value

GOOD = ('"a\\ud83d\\ude42"', '{"a": [1, -0.5e+3, true, null, {}]}', "[]", " { } ", "-0")
GOOD += ('"\\u00e9"', "7" * 4000)
BAD = ("NaN", "Infinity", "01", "1e400", "{a: 1}", "[1,]", '{"a": 1,}', '"\\ud800"', '"\\ude42"')
BAD += ('"\\ud83dx"', '"\n"', '"\\x"', "'a'", "tru", "1.", "-", "[", '{"a"', '"', "[1 2]", "{}{}")


@pytest.mark.parametrize("text", GOOD)
def test_what_is_json(text):
    assert is_json(text)
    json.loads(text)


@pytest.mark.parametrize("text", BAD)
def test_what_is_not(text):
    assert not is_json(text)


def test_deep_values_are_refused():
    assert is_json("[" * 200 + "]" * 200) and not is_json("[" * 201 + "]" * 201)
    assert not is_json("1" * 4001)


def feed(text, pieces):
    """How far a scan reads a value that comes in pieces."""
    scan, at, seen = JsonScan(), 0, ""
    for piece in pieces:
        seen += piece
        at, is_whole = scan.feed(seen, at, seen == text)
        if is_whole:
            return at
    raise NoCall


def test_random_values_end_where_pythons_parser_ends_them():
    rng = random.Random(0)
    for _ in range(300):
        value = random_value(
            rng, rng.choice((*SCHEMAS[11:13], {"type": "string"})), ['"', "\\", "]"]
        )
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1)))
        tail = rng.choice(("", " ", ", x", "]", "</tool_call>"))
        whole, pieces, at = text + tail, [], 0
        while at < len(whole):
            size = rng.choice((1, 2, 5))
            pieces.append(whole[at : at + size])
            at += size
        assert feed(whole, pieces) == json.JSONDecoder().raw_decode(whole)[1]


def test_parts_keep_their_text():
    assert members('{ "a":  1.50, "b" : {"x":[ ]}}') == [("a", "1.50"), ("b", '{"x":[ ]}')]
    assert items('[1e3 ,{"a": "]"}, [ ]]') == ["1e3", '{"a": "]"}', "[ ]"]
    assert members("{}") == [] and items(" [ ] ") == []


def test_a_scan_waits_for_text():
    scan = Scan('{"a"')
    steps = scan.json()
    next(steps)
    scan.text += ": 1}x"
    with pytest.raises(StopIteration) as done:
        next(steps)
    assert done.value.value == '{"a": 1}' and scan.at == 8
