"""Which token ids a model takes and chooses. Knows no mlx."""

from collections.abc import Iterable, Sequence
from typing import Any

from mlx_paged.sampling_params import SamplingParams, check_biases


class TokenIds:
    """Checks token ids that come from outside, before they index the embedding or the logits.

    Every prompt and all options of every request pass here.

    Args:
        rows: of the embedding, which ids of prompts index; None: unknown.
        columns: of the logits, which all other ids index; None: unknown.
        tokenizer: may have end-of-sequence tokens beyond the columns. These never come, and are
            left out where others are refused.
    """

    def __init__(self, rows: int | None, columns: int | None, tokenizer: Any = None) -> None:
        self.rows = rows
        self.columns = columns
        self._tokenizer = tokenizer

    def check_prompt(self, caller: str, tokens: Sequence[int]) -> None:
        """Raise ValueError if a token of a prompt has no row. There is at least one token."""
        limit = max(tokens) + 1 if self.rows is None else self.rows
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < limit:
                raise ValueError(
                    f"[{caller}] prompt has token {token}: expected ids in [0, {limit})"
                )

    def check_params(self, params: SamplingParams) -> None:
        """Raise ValueError, which names the field, if a token of an option has no column."""
        if self.columns is None:
            return
        check_biases(params, self.columns)
        ends = () if self._tokenizer is None else self._tokenizer.eos_token_ids
        for name in ("stop_token_ids", "xtc_special_tokens"):
            largest = max(getattr(params, name).difference(ends), default=0)
            if largest >= self.columns:
                raise ValueError(
                    f"[SamplingParams] {name} names token {largest}: expected token ids below "
                    f"{self.columns}"
                )

    def with_columns(self, ids: Iterable[int]) -> list[int]:
        """The ids that have a column of the logits, sorted."""
        columns = self.columns
        return sorted(i for i in ids if i >= 0 and (columns is None or i < columns))

    @property
    def num_usable(self) -> int | None:
        """Ids below it can be chosen and then read by the model; None: unknown."""
        known = [size for size in (self.rows, self.columns) if size is not None]
        return min(known, default=None)
