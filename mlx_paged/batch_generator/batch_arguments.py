"""What a BatchGenerator is given for each of its sequences."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from mlx_paged.batch_generator.batch_response import Caches
from mlx_paged.runner.model_probe import leaves
from mlx_paged.sampling_params import SamplingParams

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
Sampler = Callable[[mx.array], mx.array]


def row_params(
    max_tokens: Sequence[int],
    samplers: Sequence[Sampler],
    processors: Sequence[Sequence[LogitsProcessor] | None],
) -> list[SamplingParams]:
    """How each sequence chooses its tokens; greedy rows need no sampler of their own."""
    return [
        SamplingParams(
            max_tokens=most,
            sampler=None if sampler is greedy_sampler else sampler,
            logits_processors=tuple(own or ()),
        )
        for most, sampler, own in zip(max_tokens, samplers, processors, strict=True)
    ]


def boundaries(segments: Sequence[Sequence[int]]) -> set[int]:
    """Ends of segments; as in mlx-lm, the last token of a prompt is one of its own."""
    ends = set(accumulate(map(len, segments)))
    return ends | {max(ends) - 1}


def require_one_each(n: int, **arguments: Sequence[Any] | None) -> None:
    """ValueError unless every argument that is given has `n` entries."""
    for name, values in arguments.items():
        if values is not None and len(values) != n:
            raise ValueError(f"[insert] {name} has {len(values)} entries: expected {n}")


def require_tokens_of(caches: Sequence[Caches | None], all_tokens: Sequence[Sequence[int]]) -> None:
    """ValueError where caches hold something without just the tokens that they hold."""
    for i, (cache, tokens) in enumerate(zip(caches, all_tokens, strict=True)):
        layers = list(leaves(cache or []))
        if all(layer.empty() for layer in layers):
            continue
        held = max((layer.offset for layer in layers if hasattr(layer, "offset")), default=None)
        if not tokens or held not in (None, len(tokens)):
            raise ValueError(
                f"[insert] caches[{i}] holds {held or 'some'} tokens and all_tokens[{i}] has "
                f"{len(tokens)}: expected the very tokens that the caches hold, K/V of which is "
                "found in the pool or computed"
            )
