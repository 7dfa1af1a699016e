"""Random users of this package, whose work is traced: each a turn at a time."""

import copy
import random
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator as StockGenerator
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import trim_prompt_cache

from mlx_paged.batch_generator.generator import BatchGenerator
from mlx_paged.drop_in.caches import make_prompt_cache
from mlx_paged.options import KVBits
from tests.support.models import architectures, tiny_models
from tests.support.simulation import schedules as simulation
from tests.support.simulation.random_calls import TINY_GROUPS
from tests.support.simulation.solo_checks import SoloChecks
from tests.support.simulation.solo_runs import MlxLmSolo


class Life(Protocol):
    """Somebody who uses the package."""

    has_work: bool

    def turn(self) -> None:
        """Do the next thing."""


@cache
def small_model(model_type: str, **changes: Any) -> nn.Module:
    """A model of two layers, three if some of them have a window."""
    layers = {} if "layer_types" in changes else {"num_hidden_layers": 2}
    if model_type == "gemma3_text":
        layers |= {"sliding_window": 4}
    return tiny_models.tiny_model(model_type, **(layers | changes))


def _small_solo(model_type: str, windowed: bool = False, kv_bits: KVBits = None) -> MlxLmSolo:
    if model_type not in tiny_models.CONFIGS:
        return MlxLmSolo(architectures.build(model_type), architectures.VOCAB, kv_bits)
    if not windowed:
        return MlxLmSolo(small_model(model_type), tiny_models.VOCAB, kv_bits)
    full, group = TINY_GROUPS
    kinds = ("sliding_attention",) * group.members + ("full_attention",) * full.members
    options = {"sliding_window": group.window, "num_hidden_layers": len(kinds)}
    model = small_model(model_type, layer_types=kinds, **options)
    return MlxLmSolo(model, tiny_models.VOCAB, kv_bits)


class _NoSoloRuns(SoloChecks):
    """Compares no tokens: other tests do, and the runs alone would be traced."""

    def fork(self, *args: Any) -> None:
        pass

    def _tokens(self, *args: Any) -> None:
        pass

    def _beams(self, *args: Any) -> None:
        pass


class EngineLife:
    """A schedule of the simulation: an engine with preemption, forks, aborts, beams, faults."""

    def __init__(self, seed: int, index: int) -> None:
        with patch.object(simulation, "tiny_solo", _small_solo):
            self.simulation = simulation.tiny_simulation(seed, index)
        checks = self.simulation.checks
        self.simulation.checks = _NoSoloRuns(checks._model, checks._runner, checks._counts)

    @property
    def has_work(self) -> bool:
        return bool(self.simulation._num_arrivals or self.simulation.engine.has_work)

    def turn(self) -> None:
        with self.simulation.turns.limits():
            while self.simulation.rng.random() < 0.4:
                self.simulation._call()
            self.simulation._step()


class CacheLife:
    """Prompt caches: filled, continued, abandoned under way, forked, trimmed and deleted."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._model = small_model(rng.choice(("llama", "gemma3_text", "deepseek_v3")))
        self._caches: list[list[Any]] = []
        self._turns = rng.randint(4, 10)
        self._block_size = rng.choice((1, 2, 4))

    @property
    def has_work(self) -> bool:
        return self._turns > 0

    def turn(self) -> None:
        self._turns -= 1
        rng, caches = self._rng, self._caches
        if not caches or rng.random() < 0.3:
            caches.append(make_prompt_cache(self._model, block_size=self._block_size))
        cache = rng.choice(caches)
        actions = [self._generate] * 2 + [self._forward, self._fork, self._trim, self._delete]
        rng.choice(actions)(cache)

    def _prompt(self) -> list[int]:
        length = self._rng.randint(1, 12)
        return [self._rng.randrange(tiny_models.VOCAB) for _ in range(length)]

    def _forward(self, cache: list[Any]) -> None:
        """Call the model on the default stream, which is not that of `generate_step`."""
        mx.async_eval(self._model(mx.array([self._prompt()]), cache=cache))

    def _generate(self, cache: list[Any]) -> None:
        rng = self._rng
        steps = generate_step(
            mx.array(self._prompt()),
            self._model,
            max_tokens=6,
            prompt_cache=cache,
            prefill_step_size=rng.choice((2, 5, 64)),
        )
        for _ in range(rng.randint(1, 5)):  # the next step is under way
            next(steps)

    def _fork(self, cache: list[Any]) -> None:
        self._caches.append(copy.deepcopy(cache))

    def _trim(self, cache: list[Any]) -> None:
        if all(layer.is_trimmable() for layer in cache):
            trim_prompt_cache(cache, self._rng.randint(1, 4))

    def _delete(self, cache: list[Any]) -> None:
        self._caches = [other for other in self._caches if other is not cache]


class BatchLife:
    """A batch generator: mlx-lm's on paged caches, or the one on an engine."""

    def __init__(self, rng: random.Random, paged: bool) -> None:
        self._rng = rng
        model = small_model(rng.choice(("llama", "gemma3_text")))
        options = {"prefill_step_size": rng.choice((3, 16)), "completion_batch_size": 3}
        if paged:
            blocks = rng.choice((24, 80))
            options |= {"block_size": 2, "num_blocks": blocks, "prewarm": False}
            self._generator: Any = BatchGenerator(model, lookahead=True, **options)
        else:
            self._generator = StockGenerator(model, **options)
        self._uids: list[int] = []
        self._num_arrivals = rng.randint(2, 6)
        self._is_idle = False

    @property
    def has_work(self) -> bool:
        return self._num_arrivals > 0 or not self._is_idle

    def turn(self) -> None:
        rng = self._rng
        if self._num_arrivals > 0 and rng.random() < 0.5:
            self._num_arrivals -= 1
            prompt = [rng.randrange(tiny_models.VOCAB) for _ in range(rng.randint(1, 14))]
            self._uids += self._generator.insert([prompt], [rng.randint(1, 8)])
        if self._uids and rng.random() < 0.1:
            self._generator.remove([rng.choice(self._uids)])
        told, given = self._generator.next()
        self._is_idle = not told and not given


def lives_of(kind: str, seed: int, index: int) -> Iterator[Life]:
    """Who lives in schedule `index` of a seed."""
    rng = random.Random(f"{seed}:{index}:{kind}")
    if kind in ("engine", "two engines"):
        yield EngineLife(seed, index)
    if kind == "two engines":
        yield EngineLife(seed + 1, index)
    if kind == "caches":
        yield CacheLife(rng)
        yield CacheLife(rng)
    if kind in ("patched batches", "batch generator"):
        yield BatchLife(rng, paged=kind == "batch generator")
    if kind == "patched batches":
        yield CacheLife(rng)


KINDS = ("engine", "engine", "two engines", "caches", "patched batches", "batch generator")
"""Schedule i is of kind ``i % len(KINDS)``."""
