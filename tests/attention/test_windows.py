"""Blocks that fell out of every layer's sliding window are given up, and never read again."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_paged import Engine
from mlx_paged.attention.causal import FULL, causal, widest
from mlx_paged.attention.forward import causal_mask
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.runner.model_probe import probe
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model

BLOCK, WINDOW = 4, 12
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (50, 7, 31)]


def windowed(*windows: int | None):
    """A llama whose layers see only so many tokens."""
    options = {}
    if None in windows:
        kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
        options = {"layer_types": kinds, "sliding_window": WINDOW}
    model = tiny_model("llama", num_hidden_layers=len(windows), **options)
    model.make_cache = lambda: [RotatingKVCache(w) if w else KVCache() for w in windows]
    return model


def poison_free_blocks(engine: Engine) -> None:
    """NaN into every slot that nobody may read any more."""
    manager = engine.manager
    blocks = np.array(manager.allocator.store.free, np.int32)
    slots = mx.array((blocks[:, None] * BLOCK + np.arange(BLOCK, dtype=np.int32)).ravel())
    for layer, shape in enumerate(manager.pool.shapes):  # of a layer in each array
        rows = mx.full((slots.size, shape.n_kv_heads, shape.head_dim), mx.nan, shape.dtype)
        manager.pool.write(layer, rows, rows, slots)
    mx.eval(manager.pool.handles())


@pytest.mark.parametrize("windows", [(12, 12), (12, 20), (12, None), (None,)])
def test_each_layer_has_its_own_window(windows):
    assert probe(windowed(*windows)).sees == tuple(map(causal, windows))


@pytest.mark.sampled(24)
@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("prefill_chunk", [5, 16, 64])
@pytest.mark.parametrize(
    "windows",
    [(WINDOW, WINDOW), (WINDOW, None), (WINDOW, WINDOW, WINDOW, None), (None, WINDOW)],
    ids=str,
)
def test_what_is_given_up_is_never_read_again(windows, prefill_chunk, lookahead):
    model = windowed(*windows)
    engine = Engine(
        model,
        block_size=BLOCK,
        num_blocks=64,
        prefill_chunk=prefill_chunk,
        lookahead=lookahead,
        prefix_cache=False,
    )
    ids = [engine.add_request(prompt, max_tokens=40) for prompt in PROMPTS]
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        engine.manager.check_integrity()
        if not engine._pipeline.busy:
            poison_free_blocks(engine)
    assert [done[i].tokens for i in ids] == [solo_greedy(model, p, 40) for p in PROMPTS]
    assert engine.manager.blocks_in_use == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_full", [0, 1])
def test_a_long_generation_holds_no_more_than_its_window(num_full):
    model = windowed(WINDOW, *[None] * num_full)
    engine = Engine(model, block_size=BLOCK, num_blocks=128, prefill_chunk=8)
    request = engine.add_request(PROMPTS[0], max_tokens=200)
    for _ in range(10):
        engine.step()
    while engine.has_work:
        engine.step()
        if (now := engine.request(request)) is not None and engine.has_work:
            full = num_full * -(-(now.num_tokens + 1) // BLOCK)
            assert engine.manager.blocks_in_use <= full + WINDOW // BLOCK + 2
    assert engine.request(request) is None


def test_forks_and_prefixes_work_beyond_the_window():
    model = windowed(WINDOW, WINDOW)
    engine = Engine(model, block_size=BLOCK, num_blocks=128, prefill_chunk=16)
    root = engine.add_request(PROMPTS[0], max_tokens=30, keep=True)
    trunk = []
    while engine.has_work:
        trunk += [output.token for output in engine.step()]
    history = PROMPTS[0] + trunk
    branch = engine.fork(root, [1, 2, 3], max_tokens=10)
    again = engine.add_request([*history, 9, 8], max_tokens=10)
    samples = engine.add_samples(PROMPTS[0][:40], 3, max_tokens=20)
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion is not None}
        engine.manager.check_integrity()
    assert done[branch].tokens == solo_greedy(model, [*history, 1, 2, 3], 10)
    assert done[again].tokens == solo_greedy(model, [*history, 9, 8], 10)
    assert done[again].cached_prompt_tokens > len(PROMPTS[0])
    for sample in samples:
        assert done[sample].tokens == solo_greedy(model, PROMPTS[0][:40], 20)
    engine.release(root)
    assert engine.manager.blocks_in_use == 0


def test_a_full_layer_keepsblocks_of():
    engine = Engine(windowed(WINDOW, None), block_size=BLOCK, num_blocks=64, prefill_chunk=8)
    engine.generate(PROMPTS[:1], max_tokens=30)
    most = -(-79 // BLOCK) + (WINDOW + 8) // BLOCK + 2
    assert -(-79 // BLOCK) < engine.stats.peak_blocks_in_use <= most


def test_trimmed_blocks_are_free_or_cached_and_their_content_is_still_found():
    allocator = BlockAllocator(8, BLOCK, (LayerGroup(BLOCK),), chunk=20)
    tokens = list(range(20))
    allocator.admit(0, 20)
    allocator.make_writable(0, 0, 20)
    allocator.register_prefix(0, tokens, 8)
    allocator.trim(0, 15)
    assert (allocator.store.blocks_in_use, allocator.store.num_idle) == (3, 2)
    allocator.register_prefix(0, tokens, 20)
    allocator.trim(0, 9)  # never back
    allocator.fork(0, 1)
    allocator.trim(1, 20)
    allocator.check_integrity()
    assert allocator.cached_prefix([*tokens, 99]) == 20
    allocator.free(0)
    allocator.free(1)
    allocator.check_integrity()
    assert allocator.store.blocks_in_use == 0


def test_blocks_trimmed_before_they_were_offered_are_not_offered():
    allocator = BlockAllocator(8, BLOCK, (LayerGroup(BLOCK),), chunk=16)
    tokens = list(range(16))
    allocator.admit(0, 16)
    allocator.trim(0, 12)
    allocator.admit(1, 8)
    allocator.register_prefix(0, tokens, 16)
    allocator.check_integrity()
    assert allocator.cached_prefix([*tokens[:8], 99]) == 0
    assert allocator.cached_prefix([*tokens, 99]) == 16


def test_a_layer_whose_decodes_gather_keeps_all_tokens(monkeypatch):
    whole = llama.scaled_dot_product_attention

    def gathering_decodes(q, k, v, *args, **options):
        if q.shape[2] == 1:
            k, v = mx.array(k), mx.array(v)
        return whole(q, k, v, *args, **options)

    monkeypatch.setattr(llama, "scaled_dot_product_attention", gathering_decodes)
    assert probe(windowed(12)).sees == (FULL,)


def test_the_smaller_window_of_a_layer_and_its_mask_counts():
    """As mlx-lm's masks say, one after the other."""
    queries = mx.arange(9)[:, None]
    for windows in [(5, 3), (3, 5), (4, 4), (None, 3), (3, None), (None, None)]:
        first, second = map(causal, windows)
        masks = [create_causal_mask(9, window_size=window) for window in windows]
        found = causal_mask(queries, 9, first.narrowed(second))
        assert mx.array_equal(found, masks[0] & masks[1]), windows
    assert widest([causal(3), causal(5)]) is causal(5) and widest([causal(3), FULL]) is FULL
    assert causal(9).within(9) is FULL and causal(8).within(9) is causal(8)
    assert [causal(3).first_key(p) for p in (0, 2, 3)] == [0, 0, 1]
