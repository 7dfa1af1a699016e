"""Calls on the prompt caches of a batch, as mlx-lm's batch generator makes them, and their cost."""

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

Caches = list[Any]
"""mlx-lm's caches, one a layer."""

GROWTH = 200
"""Tokens written to make room necessary: fewer than the 256 by which mlx-lm then grows."""


@dataclass(frozen=True)
class Cost:
    """What a call took.

    Attributes:
        ms: time until its arrays were evaluated.
        peak: bytes on top of what was there before, at most at any moment.
        kept: bytes more than before when it had ended.
    """

    ms: float
    peak: int
    kept: int


def cost_of(call: Callable[[], object]) -> Cost:
    """Run `call`, which evaluates what it makes."""
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    start = time.perf_counter()
    call()
    ms = 1000 * (time.perf_counter() - start)
    return Cost(ms, max(0, mx.get_peak_memory() - before), mx.get_active_memory() - before)


def copy_ms(num_bytes: int) -> float:
    """Milliseconds of one copy in memory of so many bytes: the best of several."""
    source = np.ones(num_bytes, np.uint8)
    target = source.copy()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return 1000 * best


def prompt_cache(
    make: Callable[[nn.Module], Caches], model: nn.Module, num_tokens: int, seed: int
) -> Caches:
    """The caches of one sequence with random K/V; `make` is a make_prompt_cache."""
    caches = make(model)
    mx.random.seed(seed)
    for cache in caches:
        cache.update_and_fetch(*random_kv(model, 1, num_tokens))
    evaluate(caches)
    return caches


def random_kv(model: nn.Module, rows: int, num_tokens: int) -> mx.array:
    """K and V of one layer, ``[2, rows, H_kv, num_tokens, D]`` float32."""
    head_dim = model.args.hidden_size // model.args.num_attention_heads
    return mx.random.normal((2, rows, model.args.num_key_value_heads, num_tokens, head_dim))


def token_bytes(model: nn.Module) -> int:
    """Bytes of K/V of one token in all layers."""
    return len(model.layers) * int(random_kv(model, 1, 1).nbytes)


def merged(singles: list[Caches]) -> Caches:
    """Sequences as one batch."""
    return [type(column[0]).merge(column) for column in zip(*singles, strict=True)]


def evaluate(caches: Caches) -> None:
    mx.eval([(cache.keys, cache.values) for cache in caches])


class LiveBatch:
    """A batch of `rows` sequences of `num_tokens` tokens each, without room for one more.

    Args:
        make: mlx-lm's make_prompt_cache or one in its place.
    """

    def __init__(
        self, make: Callable[[nn.Module], Caches], model: nn.Module, rows: int, num_tokens: int
    ) -> None:
        self.model = model
        self.rows = rows
        self._make = make
        self.caches = merged([prompt_cache(make, model, num_tokens, row) for row in range(rows)])
        evaluate(self.caches)

    def grow(self) -> Cost:
        """Write more tokens of every row than there is room for."""
        return self._cost_of_writing(self.caches, GROWTH)

    def decode(self) -> Cost:
        """Write one token of every row."""
        return self._cost_of_writing(self.caches, 1)

    def admit(self, num_tokens: int) -> Cost:
        """Let another sequence join."""
        newcomer = prompt_cache(self._make, self.model, num_tokens, self.rows)

        def join() -> None:
            for cache, other in zip(self.caches, merged([newcomer]), strict=True):
                cache.extend(other)
            evaluate(self.caches)

        return cost_of(join)

    def complete(self) -> Cost:
        """Let the one that joined leave."""

        def leave() -> None:
            for cache in self.caches:
                cache.filter(list(range(self.rows)))
            evaluate(self.caches)

        return cost_of(leave)

    def fork(self) -> Cost:
        """Copy all caches and write one token of every row of the copy."""
        kv = self._more(self.rows, 1)
        twins: list[Caches] = []

        def branch() -> None:
            twins.append(copy.deepcopy(self.caches))
            self._write(twins[0], kv)

        return cost_of(branch)

    def _cost_of_writing(self, caches: Caches, num_tokens: int) -> Cost:
        kv = self._more(len(caches[0].offset.tolist()), num_tokens)
        return cost_of(lambda: self._write(caches, kv))

    def _more(self, rows: int, num_tokens: int) -> list[mx.array]:
        """K and V of every layer."""
        kv = [random_kv(self.model, rows, num_tokens) for _ in self.caches]
        mx.eval(kv)
        return kv

    def _write(self, caches: Caches, kv: list[mx.array]) -> None:
        for cache, (keys, values) in zip(caches, kv, strict=True):
            cache.update_and_fetch(keys, values)
        evaluate(caches)
