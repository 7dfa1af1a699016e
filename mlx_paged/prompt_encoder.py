"""Prompts to token ids. Knows no mlx."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from mlx_paged.text_stream import Detokenizer

Prompt = str | Sequence[int]


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
        """Token ids of a prompt, or of a piece of text that continues one.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, text without a tokenizer.
        """
        if not isinstance(prompt, str):
            tokens = [int(token) for token in prompt]
        elif self.tokenizer is None:
            raise ValueError("[add_request] prompt is text: expected token ids or a tokenizer")
        else:
            bos = self.tokenizer.bos_token
            special = not continues and (bos is None or not prompt.startswith(bos))
            tokens = list(self.tokenizer.encode(prompt, add_special_tokens=special))
        if not tokens:
            raise ValueError("[add_request] prompt is empty: expected at least one token")
        limit = self.vocab_size or max(tokens) + 1
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < limit:
                raise ValueError(
                    f"[add_request] prompt has token {token}: expected ids in [0, {limit})"
                )
        return tokens
