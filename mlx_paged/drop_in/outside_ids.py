"""Token ids that callers of mlx-lm give, checked before they index memory."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step as stock_generate_step
from mlx_lm.generate import speculative_generate_step as stock_speculative_generate_step
from mlx_lm.sample_utils import make_logits_processors as stock_make_logits_processors

Processor = Callable[[mx.array, mx.array], mx.array]


def check_segments(model: nn.Module, segments: Any) -> None:
    """Raise ValueError if a token of these lists of token ids, at any depth, has no row in the
    embedding of the model."""
    _check(model, _leaves(segments))


def generate_step(prompt: mx.array, model: nn.Module, *args: Any, **options: Any) -> Any:
    """mlx-lm's function. Raises ValueError if a token of the prompt has no row in the embedding."""
    _check_array(model, prompt)
    return stock_generate_step(prompt, model, *args, **options)


def speculative_generate_step(
    prompt: mx.array, model: nn.Module, draft_model: nn.Module, *args: Any, **options: Any
) -> Any:
    """mlx-lm's function. Raises ValueError if a token of the prompt has no row in the embedding of
    the model or of the draft model."""
    _check_array(model, prompt)
    _check_array(draft_model, prompt)
    return stock_speculative_generate_step(prompt, model, draft_model, *args, **options)


def make_logits_processors(
    logit_bias: Mapping[int, float] | None = None, *args: Any, **options: Any
) -> list[Processor]:
    """mlx-lm's function. A bias of a token that the logits do not have is left out, because the
    model cannot choose this token."""
    made: list[Processor] = stock_make_logits_processors(None, *args, **options)
    return [_biasing(logit_bias), *made] if logit_bias else made


def _biasing(logit_bias: Mapping[int, float]) -> Processor:
    """mlx-lm's processor for the biases of tokens that the logits have."""
    processors: dict[int, list[Processor]] = {}  # by the number of columns

    def bias(tokens: mx.array, logits: mx.array) -> mx.array:
        columns = logits.shape[-1]
        if columns not in processors:
            known = {int(i): value for i, value in logit_bias.items() if 0 <= int(i) < columns}
            processors[columns] = stock_make_logits_processors(known)
        for processor in processors[columns]:
            logits = processor(tokens, logits)
        return logits

    return bias


def _check_array(model: nn.Module, prompt: Any) -> None:
    if isinstance(prompt, mx.array) and prompt.size:
        flat: list[int] = prompt.flatten().tolist()  # type: ignore[assignment]
        _check(model, [min(flat), max(flat)])


def _check(model: nn.Module, tokens: Any) -> None:
    rows = _rows(model)
    for token in tokens:
        if rows is not None and not 0 <= token < rows:
            raise ValueError(f"[mlx-lm] prompt has token {token}: expected ids in [0, {rows})")


def _rows(model: nn.Module) -> int | None:
    """Rows of the largest embedding of a model; None if the model has none."""
    kinds = nn.Embedding | nn.QuantizedEmbedding
    found = [each["weight"].shape[0] for each in model.modules() if isinstance(each, kinds)]
    return max(found, default=None)


def _leaves(value: Any) -> Iterator[int]:
    if isinstance(value, mx.array):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        yield int(value)
        return
    if value and all(type(each) is int for each in value):
        yield from (min(value), max(value))
        return
    for each in value:
        yield from _leaves(each)
