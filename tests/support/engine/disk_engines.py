"""Engines of tiny models with K/V on a disk, and what they answer."""

from typing import Any

import numpy as np

from mlx_paged import Engine
from tests.support.models import tiny_models

SIZE = 4
GREEDY = {"max_tokens": 6}


def tokens_of(seed: int, length: int = 50) -> list[int]:
    return np.random.default_rng(seed).integers(tiny_models.VOCAB, size=length).tolist()


def make_engine(model: Any, directory: Any = None, **options: Any) -> Engine:
    options = {"block_size": SIZE, "num_blocks": 100, "prewarm": False} | options
    return Engine(model, kv_disk=directory, **options)


def outputs(
    model: Any, prompts: list[list[int]], directory: Any = None, **options: Any
) -> tuple[list[list[int]], list[int], Any]:
    """Tokens, prompt tokens that were found, and the disk's metrics; the engine is closed."""
    salt = {"cache_salt": options.pop("salt", "")}
    engine = make_engine(model, directory, **options)
    if directory is not None:  # else it depends on the clock what is read
        engine.scheduler.tier._seconds_to_compute = lambda start, stop: 0.0
    done = [engine.generate([prompt], **GREEDY, **salt)[0] for prompt in prompts]
    engine.scheduler.allocator.check_integrity()
    metrics = engine.metrics()["kv_disk"]
    engine.close()
    return [c.tokens for c in done], [c.cached_prompt_tokens for c in done], metrics
