"""The counts of an engine's ticks and metrics, compared with what the engine did."""

import dataclasses
import gc
import json
from typing import Any

import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_paged import Engine
from mlx_paged.metrics.tick import Tick
from tests.support.models.tiny_models import VOCAB, tiny_model

BLOCK = 4
PROMPT = [5, 9, 77, 3, 21, 64, 8]
rng = np.random.default_rng(0)
PROMPTS = [rng.integers(0, VOCAB, n).tolist() for n in (30, 7, 18, 25, 41, 12)]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


COUNTS = [f.name for f in dataclasses.fields(Tick) if f.type is int and f.name != "index"]


def busy_engine(model: Any, **options: Any) -> Engine:
    """An engine that had preemptions, samples, beams and prefix hits, all from one seed."""
    engine = Engine(model, block_size=BLOCK, num_blocks=30, prefill_chunk=16, seed=7, **options)
    engine.generate(PROMPTS, max_tokens=20, temperature=1.0)
    engine.sample([PROMPTS[0]], 4, max_tokens=6, temperature=1.0)
    engine.beam_search(PROMPTS[0], 3, max_tokens=5)
    return engine


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lookahead", [False, True])
def test_what_does_not_depend_on_time_is_the_same_in_every_run(model, lookahead):
    first, second = (busy_engine(model, lookahead=lookahead) for _ in range(2))
    runs = [[[getattr(t, name) for name in COUNTS] for t in run.ticks] for run in (first, second)]
    assert runs[0] == runs[1]
    assert len(first.ticks) > 40


@pytest.mark.parametrize("lookahead", [False, True])
def test_what_ticks_count_adds_up_to_what_happened(model, lookahead):
    engine = busy_engine(model, lookahead=lookahead)
    found, allocator = engine.metrics(), engine.scheduler.allocator
    total = {name: sum(getattr(tick, name) for tick in engine.ticks) for name in COUNTS}
    assert total["preemptions"] == engine.scheduler.num_preemptions == found["preemptions"] > 0
    assert total["cow_clones"] == allocator.store.cow_clones == found["cow_clones"] > 0
    assert total["evictions"] == allocator.store.evictions == found["evictions"] > 0
    assert total["prefix_hit_tokens"] == allocator.prefix_hit_tokens > 0
    assert found["tokens_by_phase"] == {
        "prefill": total["prefill_tokens"],
        "decode": total["decode_tokens"],
        "prefix_hit": total["prefix_hit_tokens"],
        "sampled": total["sampled"],
    }
    assert found["cow_clones_per_token"] == total["cow_clones"] / total["sampled"]
    assert found["kv_bytes_read"] == total["kv_bytes_read"]
    assert found["blocks_touched"] == total["blocks_touched"]
    assert found["ticks"] == len(engine.ticks) and found["steps"] <= found["ticks"]


def test_a_single_request_counts_every_token_once(model):
    engine = Engine(model, block_size=BLOCK, num_blocks=64, prefill_chunk=3)
    engine.generate([PROMPT], max_tokens=10)
    assert [tick.prefill_tokens for tick in engine.ticks] == [3, 3, 1] + [0] * 9
    assert [tick.decode_tokens for tick in engine.ticks] == [0] * 3 + [1] * 9
    assert [tick.sampled for tick in engine.ticks] == [0] * 2 + [1] * 10
    contexts = [3, 6, 7, *range(8, 17)]
    assert [tick.live_tokens for tick in engine.ticks] == contexts
    assert [tick.blocks_touched for tick in engine.ticks] == [-(-c // BLOCK) for c in contexts]
    layers, kv, heads, dim, size = len(model.layers), 2, model.args.num_key_value_heads, 16, 4
    token_bytes = layers * kv * heads * dim * size
    assert [tick.kv_bytes_read for tick in engine.ticks] == [c * token_bytes for c in contexts]


def test_a_window_bounds_what_is_read():
    model = tiny_model("llama", num_hidden_layers=2)
    model.make_cache = lambda: [RotatingKVCache(12), KVCache()]
    engine = Engine(model, block_size=BLOCK, num_blocks=64)
    engine.generate([PROMPTS[0]], max_tokens=5)
    [shape] = engine.manager.pool.shapes  # both layers share one pair of arrays
    layer_bytes = [shape.token_bytes] * 2
    read = [tick.kv_bytes_read for tick in engine.ticks]
    assert read == [30 * sum(layer_bytes)] + [
        12 * layer_bytes[0] + context * layer_bytes[1] for context in range(31, 35)
    ]


def test_levels_are_those_at_the_end_of_the_tick(model):
    engine = Engine(model, block_size=BLOCK, num_blocks=64, max_running=2, lookahead=False)
    for prompt in PROMPTS[:3]:
        engine.add_request(prompt, max_tokens=3)
    while engine.has_work:
        engine.step()
        tick, allocator = engine.ticks[-1], engine.scheduler.allocator
        assert tick.running == len(engine.scheduler.running)
        assert tick.waiting == len(engine.scheduler.waiting)
        assert tick.blocks_in_use == allocator.store.blocks_in_use
        assert tick.blocks_cached == allocator.store.num_idle
    assert engine.ticks[0].waiting == 1 and engine.ticks[0].running == 2


def test_the_references_of_blocks_are_counted(model):
    engine = Engine(model, block_size=BLOCK, num_blocks=64)
    engine.add_samples(PROMPTS[0][:9], 3, max_tokens=9, temperature=1.0)
    engine.step()
    engine.step()
    assert engine.metrics()["refcount_histogram"] == {"0": 59, "1": 3, "3": 2}


def test_metrics_are_json(model):
    found = busy_engine(model).metrics()
    assert json.loads(json.dumps(found)) == found


def test_an_engine_that_did_nothing_has_metrics(model):
    found = Engine(model, num_blocks=8).metrics()
    assert found["ticks"] == 0 and found["cow_clones_per_token"] == 0 and found["spikes"] == []


@pytest.mark.slow
def test_a_callback_of_collections_is_there_within_steps_only(model):
    engine = Engine(model, num_blocks=8)
    gc.collect()
    callbacks, within = list(gc.callbacks), set[int]()
    engine.observers.launched.append(lambda launched: within.add(len(gc.callbacks)))
    engine.generate([[1, 2, 3]], max_tokens=2)
    assert within == {len(callbacks) + 1}
    assert gc.callbacks == callbacks
