"""What recurrent states hold in memory: those of sequences that wait, and their copies."""

import gc
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged import Engine
from tests.support.models.architectures import VOCAB, build

RNG = np.random.default_rng(1)
SLACK = 4 * (16 << 10)
"""Bytes of a sequence: for each of its arrays as much as mx.contiguous allows itself."""


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build("jamba", mamba_d_state=512, mamba_d_conv=64)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    gc.collect()  # what earlier tests left must not go in the middle of this one
    yield


def text(num_tokens: int) -> list[int]:
    return RNG.integers(0, VOCAB, num_tokens).tolist()


def state_bytes(model: nn.Module) -> int:
    cache = model.make_cache()
    model(mx.array([text(9)]), cache=cache)
    states = [leaf.cache for leaf in cache if hasattr(leaf, "cache")]
    return sum(array.nbytes for state in states for array in state)


def finish(engine: Engine) -> int:
    """Compute all requests and one more, so that nothing of theirs is left in the caches; returns
    the bytes that are held then."""
    while engine.has_work:
        engine.step()
    engine.generate([[1]], max_tokens=1)
    mx.synchronize()
    return mx.get_active_memory()


@pytest.mark.slow
def test_a_snapshot_keeps_no_more_in_memory_than_its_own_bytes(model):
    """Not the states of the whole batch that its request was in, nor those of a chunk."""
    prompts = [text(40 + i) for i in range(16)]

    def held(**options) -> tuple[int, int]:
        engine = Engine(model, block_size=8, num_blocks=256, **options)
        for i, prompt in enumerate(prompts):
            engine.add_request(prompt, max_tokens=3 + i)
        num_bytes, kept = finish(engine), engine.manager.allocator.states.snapshots
        return num_bytes, 0 if kept is None else len(kept)

    of_one = state_bytes(model)
    without, none = held(snapshot_memory=0)
    with_snapshots, count = held(snapshot_memory=20 * of_one)
    assert (none, count) == (0, 20)
    assert 0.9 * count * of_one < with_snapshots - without < count * (of_one + SLACK)


@pytest.mark.parametrize("kept", [1, 3])
def test_a_sequence_that_waits_keeps_its_own_states_alone(model, kept):
    """They were rows of a batch of ten, and each left another batch."""

    def held(kept: int) -> int:
        engine = Engine(model, block_size=8, num_blocks=256, prefix_cache=False)
        for i in range(10):
            engine.add_request(text(12), max_tokens=4 + 3 * i, keep=i < kept)
        return finish(engine)

    of_one, without = state_bytes(model), held(0)
    gc.collect()
    assert 0.9 * kept * of_one < held(kept) - without < kept * (of_one + SLACK)
