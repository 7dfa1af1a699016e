"""What tokens stand for: the bytes and the text of each, and how they make a text. Knows no mlx."""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from mlx_paged.engine.detokenizer import (
    After,
    ByteRuns,
    Bytes,
    Cleaned,
    Decoded,
    Detokenizer,
    Given,
)

CONTEXT = 8
"""Tokens of a prompt that the text after it may depend on, beside those of an unfinished run."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token that stands for one byte, in a vocabulary of SentencePiece."""


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


class _ByteLevel:
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
        self._kept_bytes_of = cache(self.bytes_of)  # a text asks again for each token

    def bytes_of(self, token: int) -> bytes:
        name, byte_of = self._name_of(token) or "", _byte_level()
        try:
            return bytes([byte_of[character] for character in name])
        except KeyError:  # of an added token
            return name.encode("utf-8", "replace")

    def text_of(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "replace")

    def text(self, context: Sequence[int] = (), keeps_space: bool = False) -> Detokenizer:
        made: Detokenizer = Bytes(self._kept_bytes_of)
        made = Cleaned(made) if self._cleans else made
        return After(made, context[-CONTEXT:], self._strips and not keeps_space)


class _ByteFallback:
    """A token's name is text in which strings are replaced, or one byte, as in SentencePiece.

    Args:
        piece_of: the text or the byte of a token.
        strips: a text leaves out a space at its beginning.
        cleans: the tokenizer cleans up spaces.
    """

    def __init__(
        self, piece_of: Callable[[int], str | int], strips: bool, cleans: bool = False
    ) -> None:
        self._piece_of = cache(piece_of)  # a text asks again for each token
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


class _ByDecode:
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


class _OfGiven:
    """The tokenizer brings a detokenizer of its own."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes:
        return self.text_of(token).encode("utf-8", "replace")

    def text_of(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def text(self, context: Sequence[int] = (), keeps_space: bool = False) -> Detokenizer:
        return Given(self._tokenizer.detokenizer, context[-CONTEXT:] if keeps_space else ())


_SPELLINGS: "WeakKeyDictionary[Any, Spelling]" = WeakKeyDictionary()


def spelling_of(tokenizer: Any) -> Spelling:
    """The spelling of a tokenizer: mlx-lm's wrapper of one of transformers, or any object with a
    streaming `detokenizer` in mlx-lm's form."""
    detokenizer = getattr(tokenizer, "detokenizer", None)
    if not _is_mlx_lms(detokenizer):
        return _OfGiven(tokenizer)
    if tokenizer not in _SPELLINGS:
        _SPELLINGS[tokenizer] = _made(tokenizer._tokenizer, detokenizer)
    return _SPELLINGS[tokenizer]


def detokenizer_of(detokenizer: Any, context: Sequence[int] = ()) -> Detokenizer:
    """A text after the tokens of `context`, as `detokenizer` makes it: a text of this package, or a
    streaming detokenizer in mlx-lm's form. For those of mlx-lm itself this package has its own."""
    if hasattr(detokenizer, "push"):
        own: Detokenizer = detokenizer
        return own
    if not _is_mlx_lms(detokenizer):
        return Given(detokenizer, context)
    names = getattr(detokenizer, "tokenmap", None)
    if names is None:
        spelling: Spelling = _ByDecode(detokenizer._tokenizer.decode)
    elif hasattr(detokenizer, "trim_space"):  # of SentencePiece
        spelling = _ByteFallback(
            lambda token: _piece(names[token]) if token < len(names) else "", detokenizer.trim_space
        )
    else:
        spelling = _ByteLevel(lambda token: names[token] if token < len(names) else None, True)
    return spelling.text(context, keeps_space=bool(context))


def _made(tokenizer: Any, detokenizer: Any) -> Spelling:
    """The spelling of a tokenizer of transformers, whose texts begin as those of mlx-lm's
    `detokenizer` do."""
    cleans = _cleans(tokenizer)
    steps = _decoder_steps(tokenizer.backend_tokenizer) if _is_plain(tokenizer) else []
    if [step["type"] for step in steps] == ["ByteLevel"]:
        strips = hasattr(detokenizer, "tokenmap")
        return _ByteLevel(tokenizer.convert_ids_to_tokens, strips, cleans)
    if (found := _byte_fallback(tokenizer, steps, cleans)) is not None:
        return found
    options = {"clean_up_tokenization_spaces": False} if cleans else {}
    return _ByDecode(lambda tokens: str(tokenizer.decode(tokens, **options)), cleans)


def _is_mlx_lms(detokenizer: object) -> bool:
    return type(detokenizer).__module__ == "mlx_lm.tokenizer_utils"


def _is_plain(tokenizer: Any) -> bool:
    """Whether `decode` is that of transformers for every tokenizer of Rust."""
    base = "transformers.tokenization_utils"
    owners = (
        next((kind.__module__ for kind in type(tokenizer).__mro__ if name in vars(kind)), "")
        for name in ("decode", "_decode", "convert_ids_to_tokens")
    )
    return hasattr(tokenizer, "backend_tokenizer") and all(x.startswith(base) for x in owners)


def _decoder_steps(backend: Any) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder; none if it has no decoder, or one that is not known."""
    decoder: dict[str, Any] = {"type": "none"}
    with suppress(Exception):  # a decoder in Python has no JSON
        decoder = json.loads(backend.decoder.__getstate__())
    steps = [decoder]
    while any(step["type"] == "Sequence" for step in steps):
        nested = [step.get("decoders", [step]) for step in steps]
        steps = [step for each in nested for step in each]
    return steps


def _byte_fallback(
    tokenizer: Any, steps: list[dict[str, Any]], cleans: bool
) -> _ByteFallback | None:
    """The spelling of a decoder that replaces strings, reads bytes, joins, and perhaps leaves out
    a space at the beginning; None if the steps are others."""
    replaced = [step for step in steps if step["type"] == "Replace"]
    rest = steps[len(replaced) :]
    last = rest[2:] or [{"type": "Strip", "content": " ", "start": 0, "stop": 0}]
    strips = last[-1].get("start")
    expected = {"type": "Strip", "content": " ", "start": strips, "stop": 0}
    kinds = [step["type"] for step in rest[:2]]
    strings = [(step["pattern"].get("String"), step["content"]) for step in replaced]
    is_known = kinds == ["ByteFallback", "Fuse"] and last == [expected] and strips in (0, 1)
    if not is_known or any(old is None for old, _ in strings):
        return None

    def piece_of(token: int) -> str | int:
        name = tokenizer.convert_ids_to_tokens(token) or ""
        for old, new in strings:
            name = name.replace(old, new)
        found = BYTE_TOKEN.fullmatch(name)
        return int(found[1], 16) if found else str(name)

    return _ByteFallback(piece_of, bool(strips), cleans)


def _piece(name: bytes) -> str | int:
    """What an entry of mlx-lm's table stands for. A printable character may be a token of one byte;
    it is taken as text."""
    is_byte = len(name) == 1 and not 0x20 <= name[0] < 0x7F
    return name[0] if is_byte else name.replace("\u2581".encode(), b" ").decode("utf-8", "replace")


def _cleans(tokenizer: Any) -> bool:
    """Whether `decode` cleans up spaces. A BPE tokenizer loses spaces by that: most versions of
    transformers refuse, and so does this package."""
    model = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    refuses = model == "BPE" and not getattr(tokenizer, forced, False)
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)) and not refuses


@cache
def _byte_level() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable ones of Latin-1
    for themselves, those from U+0100 on for the other bytes in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return found | {chr(256 + i): byte for i, byte in enumerate(others)}
