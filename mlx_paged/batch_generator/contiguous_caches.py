"""Makes mlx-lm's own caches of sequences in the pool."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from mlx_paged.kv.pool import as_int32
from mlx_paged.request import Request
from mlx_paged.runner.layer_cache import PagedLayerCache
from mlx_paged.runner.model_probe import leaves
from mlx_paged.runner.model_runner import ModelRunner


def contiguous_caches(
    runner: ModelRunner, request: Request, tokens: Sequence[int], chunk: int
) -> list[Any]:
    """mlx-lm's caches of exactly `tokens`, evaluated.

    K/V in the pool is copied. The model computes the rest: the newest token, or all tokens if the
    request has no blocks any more.

    Args:
        request: its tokens start with `tokens`.
        chunk: the largest number of tokens in one forward pass.
    """
    caches: list[Any] = make_prompt_cache(runner.model)
    start = min(request.num_computed, len(tokens))
    is_recurrent = any(type(cache) is ArraysCache for cache in leaves(runner.caches))
    if is_recurrent and request.num_computed > len(tokens):
        start = 0  # a recurrent state cannot go back
    if start:
        _copy(runner, request, start, caches)
    for first in range(start, len(tokens), chunk):
        runner.model(mx.array([tokens[first : first + chunk]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    mx.eval([cache.state for cache in caches])
    return caches


def _copy(runner: ModelRunner, request: Request, num_tokens: int, caches: list[Any]) -> None:
    """Copy the K/V of the first `num_tokens` of a request, or its states, into new caches."""
    allocator = runner.manager.allocator
    num_blocks = allocator.blocks_needed(num_tokens)
    block_ids = as_int32(allocator.table(request.id)[:num_blocks])
    runner.states.load([request.id])
    for source, target in zip(leaves(runner.caches), leaves(caches), strict=True):
        if isinstance(source, PagedLayerCache):
            target.update_and_fetch(*source.contiguous(block_ids, num_tokens))
        else:
            target.cache = list(source.cache)
