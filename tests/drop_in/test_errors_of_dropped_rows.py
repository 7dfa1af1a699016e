"""What a failing GPU tells mlx-lm's own loops, whose caches are paged."""

import sys
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kv.pool import KVPool
from mlx_paged.scheduler.step import DeviceError
from tests.support.drop_in.prompt_cache_cases import filled, merged
from tests.support.engine.metal_queue import MESSAGE
from tests.support.models.tiny_models import VOCAB, tiny_model


def test_an_error_that_a_dropped_row_meets_is_told_by_the_next_step(monkeypatch):
    """The pool moves its blocks when long rows leave a batch, and evaluates for that."""
    model, rng = tiny_model("llama"), np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, count).tolist() for count in (8, 900, 900)]
    batch = merged([filled(model, prompt) for prompt in prompts])
    unheard: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unheard.append)

    def failing(*arguments: Any) -> None:
        raise RuntimeError(MESSAGE)

    with monkeypatch.context() as patch:
        patch.setattr(KVPool, "keep", failing)
        for layer in batch:
            layer.filter([0])
    assert unheard == []
    rows = mx.array([[1]])
    with pytest.raises(DeviceError, match="Command buffer"):
        mx.eval(model(rows, cache=batch))
    assert mx.isfinite(model(rows, cache=batch)).all()
