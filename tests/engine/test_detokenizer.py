"""The text of tokens is what the tokenizer's own `decode` says, as soon as that is certain."""

import random
import sys
from collections.abc import Callable
from contextlib import closing
from os.path import commonprefix
from types import FrameType
from typing import Any

import pytest

from mlx_paged import Engine
from mlx_paged.engine.detokenizer import UNKNOWN, Decoded
from mlx_paged.engine.spelling import detokenizer_of, spelling_of
from mlx_paged.engine.text import StopStrings, TextStream
from mlx_paged.loading import load_model
from tests.support.models.tokenizers import CORPUS, KINDS, tokenizer_of
from tests.support.random_texts import expected_text, random_cases, streamed

OF_BYTES = ("demo", "byte-level")
OF_RUNS = ("byte fallback", "byte fallback, first space kept", "byte fallback, cleaned")

ENDINGS = (b"", b"x", b"\xff", b"\x80", b"\x80\x80", b"\xbf\xbf", b"\x90\x80\x80", b"\x80\x80\x80x")
"""Bytes that may follow a text: they complete every beginning of a character, or break it."""


def ids(kind: str, content: bytes) -> list[int]:
    """The tokens of single bytes."""
    tokenizer = tokenizer_of(kind)
    if kind in OF_RUNS:
        names = [f"<0x{byte:02X}>" for byte in content]
        return [tokenizer.convert_tokens_to_ids(name) for name in names]
    spelling = spelling_of(tokenizer)
    by_bytes = {spelling.bytes_of(token): token for token in reversed(range(len(tokenizer)))}
    return [by_bytes[bytes([byte])] for byte in content]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_2000_random_texts_are_those_of_decode(kind):
    tokenizer = tokenizer_of(kind)
    for prompt, tokens in random_cases(tokenizer, kind, 2000, longest=24):
        pieces = streamed(tokenizer, prompt, tokens)
        assert "".join(pieces) == expected_text(tokenizer, prompt, tokens), (prompt, tokens)


@pytest.mark.parametrize("kind", [*OF_BYTES, *OF_RUNS])
def test_text_comes_as_soon_as_no_later_token_can_change_it(kind):
    tokenizer, rng = tokenizer_of(kind), random.Random(kind)
    endings = [ids(kind, ending) for ending in ENDINGS]
    prompt = tokenizer.encode("x", add_special_tokens=False)
    marks = [(token,) for token in map(tokenizer.convert_tokens_to_ids, ".',n") if token]
    endings += [[*mark, *prompt[-1:]] for mark in [(), *marks]]
    singles = ids(kind, bytes(range(0x80, 0x100)) + "日本🎉é".encode() * 4)
    for _ in range(40):
        pool = rng.choice([singles, prompt + singles, range(len(tokenizer))])
        tokens = [rng.choice(pool) for _ in range(8)]
        pieces, released = streamed(tokenizer, prompt, tokens), ""
        for count, piece in enumerate(pieces[:-1], 1):
            released += piece
            possible = [tokens[:count] + ending for ending in endings]
            texts = [expected_text(tokenizer, prompt, each) for each in possible]
            assert released == commonprefix(texts), tokens[:count]  # noqa: RUF071


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_is_found_with_the_token_that_completes_it(kind):
    tokenizer, rng, num_found = tokenizer_of(kind), random.Random(kind), 0
    for prompt, tokens in random_cases(tokenizer, kind, 300, longest=16):
        texts = [expected_text(tokenizer, prompt, tokens[: n + 1]) for n in range(len(tokens))]
        start = rng.randrange(len(texts[-1]) + 1)
        stop = texts[-1][start : start + rng.randrange(1, 5)]
        if not stop or UNKNOWN in stop:
            continue
        stream = TextStream(spelling_of(tokenizer).text(prompt, keeps_space=True), (stop,))
        count = next(n for n, text in enumerate(texts, 1) if stop in text)
        pieces = [stream.push(token) for token in tokens[: count - 1]]
        assert not stream.stopped, (prompt, tokens, stop)
        pieces.append(stream.push(tokens[count - 1]))
        assert stream.stopped, (prompt, tokens, stop)
        assert "".join(pieces) + stream.finish() == texts[count - 1].split(stop)[0]
        num_found += 1
    assert num_found > 50


@pytest.mark.parametrize("stop", ["    ", "  ", "# "])
def test_a_stop_string_that_ends_in_spaces_ends_its_request_at_once(stop):
    model, tokenizer = load_model()
    prompt = tokenizer.encode("a = 1\nb = 2\n" * 2 + "a = 1\n")
    with closing(Engine(model, tokenizer, num_blocks=60)) as engine:
        (free,) = engine.generate([prompt], max_tokens=30)
        texts = [expected_text(tokenizer, prompt, free.tokens[: n + 1]) for n in range(30)]
        count = next(n for n, text in enumerate(texts, 1) if stop in text)
        for most in (30, count):
            (done,) = engine.generate([prompt], max_tokens=most, stop=stop)
            assert (len(done.tokens), done.finish_reason) == (count, "stop")


