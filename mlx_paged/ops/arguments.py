"""Checks of the arguments that both attention ops have: numbers, and the layer of the caches."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_paged.arguments import MAX_INT32, integer

Cache = mx.array | Sequence[mx.array]


def checked(
    op: str,
    q: mx.array,
    layer_idx: int,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    **caches: Cache | None,
) -> tuple[mx.array, mx.array, dict[str, mx.array], dict[str, Any]]:
    """One layer of the keys, of the values and of the scales that are given, without a copy, and
    the numbers."""
    layers = _layers(op, layer_idx, caches)
    numbers = _numbers(op, q, scale, window, softcap)
    return layers.pop("k_cache"), layers.pop("v_cache"), layers, numbers


def _numbers(
    op: str, q: mx.array, scale: float | None, window: int | None, softcap: float | None
) -> dict[str, Any]:
    if window is not None:
        window = integer(op, "window", window, 1, MAX_INT32)
    for name, value in (("scale", scale), ("softcap", softcap)):
        if isinstance(value, bool):
            raise ValueError(f"[{op}] {name} is {value}: expected a number")
    if scale is None:
        scale = max((1, *q.shape[-1:])) ** -0.5
    return {"scale": scale, "window": window, "softcap": softcap}


def _layers(op: str, layer_idx: int, caches: dict[str, Cache | None]) -> dict[str, mx.array]:
    given = {name: cache for name, cache in caches.items() if cache is not None}
    n_layers = len(given["k_cache"])
    for name, cache in given.items():
        if isinstance(cache, mx.array) and cache.ndim != 5:
            raise ValueError(
                f"[{op}] {name} has shape {cache.shape}: expected (n_layers, n_kv_heads,"
                " n_blocks, block_size, head_dim), or a list of arrays without the first axis"
            )
    for name, cache in given.items():
        if len(cache) != n_layers or (n_layers == 0 and name != "k_cache"):
            raise ValueError(
                f"[{op}] {name} has {len(cache)} layers and k_cache {n_layers}:"
                " expected the same number, at least 1"
            )
    layer = layer_idx
    if type(layer) is not int or not 0 <= layer < n_layers:
        layer = integer(op, "layer_idx", layer_idx, 0, n_layers - 1)
    return {name: _layer(cache, layer) for name, cache in given.items()}


def _layer(cache: Cache, layer: int) -> mx.array:
    if isinstance(cache, mx.array):
        return cache[layer : layer + 1].squeeze(0)  # cache[layer] is a gather: a copy
    return cache[layer]
