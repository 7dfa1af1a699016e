"""Text as it comes: complete characters, and nothing from the beginning of a stop string on."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlx_paged.cli import demo_model_path
from mlx_paged.engine.text import TextStream

# Two letters and short stop strings: beginnings of one stop string end in beginnings of others.
PIECES = st.lists(st.text("ab", max_size=5), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)

MULTI_BYTE_TEXTS = {
    "two bytes": "naïve café, Ωμέγα",
    "three bytes": "if x ≠ 0: # 日本語\n",
    "four bytes": "print('🎉🦊')",
    "joined emoji": "👩‍👩‍👧 family",
    "combining accents": "e\u0301 o\u0308",
}


class Pieces:
    """A detokenizer whose token i is the i-th piece; the last `lag` characters wait for the end."""

    def __init__(self, pieces: Sequence[str], lag: int = 0) -> None:
        self.pieces = pieces
        self.lag = lag
        self.pending = ""

    def add_token(self, token: int) -> None:
        self.pending += self.pieces[token]

    def finalize(self) -> None:
        self.lag = 0

    @property
    def last_segment(self) -> str:
        ready = max(0, len(self.pending) - self.lag)
        segment, self.pending = self.pending[:ready], self.pending[ready:]
        return segment


def until_stop(text: str, stops: Sequence[str]) -> str:
    """`text` read letter by letter until a stop string is complete, without that string."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - len(max(complete, key=len))]
    return text


def stream_all(stream: TextStream, tokens: Sequence[int]) -> list[str]:
    """What a reader sees, segment by segment, when the engine ends the request at a stop string."""
    segments = []
    for token in tokens:
        segments.append(stream.push(token))
        if stream.stopped:
            break
    return [*segments, stream.finish()]


@pytest.mark.slow
@given(pieces=PIECES, stops=STOPS, lag=st.integers(0, 3))
@settings(max_examples=500, deadline=None)
def test_the_text_ends_before_the_first_complete_stop_string_however_it_is_cut(pieces, stops, lag):
    expected = until_stop("".join(pieces), stops)
    stream = TextStream(Pieces(pieces, lag), stops)
    segments = stream_all(stream, range(len(pieces)))
    assert "".join(segments) == stream.text == expected
    assert stream.stopped == (expected != "".join(pieces))