@pytest.mark.parametrize("kind", [*OF_BYTES, *OF_RUNS])
def test_a_prompt_may_end_within_a_run_of_bytes_that_an_unknown_token_divides(kind):
    tokenizer, known = tokenizer_of(kind), ids(kind, b"\xff" + b"x" * 20)
    prompt, tokens = [*known, len(tokenizer) + 3, *ids(kind, b"y" * 7)], ids(kind, b"zz")
    pieces = streamed(tokenizer, prompt, tokens)
    assert "".join(pieces) == expected_text(tokenizer, prompt, tokens)


@pytest.mark.parametrize("kind", [*OF_BYTES, *OF_RUNS, "words"])
def test_a_text_may_begin_with_spaces(kind):
    tokenizer = tokenizer_of(kind)
    space = tokenizer.convert_tokens_to_ids("Ġ" if kind in OF_BYTES else "▁")
    tokens = [space, space, space, *tokenizer.encode("is x", add_special_tokens=False)]
    text = spelling_of(tokenizer).text()
    expected = tokenizer.decode(tokens)
    found = "".join([*map(text.push, tokens), text.finish()])
    assert found == (expected.removeprefix(" ") if kind in OF_BYTES else expected)


@pytest.mark.parametrize("kind", [*OF_BYTES, *OF_RUNS])
@pytest.mark.parametrize(
    "content", [b" ", b"\xff", b"\x80"], ids=["spaces", "no UTF-8", "no start"]
)
def test_each_of_many_equal_bytes_comes_at_once(kind, content):
    (token,) = ids(kind, content)
    stream = TextStream(spelling_of(tokenizer_of(kind)).text([token], keeps_space=True))
    pieces = [stream.push(token) for _ in range(200)]
    if content == b" " and kind in OF_RUNS:  # more bytes may show that they are no UTF-8
        assert not any(pieces)
    else:
        assert pieces[1:] == [content.decode("utf-8", "replace")] * 199


@pytest.mark.parametrize("content", [b"\xff", b"\xe6\x97", b" x\xff"], ids=str)
def test_a_decode_of_another_kind_sees_each_token_a_limited_number_of_times(content):
    seen = 0

    def decode(tokens: list[int]) -> str:
        nonlocal seen
        seen += len(tokens)
        return bytes(tokens).decode("utf-8", "replace")

    text, tokens = Decoded(decode), list(content) * (6000 // len(content))
    pieces = [text.push(token) for token in tokens]
    assert "".join(pieces) + text.finish() == bytes(tokens).decode("utf-8", "replace")
    assert max(map(len, pieces)) <= Decoded.HELD
    assert len("".join(pieces)) >= len(bytes(tokens).decode("utf-8", "replace")) - Decoded.HELD
    assert seen < 6 * Decoded.HELD * len(tokens)


@pytest.mark.parametrize("kind", OF_BYTES + OF_RUNS[:2])
def test_tokens_have_the_bytes_of_their_text(kind):
    tokenizer = tokenizer_of(kind)
    spelling = spelling_of(tokenizer)
    tokens = tokenizer.encode("a è🙂\n日 本", add_special_tokens=False)
    found = b"".join(map(spelling.bytes_of, tokens)).decode()
    assert found.removeprefix(" ") == tokenizer.decode(tokens) == "a è🙂\n日 本"
    assert spelling.bytes_of(ids(kind, b"\xe6")[0]) == b"\xe6"
    assert spelling.text_of(ids(kind, b"\xe6")[0]) == UNKNOWN
    assert spelling.bytes_of(len(tokenizer) + 9) == b""


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_space_of_a_text_is_dropped_as_in_mlx_lm(kind):
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer.encode("x is x", add_special_tokens=False)
    while tokenizer.decode(tokens[:1]).strip(" ") != "is" and len(tokens) > 1:
        del tokens[0]
    theirs = tokenizer.detokenizer
    for token in tokens:
        theirs.add_token(token)
    theirs.finalize()
    ours = spelling_of(tokenizer).text(tokenizer.encode("x", add_special_tokens=False))
    assert "".join([*map(ours.push, tokens), ours.finish()]) == theirs.text


@pytest.mark.parametrize("kind", ["demo", "byte-level", *OF_RUNS[:2], "words"])
def test_a_detokenizer_of_mlx_lm_makes_the_text_that_decode_says(kind):
    tokenizer = tokenizer_of(kind)
    for prompt, tokens in random_cases(tokenizer, kind, 100):
        known, added = ([t for t in each if t < len(tokenizer)] for each in (prompt, tokens))
        if kind in OF_RUNS:  # mlx-lm's table does not say which tokens are bytes
            added = tokenizer.encode(CORPUS[len(added) % len(CORPUS)], add_special_tokens=False)
        text = detokenizer_of(tokenizer.detokenizer, known)
        found = "".join([*map(text.push, added), text.finish()])
        assert found == expected_text(tokenizer, known, added)


def lines_run(call: Callable[[], Any]) -> int:
    """How many lines of Python a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("stop", ["a" * 400 + "b", "ab" * 200 + "c"], ids=["a...ab", "abab...c"])
def test_long_stop_strings_cost_no_more_per_character_than_short_ones(stop):
    def lines(stop: str, text: str) -> int:
        stops = StopStrings((stop,))
        return lines_run(lambda: [*map(stops.feed, text)])

    text = stop[:2] * 1000
    assert lines(stop, text) < 1.5 * lines(stop[-5:], text)
