"""Prompts to token ids. Knows no mlx."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from operator import index
from typing import Any, Protocol

from mlx_paged.engine.text_stream import Detokenizer

Prompt = str | Sequence[int]

_NO_SEQUENCES = (bytes, bytearray, memoryview, Set, Mapping)
"""What can be iterated over but does not hold token ids in an order."""


class Tokenizer(Protocol):
    """What is used of mlx-lm's TokenizerWrapper."""

    @property
    def bos_token(self) -> str | None: ...
    @property
    def eos_token_ids(self) -> Collection[int]: ...
    @property
    def detokenizer(self) -> Detokenizer: ...
    def encode(self, text: str, **options: Any) -> Sequence[int]: ...


class PromptEncoder:
    """Encodes and checks what callers give as prompts.

    Args:
        tokenizer: None: prompts are token ids.
        vocab_size: token ids are below it; None: unknown.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int | None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size

    def __call__(self, prompt: Prompt, continues: bool = False) -> list[int]:
        """Token ids of a prompt, or of what continues one, which may be empty.

        Raises:
            ValueError: an empty prompt, something else than text or token ids, a token outside the
                vocabulary, text without a tokenizer.
        """
        if not isinstance(prompt, str):
            tokens = _token_ids(prompt)
        elif continues and not prompt:
            tokens = []
        elif self.tokenizer is None:
            raise ValueError("[add_request] prompt is text: expected token ids or a tokenizer")
        else:
            bos = self.tokenizer.bos_token
            special = not continues and (bos is None or not prompt.startswith(bos))
            tokens = list(self.tokenizer.encode(prompt, add_special_tokens=special))
        if not tokens and continues:
            return tokens
        if not tokens:
            raise ValueError("[add_request] prompt is empty: expected at least one token")
        limit = self.vocab_size or max(tokens) + 1
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < limit:
                raise ValueError(
                    f"[add_request] prompt has token {token}: expected ids in [0, {limit})"
                )
        return tokens


def _token_ids(prompt: object) -> list[int]:
    """The integers of a sequence, a NumPy array or an mx.array."""
    if hasattr(prompt, "tolist") and not isinstance(prompt, memoryview):
        prompt = prompt.tolist()
    if not isinstance(prompt, Iterable) or isinstance(prompt, _NO_SEQUENCES):
        raise ValueError(
            f"[add_request] prompt is of type {type(prompt).__name__}: "
            "expected text or a sequence of token ids"
        )
    tokens = list(prompt)
    are_plain = set(map(type, tokens)) <= {int}
    return tokens if are_plain else [_token_id(token) for token in tokens]


def _token_id(token: Any) -> int:
    try:
        number = token.item() if hasattr(token, "item") else token  # of an array
        if not isinstance(number, bool):
            return index(number)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"[add_request] prompt has token {token!r:.80}: expected integers")
