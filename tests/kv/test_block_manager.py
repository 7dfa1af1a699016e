"""KVBlockManager: K/V rows end up where the block tables say, forks copy on write."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import KVBlockManager, OutOfBlocksError, ops, paged_attention

LAYERS, KV_HEADS, DIM = 2, 2, 8


def make_manager(block_size: int = 4, max_blocks: int = 32, **options) -> KVBlockManager:
    options = {"dtype": mx.float32} | options
    return KVBlockManager(LAYERS, KV_HEADS, DIM, block_size, max_blocks, **options)


def chunk(seed: int, num_tokens: int, dim: int = DIM) -> mx.array:
    rng = np.random.default_rng(seed)
    return mx.array(rng.standard_normal((KV_HEADS, num_tokens, dim)), mx.float32)


def read_back(cache: mx.array, block_ids: mx.array, num_tokens: int) -> np.ndarray:
    """A sequence's rows ``[n_kv_heads, num_tokens, dim]`` by the definition of a block table."""
    pool, table = np.array(cache), np.array(block_ids)
    size = pool.shape[2]
    return np.stack([pool[:, table[p // size], p % size] for p in range(num_tokens)], axis=1)


def test_chunked_writes_of_a_large_prompt_put_every_token_in_its_slot():
    manager = make_manager(block_size=16, max_blocks=128)
    manager.new_sequence(7, prompt_len=0)
    keys = [chunk(seed, 1000) for seed in range(LAYERS)]
    values = [chunk(10 + seed, 1000) for seed in range(LAYERS)]
    for start in range(0, 1000, 77):
        stop = min(start + 77, 1000)
        for layer in range(LAYERS):
            k, v = keys[layer][:, start:stop], values[layer][:, start:stop]
            manager.write_prefill(7, layer, k, v, start_pos=start)
    block_ids, ctx_len = manager.table(7)
    assert ctx_len == 1000 and block_ids.size == math.ceil(1000 / 16)
    for layer in range(LAYERS):
        np.testing.assert_array_equal(read_back(manager.k[layer], block_ids, 1000), keys[layer])
        np.testing.assert_array_equal(read_back(manager.v[layer], block_ids, 1000), values[layer])


def test_prefill_into_kv_hands_control_back_after_every_chunk():
    manager = make_manager()
    manager.new_sequence(0, prompt_len=11)
    tokens = mx.arange(11)
    written: list[range] = []

    def forward(chunk_tokens: mx.array, start: int):
        assert len(written) == start // 4, "a chunk is computed before the caller had its turn"
        rows = mx.broadcast_to(
            chunk_tokens.astype(mx.float32)[None, :, None], (KV_HEADS, chunk_tokens.size, DIM)
        )
        return [(rows + layer, -rows) for layer in range(LAYERS)]

    for positions in manager.prefill_into_kv(0, tokens, 4, forward):
        written.append(positions)
    assert written == [range(0, 4), range(4, 8), range(8, 11)]
    block_ids, _ = manager.table(0)
    np.testing.assert_array_equal(
        read_back(manager.k[1], block_ids, 11)[0, :, 0], np.arange(11) + 1
    )


def test_decode_appends_into_the_tail_and_opens_a_block_when_it_is_full():
    manager = make_manager(block_size=4)
    manager.new_sequence(0, prompt_len=3)
    first = manager.ensure_tail_capacity(0)
    assert first.start == 3 and manager.blocks_in_use == 1
    second = manager.ensure_tail_capacity(0, n_tokens=6)
    assert second.start == 4 and manager.blocks_in_use == 3
    block_ids, ctx_len = manager.table(0)
    table = block_ids.tolist()
    assert ctx_len == 10
    assert second.slots.tolist() == [table[p // 4] * 4 + p % 4 for p in range(4, 10)]


def test_fork_then_append_leaves_the_parent_untouched_and_shares_all_but_the_tail():
    manager = make_manager(block_size=4)
    manager.new_sequence(0, prompt_len=0)
    k, v = chunk(0, 10), chunk(1, 10)
    for layer in range(LAYERS):
        manager.write_prefill(0, layer, k, v, start_pos=0)
    manager.fork(0, 1)
    assert manager.blocks_in_use == 3

    tail_k, tail_v = chunk(2, 1), chunk(3, 1)
    for layer in range(LAYERS):
        manager.write_prefill(1, layer, tail_k, tail_v, start_pos=10)
    parent, child = manager.table(0), manager.table(1)
    assert manager.blocks_in_use == 4 and manager.cow_clones == 1
    assert child[0].tolist()[:2] == parent[0].tolist()[:2]
    for layer in range(LAYERS):
        np.testing.assert_array_equal(read_back(manager.k[layer], parent[0], 10), k)
        whole = np.concatenate([np.array(k), np.array(tail_k)], axis=1)
        np.testing.assert_array_equal(read_back(manager.k[layer], child[0], 11), whole)
    manager.check_integrity()


def test_batch_tables_feed_the_attention_op():
    manager = make_manager(block_size=4)
    contents = {}
    for seq_id, length in enumerate((3, 9, 6)):
        contents[seq_id] = (chunk(seq_id, length), chunk(50 + seq_id, length))
        manager.new_sequence(seq_id, 0)
        manager.write_prefill(seq_id, 1, *contents[seq_id], start_pos=0)
    tables, lens = manager.batch_tables([2, 0, 1])
    assert lens.tolist() == [6, 3, 9] and tables.shape == (3, 3)
    q = mx.random.normal((3, 4, 1, DIM))
    out = np.array(paged_attention(q, manager.k, manager.v, tables, lens, layer_idx=1))
    for row, seq_id in enumerate([2, 0, 1]):
        k, v = (np.repeat(np.array(x, np.float64), 2, axis=0) for x in contents[seq_id])
        scores = np.einsum("hd,htd->ht", np.array(q, np.float64)[row, :, 0], k) / math.sqrt(DIM)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(out[row, :, 0], np.einsum("ht,htd->hd", weights, v), atol=2e-6)


def test_a_prompt_finds_the_blocks_that_another_left():
    manager = make_manager(block_size=4)
    tokens = list(range(10))
    manager.new_sequence(0, 10, tokens)
    manager.commit(0, tokens, 10)
    manager.free(0)
    assert manager.blocks_in_use == 0 and manager.cached_prefix(tokens) == 8
    view = manager.new_sequence(1, 10, tokens)
    assert view.block_ids.size == 3 and manager.blocks_in_use == 3


def test_a_prompt_gets_its_own_copy_of_the_block_where_it_departs_from_another():
    manager = make_manager(block_size=4)
    tokens = list(range(8))
    manager.new_sequence(0, 8)
    k, v = chunk(0, 8), chunk(1, 8)
    for layer in range(LAYERS):
        manager.write_prefill(0, layer, k, v, start_pos=0)
    manager.commit(0, tokens, 8)
    prompt = [*tokens[:7], 99, 99]
    assert manager.cached_prefix(prompt) == 7
    block_ids = manager.new_sequence(1, 9, prompt).block_ids
    tail_k, tail_v = chunk(2, 2), chunk(3, 2)
    for layer in range(LAYERS):
        manager.write_prefill(1, layer, tail_k, tail_v, start_pos=7)
        for pool, known, own in ((manager.k, k, tail_k), (manager.v, v, tail_v)):
            whole = np.concatenate([np.array(known)[:, :7], np.array(own)], axis=1)
            np.testing.assert_array_equal(read_back(pool[layer], block_ids, 9), whole)
            unharmed = read_back(pool[layer], manager.table(0)[0], 8)
            np.testing.assert_array_equal(unharmed, known)
    manager.free(0)
    manager.free(1)
    assert manager.blocks_in_use == 0
    manager.check_integrity()


def test_values_may_be_narrower_than_keys_and_layers_may_differ():
    manager = make_manager(head_dim_test := 8, v_head_dim=[4, 6])
    assert [v.shape[-1] for v in manager.v] == [4, 6]
    assert manager.k[0].shape == (KV_HEADS, 32, head_dim_test, DIM)


def test_a_full_pool_raises_the_named_error_and_changes_nothing():
    manager = make_manager(max_blocks=2)
    manager.new_sequence(0, 8)
    with pytest.raises(OutOfBlocksError, match="1 KV blocks needed, 0 available"):
        manager.ensure_tail_capacity(0)
    with pytest.raises(OutOfBlocksError):
        manager.new_sequence(1, 1)
    assert manager.table(0)[1] == 8
    manager.free(0)
    manager.new_sequence(1, 8)


def written(manager: KVBlockManager, seq_id: int, num_tokens: int) -> list[np.ndarray]:
    """A new sequence's K/V in each layer as random numbers, and what was written."""
    manager.new_sequence(seq_id, num_tokens)
    contents = []
    for layer in range(manager.pool.n_layers):
        k, v = chunk(10 * seq_id + layer, num_tokens), chunk(100 * seq_id + layer, num_tokens)
        manager.write_prefill(seq_id, layer, k, v, 0)
        contents.append(np.array(k))
    return contents


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_spilled_sequence_comes_back_bit_for_bit_in_other_blocks(on_disk, tmp_path):
    manager = make_manager(max_blocks=8)
    manager.spill_directory = tmp_path if on_disk else None
    contents = written(manager, 0, 11)
    manager.fork(0, 1)
    before = manager.table(0)[0].tolist()
    assert manager.spill_to_host(0) == 0
    assert isinstance(manager._spilled[0][1], np.memmap) is on_disk
    assert not list(tmp_path.iterdir()), "a file that a crash would leave"
    assert manager.blocks_in_use == len(before), "the fork lost its blocks"
    for call in (manager.table, manager.spill_to_host, manager.ensure_tail_capacity):
        with pytest.raises(ValueError, match=r"expected a (live )?sequence"):
            call(0)
    with pytest.raises(ValueError, match="sequence 0 is spilled: expected a new id"):
        manager.new_sequence(0, 1)
    manager.free(1)
    assert manager.blocks_in_use == 0
    written(manager, 2, 8)  # into the blocks of before
    manager.prefetch(0)
    block_ids, length = manager.table(0)
    assert length == 11 and block_ids.tolist() != before
    for layer, content in enumerate(contents):
        np.testing.assert_array_equal(read_back(manager.k[layer], block_ids, 11), content)
    manager.ensure_tail_capacity(0, 5)
    manager.check_integrity()
    with pytest.raises(ValueError, match=r"\[prefetch\] seq_id is 0: expected a spilled sequence"):
        manager.prefetch(0)
    manager.free(0)
    manager.free(2)
    assert manager.blocks_in_use == 0


def test_a_copy_that_fails_on_the_device_spills_nothing(monkeypatch):
    manager = make_manager()
    written(manager, 0, 6)
    before = manager.table(0)[0].tolist()

    def end():
        raise RuntimeError("[METAL] Command buffer execution failed: planted.")

    with monkeypatch.context() as patch:
        patch.setattr(ops.metal, "end_of_work", lambda: end)
        with pytest.raises(RuntimeError, match="planted"):
            manager.spill_to_host(0)
    assert manager.table(0)[0].tolist() == before
    assert manager.spill_to_host(0) == 0


def test_the_sequence_used_least_recently_is_spilled_first():
    manager = make_manager(max_blocks=6)
    kept = [written(manager, seq_id, 8) for seq_id in range(3)]
    manager.batch_tables([0])
    with pytest.raises(OutOfBlocksError):
        manager.new_sequence(3, 8)
    assert manager.spill_to_host() == 1
    written(manager, 3, 8)
    assert [manager.spill_to_host(), manager.spill_to_host()] == [2, 0]
    manager.prefetch(1)
    np.testing.assert_array_equal(read_back(manager.k[0], manager.table(1)[0], 8), kept[1][0])
    manager.free(0)  # a spilled one
    with pytest.raises(ValueError, match="expected a spilled sequence"):
        manager.prefetch(0)
    manager.check_integrity()


def test_a_disk_that_cannot_be_written_leaves_a_sequence_where_it_is(tmp_path):
    manager = make_manager()
    manager.spill_directory = tmp_path / "missing"
    contents = written(manager, 0, 11)
    with pytest.raises(FileNotFoundError):
        manager.spill_to_host(0)
    np.testing.assert_array_equal(read_back(manager.k[0], manager.table(0)[0], 11), contents[0])
    manager.free(0)
    manager.check_integrity()


def test_without_a_sequence_nothing_can_be_spilled():
    with pytest.raises(ValueError, match="seq_id is None: expected a sequence in the pool"):
        make_manager().spill_to_host()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: m.write_prefill(0, 9, chunk(0, 1), chunk(0, 1), 0),
            "layer_idx is 9: expected an integer from 0 to 1",
        ),
        (lambda m: m.write_prefill(0, -1, chunk(0, 1), chunk(0, 1), 0), "layer_idx is -1"),
        (
            lambda m: m.write_prefill(0, 0, chunk(0, 1)[:1], chunk(0, 1), 0),
            r"k_chunk has shape \(1, 1, 8\)",
        ),
        (
            lambda m: m.write_prefill(0, 0, chunk(0, 2), chunk(0, 1), 0),
            "k_chunk has 2 tokens but v_chunk 1",
        ),
        (lambda m: m.write_prefill(0, 0, chunk(0, 1), chunk(0, 1), 5), "expected start <= 3"),
        (lambda m: m.ensure_tail_capacity(0, 0), "n_tokens is 0"),
        (lambda m: m.batch_tables([4]), "seq_id 4 is not known"),
        (
            lambda m: next(m.prefill_into_kv(0, mx.arange(3), 0, lambda t, s: [])),
            "max_chunk_tokens is 0",
        ),
        (lambda m: make_manager(dtype=mx.int32), "dtype is"),
        (lambda m: make_manager(v_head_dim=[4]), r"v_head_dim is \[4\]: expected an integer"),
        (
            lambda m: m.write_prefill(0, 0, chunk(0, 1).astype(mx.float16), chunk(0, 1), 3),
            "k_chunk has type array and dtype mlx.core.float16: expected array and mlx.core.float",
        ),
        (
            lambda m: m.write_prefill(0, 0, chunk(0, 1), np.array(chunk(0, 1)), 3),
            "v_chunk has type ndarray and dtype float32: expected array and mlx.core.float32",
        ),
        (lambda m: m.commit(0, [5, 6], 3), "num_computed is 3: expected an integer from 0 to 2"),
        (lambda m: m.commit(0, [5] * 9, 4), "num_computed is 4: expected an integer from 0 to 3"),
        (
            lambda m: next(m.prefill_into_kv(0, mx.zeros((1, 3)), 2, lambda t, s: [])),
            r"tokens has shape \(1, 3\): expected \(n,\)",
        ),
        (lambda m: prefill(m, num_layers=1), "forward returned K/V of 1 layers: expected 2"),
        (lambda m: prefill(m, num_tokens=1), r"k of shape \(2, 1, 8\) for layer 0: expected 2 tok"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_named(call, message):
    manager = make_manager()
    manager.new_sequence(0, 3)
    with pytest.raises(ValueError, match=message):
        call(manager)
    manager.check_integrity()


def prefill(manager: KVBlockManager, num_layers: int = LAYERS, num_tokens: int = 2) -> None:
    """A prompt's first two tokens, for which `forward` returns that many layers and tokens."""
    kv = [(chunk(0, num_tokens), chunk(1, num_tokens))] * num_layers
    next(manager.prefill_into_kv(0, mx.arange(2), 2, lambda tokens, start: kv))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("value", [True, 1.0, math.nan, "1", None, mx.array(1)], ids=repr)
@pytest.mark.parametrize(
    ("name", "call"),
    {
        "n_layers": lambda m, x: KVBlockManager(x, KV_HEADS, DIM, 4, 8),
        "n_kv_heads": lambda m, x: KVBlockManager(LAYERS, [KV_HEADS, x], DIM, 4, 8),
        "head_dim": lambda m, x: KVBlockManager(LAYERS, KV_HEADS, [x, DIM], 4, 8),
        "v_head_dim": lambda m, x: KVBlockManager(LAYERS, KV_HEADS, DIM, 4, 8, v_head_dim=[x] * 2),
        "block_size": lambda m, x: make_manager(block_size=x),
        "max_blocks": lambda m, x: make_manager(max_blocks=x),
        "seq_id": lambda m, x: m.new_sequence(x, 3),
        "prompt_len": lambda m, x: m.new_sequence(1, x),
        "child_seq_id": lambda m, x: m.fork(0, x),
        "n_tokens": lambda m, x: m.ensure_tail_capacity(0, x),
        "start": lambda m, x: m.make_writable(0, x, 3),
        "stop": lambda m, x: m.make_writable(0, 0, x),
        "num_computed": lambda m, x: m.commit(0, [5, 6, 7], x),
        "layer_idx": lambda m, x: m.write_prefill(0, x, chunk(0, 1), chunk(0, 1), 3),
        "start_pos": lambda m, x: m.write_prefill(0, 0, chunk(0, 1), chunk(0, 1), x),
        "max_chunk_tokens": lambda m, x: next(
            m.prefill_into_kv(0, mx.arange(3), x, lambda t, s: [])
        ),
    }.items(),
)
def test_what_is_no_integer_is_refused_and_changes_nothing(name, call, value):
    manager = make_manager()
    manager.new_sequence(0, 3)
    with pytest.raises(ValueError, match=rf"^\[\w+\] {name} is .*: expected an integer"):
        call(manager, value)
    assert manager.table(0)[1] == 3 and manager.blocks_in_use == 1
    manager.check_integrity()


def test_integers_of_numpy_are_integers():
    sizes = LAYERS, KV_HEADS, DIM, 4, 8
    manager = KVBlockManager(*map(np.int64, sizes), v_head_dim=np.array([4, 6]))
    assert [v.shape for v in manager.v] == [(KV_HEADS, 8, 4, 4), (KV_HEADS, 8, 4, 6)]
    manager.new_sequence(np.int64(1), np.int64(3))
    tail = manager.ensure_tail_capacity(1, np.int32(2))
    assert manager.table(1)[1] == 5 and tail.slots.size == 2


def test_slots_are_int32():
    with pytest.raises(ValueError, match=r"max_blocks is 134217728: .* from 1 to 134217727"):
        make_manager(block_size=16, max_blocks=2**27)


def test_the_method_with_a_wrong_layer_is_named():
    manager, row = make_manager(), chunk(0, 1)
    manager.new_sequence(0, 1)
    with pytest.raises(ValueError, match=r"^\[write_prefill\] layer_idx is 9: expected"):
        manager.write_prefill(0, 9, row, row, 0)
    with pytest.raises(ValueError, match=r"^\[write_kv\] layer_idx is 9: expected"):
        manager.write_kv(9, row, row, mx.array([0]))
