"""Sequences in the pool as mlx-lm's own caches."""

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
    """mlx-lm's caches for the model, holding exactly `tokens`, evaluated.

    What the pool has of them is copied out; what it has not (the newest token, or all of them once
    the blocks were given away) is computed.

    Args:
        request: whose tokens begin with `tokens`.
        chunk: tokens computed at once at most.
    """
    caches: list[Any] = make_prompt_cache(runner.model)
    start = _num_available(runner, request, len(tokens))
    if start:
        _copy(runner, request, start, caches)
    for first in range(start, len(tokens), chunk):
        runner.model(mx.array([tokens[first : first + chunk]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    mx.eval([cache.state for cache in caches])
    return caches


def _num_available(runner: ModelRunner, request: Request, num_tokens: int) -> int:
    """Leading tokens that need not be computed."""
    if _is_recurrent(runner) and request.num_computed > num_tokens:
        return 0  # a state cannot go back
    return min(request.num_computed, num_tokens)


def _is_recurrent(runner: ModelRunner) -> bool:
    return any(type(cache) is ArraysCache for cache in leaves(runner.caches))


def _copy(runner: ModelRunner, request: Request, num_tokens: int, caches: list[Any]) -> None:
    """Put the first `num_tokens` of a request, or its states, into new caches."""
    allocator = runner.manager.allocator
    num_blocks = allocator.blocks_needed(num_tokens)
    block_ids = as_int32(allocator.table(request.id)[:num_blocks])
    runner.states.load([request.id])
    for source, target in zip(leaves(runner.caches), leaves(caches), strict=True):
        if isinstance(source, PagedLayerCache):
            target.update_and_fetch(*source.contiguous(block_ids, num_tokens))
        else:
            target.cache = list(source.cache)
