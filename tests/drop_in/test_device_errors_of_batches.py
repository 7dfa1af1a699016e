"""mlx-lm's own loops hear of an error of the device, whatever they do with caches meanwhile."""

import sys
from typing import Any

import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator

from mlx_paged import patched_mlx_lm
from tests.support.engine.metal_queue import MetalQueue
from tests.support.models.tiny_models import VOCAB, tiny_model

RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(0, VOCAB, n).tolist() for n in (300, 9, 12)]
MOST_TOKENS = [4, 12, 12]  # the long one ends first, and its blocks are most of the pool


@pytest.mark.parametrize("lateness", range(6))
def test_a_row_that_ends_while_the_device_fails_does_not_hide_the_error(monkeypatch, lateness):
    """mlx-lm drops the row from its batch while the next step is under way."""
    silent: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", silent.append)
    queue = MetalQueue(0, 0, seed=lateness)
    queue.install(monkeypatch)
    with patched_mlx_lm(block_size=4):
        generator = BatchGenerator(tiny_model("llama"), max_tokens=12)
        generator.insert(PROMPTS, MOST_TOKENS)
        num_given = 0
        while num_given < 3 * 3:
            num_given += len(generator.next()[1])
        queue.fail_next()  # in the call that drops the first row
        with pytest.raises(RuntimeError, match="planted"):
            while generator.next()[1]:
                pass
    assert not silent and queue.told == 1
