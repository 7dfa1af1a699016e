"""What tokens stand for, and the text of tokens as they come, in linear time. Knows no mlx.

The text of tokens after a prompt is `decode(prompt + tokens)` from where it departs from
`decode(prompt)`. A part of that text is certain, and released, as soon as no later token can change
it. A detokenizer holds back the beginning of a character, and what the tokenizer's decoder or its
clean-up of spaces may still replace.
"""

import codecs
import sys
from collections.abc import Callable, Sequence
from functools import cache
from os.path import commonprefix
from typing import Any, Protocol

UNKNOWN = "\ufffd"
"""Stands for bytes that are no character."""

CONTEXT = 8
"""Tokens of a prompt that the text after it may depend on, beside those of an unfinished run."""

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
        return text + self.finish() if _is_surrogate(self._decoder.getstate()[0]) else text

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


class Spelling(Protocol):
    """What the tokens of one tokenizer stand for. Any thread may use it."""

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; none if the vocabulary has no such token."""
        ...

    def text_of(self, token: int) -> str:
        """The text of a token alone, U+FFFD for bytes that are a part of a character."""
        ...

    def text(self, context: Sequence[int] = (), keeps_space: bool = False) -> Detokenizer:
        """A new text after the tokens of `context`.

        Args:
            context: tokens before the text; empty: none are known.
            keeps_space: keep a space that the text begins with.
        """
        ...


class ByteLevel:
    """Each character of a token's name stands for a byte, as in GPT-2.

    Args:
        name_of: the name of a token; None: there is no such token.
        strips: a text leaves out a space at its beginning.
        cleans: the tokenizer cleans up spaces.
    """

    def __init__(
        self, name_of: Callable[[int], str | None], strips: bool, cleans: bool = False
    ) -> None:
        self._name_of = name_of
        self._strips, self._cleans = strips, cleans

    def bytes_of(self, token: int) -> bytes:
        name, byte_of = self._name_of(token) or "", _byte_level()
        try:
            return bytes([byte_of[character] for character in name])
        except KeyError:  # of an added token
            return name.encode("utf-8", "replace")

    def text_of(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "replace")

    def text(self, context: Sequence[int] = (), keeps_space: bool = False) -> Detokenizer:
        made: Detokenizer = Bytes(self.bytes_of)
        made = Cleaned(made) if self._cleans else made
        return After(made, context[-CONTEXT:], self._strips and not keeps_space)


class ByteFallback:
    """A token's name is text in which strings are replaced, or one byte, as in SentencePiece.

    Args:
        piece_of: the text or the byte of a token.
        strips: a text leaves out a space at its beginning.
        cleans: the tokenizer cleans up spaces.
    """

    def __init__(
        self, piece_of: Callable[[int], str | int], strips: bool, cleans: bool = False
    ) -> None:
        self._piece_of = piece_of
        self._strips, self._cleans = strips, cleans

    def bytes_of(self, token: int) -> bytes:
        piece = self._piece_of(token)
        return piece.encode("utf-8", "replace") if isinstance(piece, str) else bytes([piece])

    def text_of(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "replace")

    def _ends_run(self, token: int) -> bool:
        piece = self._piece_of(token)
        return isinstance(piece, str) and bool(piece)

    def text(self, context: Sequence[int] = (), keeps_space: bool = False) -> Detokenizer:
        first = max(0, len(context) - CONTEXT)
        while first and not self._ends_run(context[first]):
            first -= 1
        made: Detokenizer = ByteRuns(self._piece_of)
        made = Cleaned(made) if self._cleans else made
        return After(made, context[first:], self._strips and not keeps_space)


class ByDecode:
    """Only the tokenizer's `decode` knows what its tokens stand for."""

    def __init__(self, decode: Callable[[list[int]], str], cleans: bool = False) -> None:
        self._decode = decode
        self._cleans = cleans

    def bytes_of(self, token: int) -> bytes:
        return self.text_of(token).encode("utf-8", "replace")

    def text_of(self, token: int) -> str:
        return self._decode([token])

    def text(self, context: Sequence[int] = (), keeps_space: bool = False) -> Detokenizer:
        # Without a context the tokenizer itself decides on a space at the beginning.
        made: Detokenizer = Decoded(self._decode)
        made = Cleaned(made) if self._cleans else made
        return After(made, context[-CONTEXT:] if keeps_space else (), drops_space=False)


class OfGiven:
    """The tokenizer brings a detokenizer of its own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes:
        return self.text_of(token).encode("utf-8", "replace")

    def text_of(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def text(self, context: Sequence[int] = (), keeps_space: bool = False) -> Detokenizer:
        return Given(self._tokenizer.detokenizer, context[-CONTEXT:] if keeps_space else ())


@cache
def _byte_level() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable ones of Latin-1
    for themselves, those from U+0100 on for the other bytes in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return found | {chr(256 + i): byte for i, byte in enumerate(others)}