@pytest.mark.slow
@given(pieces=PIECES, stop=st.text("ab", min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_a_single_stop_string_splits_the_text(pieces, stop):
    stream = TextStream(Pieces(pieces), (stop,))
    assert "".join(stream_all(stream, range(len(pieces)))) == "".join(pieces).split(stop)[0]


@pytest.mark.slow
@given(pieces=PIECES, stops=STOPS)
@settings(max_examples=300, deadline=None)
def test_no_more_is_held_back_than_the_beginning_of_a_stop_string(pieces, stops):
    stream = TextStream(Pieces(pieces), stops)
    emitted = pushed = ""
    for token, piece in enumerate(pieces):
        emitted += stream.push(token)
        pushed += piece
        if stream.stopped:
            break
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        held = max((len(b) for b in beginnings if pushed.endswith(b)), default=0)
        assert emitted == pushed[: len(pushed) - held]


@pytest.mark.parametrize(
    ("pieces", "stop", "segments"),
    [
        (["say ", "sto", "p now"], "stop", ["say ", "", "", ""]),
        (["s", "t", "o", "p"], "stop", ["", "", "", "", ""]),
        (["say stop now"], "stop", ["say ", ""]),
        (["sto", "re"], "stop", ["", "store", ""]),
        (["sto"], "stop", ["", "sto"]),
        (["s", "s", "top"], "stop", ["", "s", "", ""]),
        (["one\n", "\ntwo"], "\n\n", ["one", "", ""]),
    ],
    ids=[
        "over two tokens",
        "a letter a token",
        "inside one token",
        "only its beginning",
        "only its beginning, at the end",
        "a false start",
        "two newlines",
    ],
)
def test_segments_around_a_stop_string(pieces, stop, segments):
    assert stream_all(TextStream(Pieces(pieces), (stop,)), range(len(pieces))) == segments


def test_nothing_comes_out_after_a_stop_string():
    stream = TextStream(Pieces(["a.", "more", " and more"], lag=2), (".",))
    for token in range(3):
        stream.push(token)
    stream.finish()
    assert stream.text == "a" and stream.stopped


def test_a_stop_string_that_the_detokenizer_held_back_still_counts():
    stream = TextStream(Pieces(["value ", "END"], lag=3), ("END",))
    assert stream_all(stream, range(2)) == ["val", "ue ", ""]
    assert stream.stopped


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerWrapper:
    return load_tokenizer(demo_model_path())


@pytest.mark.parametrize("text", MULTI_BYTE_TEXTS.values(), ids=MULTI_BYTE_TEXTS)
def test_a_character_split_over_tokens_comes_out_whole(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert any("\ufffd" in tokenizer.decode([token]) for token in tokens)
    segments = stream_all(TextStream(tokenizer.detokenizer), tokens)
    assert "".join(segments) == text
    assert all("\ufffd" not in segment for segment in segments)


def test_a_stop_string_may_itself_have_multi_byte_characters(tokenizer):
    stream = TextStream(tokenizer.detokenizer, ("🦊!",))
    tokens = tokenizer.encode("wait 🎉🦊🦊! done")
    assert "".join(stream_all(stream, tokens)) == "wait 🎉🦊" and stream.stopped


TOKENS = st.lists(st.integers(1, 1000), min_size=1, max_size=30)


NUL = 188
"""The token of byte 0, of which mlx-lm's detokenizer makes the name of the token."""


def decoded(tokenizer: TokenizerWrapper, tokens: Sequence[int]) -> str:
    """The text of tokens by the tokenizer's `decode`, without a space at its beginning."""
    return str(tokenizer.decode(tokens)).removeprefix(" ")


@given(tokens=TOKENS)
@example(tokens=[NUL, 300, NUL])
@settings(max_examples=200, deadline=None)
def test_the_text_of_any_tokens_is_the_tokenizers_own(tokenizer, tokens):
    stream = TextStream(tokenizer.detokenizer)
    assert "".join(stream_all(stream, tokens)) == stream.text == decoded(tokenizer, tokens)


@given(tokens=TOKENS, data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_part_of_the_text_can_be_the_stop_string(tokenizer, tokens, data):
    text = decoded(tokenizer, tokens)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 8))] or "x"
    stream = TextStream(tokenizer.detokenizer, (stop,))
    assert "".join(stream_all(stream, tokens)) == text.split(stop)[0]


def test_streams_of_one_tokenizer_do_not_mix(tokenizer):
    texts = ["class Fox:", "日本語"]
    streams = [TextStream(tokenizer.detokenizer) for _ in texts]
    tokens = [tokenizer.encode(text) for text in texts]
    for i in range(max(map(len, tokens))):
        for stream, ids in zip(streams, tokens, strict=True):
            if i < len(ids):
                stream.push(ids[i])
    for stream, text in zip(streams, texts, strict=True):
        stream.finish()
        assert stream.text == text


def test_text_goes_on_where_that_of_its_context_ended():
    """As for a fork, whose parent has said the beginning: a SentencePiece-like detokenizer drops
    the space before the very first word, and only there."""

    class Words:
        def __init__(self) -> None:
            self.words: list[str] = []
            self._read = 0

        def add_token(self, token: int) -> None:
            self.words.append(f" word{token}")

        def finalize(self) -> None: ...

        @property
        def last_segment(self) -> str:
            text = "".join(self.words).removeprefix(" ")
            segment, self._read = text[self._read :], len(text)
            return segment

    child = TextStream(Words(), context=[1, 2])
    assert child.push(3) == " word3"
    assert child.push(4) == " word4"
    assert child.text == " word3 word4"
    assert TextStream(Words()).push(3) == "word3"
