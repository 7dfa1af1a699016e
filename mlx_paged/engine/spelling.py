"""Which spelling a tokenizer has: found by what the tokenizer says of its decoder. Knows no mlx."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from mlx_paged.engine.detokenizer import (
    ByDecode,
    ByteFallback,
    ByteLevel,
    Detokenizer,
    Given,
    OfGiven,
    Spelling,
)

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token that stands for one byte, in a vocabulary of SentencePiece."""

_SPELLINGS: "WeakKeyDictionary[Any, Spelling]" = WeakKeyDictionary()


def spelling_of(tokenizer: Any) -> Spelling:
    """The spelling of a tokenizer: mlx-lm's wrapper of one of transformers, or any object with a
    streaming `detokenizer` in mlx-lm's form."""
    detokenizer = getattr(tokenizer, "detokenizer", None)
    if not _is_mlx_lms(detokenizer):
        return OfGiven(tokenizer)
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
        spelling: Spelling = ByDecode(detokenizer._tokenizer.decode)
    elif hasattr(detokenizer, "trim_space"):  # of SentencePiece
        spelling = ByteFallback(
            lambda token: _piece(names[token]) if token < len(names) else "",
            detokenizer.trim_space,
        )
    else:
        spelling = ByteLevel(lambda token: names[token] if token < len(names) else None, True)
    return spelling.text(context, keeps_space=bool(context))


def _made(tokenizer: Any, detokenizer: Any) -> Spelling:
    """The spelling of a tokenizer of transformers, whose texts begin as those of mlx-lm's
    `detokenizer` do."""
    cleans = _cleans(tokenizer)
    steps = _decoder_steps(tokenizer.backend_tokenizer) if _is_plain(tokenizer) else []
    if [step["type"] for step in steps] == ["ByteLevel"]:
        strips = hasattr(detokenizer, "tokenmap")
        return ByteLevel(tokenizer.convert_ids_to_tokens, strips, cleans)
    if (found := _byte_fallback(tokenizer, steps, cleans)) is not None:
        return found
    options = {"clean_up_tokenization_spaces": False} if cleans else {}
    return ByDecode(lambda tokens: str(tokenizer.decode(tokens, **options)), cleans)


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
) -> ByteFallback | None:
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

    return ByteFallback(piece_of, bool(strips), cleans)


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
