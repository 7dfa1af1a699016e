"""The text of tokens as they come, in time linear in their number. Knows no mlx.

The text of tokens after a prompt is `decode(prompt + tokens)` from where it departs from
`decode(prompt)`. A part of that text is certain, and released, as soon as no later token can change
it. A detokenizer holds back the beginning of a character, and what the tokenizer's decoder or its
clean-up of spaces may still replace.
"""

import codecs
import sys
from collections.abc import Callable, Sequence
from os.path import commonprefix
from typing import Any, Protocol

UNKNOWN = "\ufffd"
"""Stands for bytes that are no character."""

CLEANED = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)
"""What the clean-up of transformers replaces, in its order."""


class Detokenizer(Protocol):
    """Makes one text of tokens."""

    def push(self, token: int) -> str:
        """Add a token; return the text that became certain."""
        ...

    def pending(self, most: int = sys.maxsize) -> str:
        """The text that :meth:`finish` would return, or at least its last `most` characters."""
        ...

    def finish(self) -> str:
        """End the text; return the rest of it."""
        ...


class Bytes:
    """Tokens are bytes, and the text is their UTF-8."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        text = self._decoder.decode(self._bytes_of(token))
        held = self._decoder.getstate()[0]
        return text + self.finish() if held and _is_surrogate(held) else text

    def pending(self, most: int = sys.maxsize) -> str:
        return self._decoder.getstate()[0].decode("utf-8", "replace")

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def _is_surrogate(held: bytes) -> bool:
    """Whether bytes that Python's decoder holds back begin a surrogate, which UTF-8 has not."""
    return len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0


class ByteRuns:
    """Tokens are characters or single bytes. A run of bytes is text if all of it is UTF-8, else
    each of its bytes is U+FFFD: only the end of a run makes its characters certain."""

    def __init__(self, piece_of: Callable[[int], str | int]) -> None:
        self._piece_of = piece_of
        self._begin()

    def _begin(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._characters: list[str] = []
        self._num_bytes = 0
        self._is_broken = False

    def push(self, token: int) -> str:
        piece = self._piece_of(token)
        if isinstance(piece, str):
            return self.finish() + piece if piece else ""
        if self._is_broken:
            return UNKNOWN
        self._num_bytes += 1
        try:
            if character := self._decoder.decode(bytes([piece])):
                self._characters.append(character)
            self._is_broken = _is_surrogate(self._decoder.getstate()[0])
        except UnicodeDecodeError:
            self._is_broken = True
        return UNKNOWN * self._num_bytes if self._is_broken else ""

    def pending(self, most: int = sys.maxsize) -> str:
        if self._is_broken or not self._num_bytes:
            return ""
        if self._decoder.getstate()[0]:
            return UNKNOWN * self._num_bytes
        return "".join(self._characters[-most:])

    def finish(self) -> str:
        if not self._num_bytes:
            return ""
        rest = self.pending()
        self._begin()
        return rest


class Decoded:
    """The text that a tokenizer's `decode` makes of the newest tokens. They follow the tokens whose
    text was released. Each token is decoded a limited number of times."""

    LONGEST = 4  # tokens of a character
    HELD = 4 * LONGEST  # tokens that wait for a character

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []
        self._new: list[int] = []

    def push(self, token: int) -> str:
        self._new.append(token)
        count = len(self._new)
        if not self._decode(self._new[-self.LONGEST :]).endswith(UNKNOWN):
            text = self._text(count)
            if not text.endswith(UNKNOWN):
                return self._release(count, text)
        return "" if count < self.HELD else self._release_unknown()

    def pending(self, most: int = sys.maxsize) -> str:
        return self._text(len(self._new)) if self._new else ""

    def finish(self) -> str:
        return self._release(len(self._new), self.pending())

    def _text(self, count: int) -> str:
        """The text of the first `count` of the new tokens."""
        known = self._decode(self._before) if self._before else ""
        whole = self._decode(self._before + self._new[:count])
        return whole[len(commonprefix((known, whole))) :]  # noqa: RUF071, of characters

    def _release_unknown(self) -> str:
        """Release bytes that are no character, up to where none can be the beginning of one."""
        most, whole = len(self._new) - self.LONGEST, self.pending()
        for count in range(most, most - self.LONGEST, -1):
            if whole.startswith(text := self._text(count)):
                return self._release(count, text)
        return self.finish()

    def _release(self, count: int, text: str) -> str:
        if text:
            self._before = self._new[:count]
        elif len(self._before) < self.HELD:  # else the next token could look like the first one
            self._before += self._new[:count]
        del self._new[:count]
        return text


class _Replaced:
    """Replaces a string in a text that comes in pieces, as :meth:`str.replace`."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new
        self.held = ""  # may be the beginning of `old`

    def push(self, piece: str) -> str:
        *before, last = (self.held + piece).split(self.old)
        sizes = range(min(len(self.old) - 1, len(last)), 0, -1)
        kept = next((size for size in sizes if last.endswith(self.old[:size])), 0)
        self.held = last[len(last) - kept :]
        return self.new.join([*before, last[: len(last) - kept]])


class Cleaned:
    """A text in which transformers cleans up spaces."""

    def __init__(self, inner: Detokenizer) -> None:
        self._inner = inner
        self._steps = [_Replaced(old, new) for old, new in CLEANED]

    def push(self, token: int) -> str:
        text = self._inner.push(token)
        for step in self._steps if text else ():
            text = step.push(text)
        return text

    def pending(self, most: int = sys.maxsize) -> str:
        text = self._inner.pending()
        for step in self._steps:
            text = (step.held + text).replace(step.old, step.new)
        return text

    def finish(self) -> str:
        text = self.pending()
        self._inner.finish()
        for step in self._steps:
            step.held = ""
        return text


class After:
    """The part of a text that comes after some of its tokens.

    Args:
        inner: makes the text of `context` and of what follows.
        context: tokens whose text is left out.
        drops_space: leave out a space at the beginning too.
    """

    def __init__(self, inner: Detokenizer, context: Sequence[int], drops_space: bool) -> None:
        self._inner = inner
        for token in context:
            inner.push(token)
        self._shown = inner.pending() if context else ""  # of the context, and not certain
        self._drops_space = drops_space

    def push(self, token: int) -> str:
        text = self._inner.push(token)
        if self._shown:
            same = len(commonprefix((self._shown, text)))  # noqa: RUF071, of characters
            self._shown = self._shown[same:] if same == len(text) else ""
            text = text[same:]
        if text and self._drops_space:
            self._drops_space = False
            return text.removeprefix(" ")
        return text

    def pending(self, most: int = sys.maxsize) -> str:
        begins = self._shown or self._drops_space
        text = self._inner.pending(sys.maxsize if begins else most)
        text = text[len(commonprefix((self._shown, text))) :]  # noqa: RUF071, of characters
        return text.removeprefix(" ") if self._drops_space else text

    def finish(self) -> str:
        rest = self.pending()
        self._inner.finish()
        self._shown, self._drops_space = "", False
        return rest


class Given:
    """The text of a streaming detokenizer in mlx-lm's form."""

    def __init__(self, detokenizer: Any, context: Sequence[int] = ()) -> None:
        self._detokenizer = detokenizer
        for token in context:
            detokenizer.add_token(token)
        if context:
            _ = detokenizer.last_segment  # reading it skips this text

    def push(self, token: int) -> str:
        self._detokenizer.add_token(token)
        return str(self._detokenizer.last_segment)

    def pending(self, most: int = sys.maxsize) -> str:
        return ""

    def finish(self) -> str:
        self._detokenizer.finalize()
        return str(self._detokenizer.last_segment)
