"""Plain MLX in place of the kernels copies nothing of the pool, and gives mlx-lm's tokens."""

from collections.abc import Iterator
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine
from mlx_paged.kv.blocks import BlockCopy
from mlx_paged.kv.pool import KVPool, as_int32
from mlx_paged.kv.shapes import KVShape
from mlx_paged.ops.host import as_numpy
from tests.support.engine.plain_mlx import compute_plainly
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model
from tests.support.ops.numpy_quantization import quantized_mlx_lm

PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (5, 37, 61)]
SIZES = 64, 4096
NUM_TOKENS = 8
LARGE = 1 << 20
"""Bytes of each array of the larger pool, at least. Half of that is more than the peaks of two runs
of a step differ, which depend on when MLX's threads free arrays."""


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel of this package runs in an engine; MLX's CPU backend computes."""
    compute_plainly(monkeypatch)
    mx.clear_cache()
    yield
    mx.clear_cache()


def run(engine: Engine, forks: bool = False) -> tuple[dict[int, list[int]], list[int]]:
    """The tokens of each request, and for each step the most bytes that it took beside what was
    there."""
    ids = [engine.add_request(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
    tokens: dict[int, list[int]] = {each: [] for each in ids}
    peaks = []
    while engine.has_work:
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        for output in engine.step():
            tokens.setdefault(output.request_id, []).append(output.token)
        peaks.append(mx.get_peak_memory() - before)
        if forks and len(tokens[ids[0]]) >= 2:
            engine.fork(ids[0], max_tokens=3)
            forks = False
    assert engine.stats.faults == 0
    return {each: tokens[each] for each in ids}, peaks


@pytest.mark.sampled(3)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "deepseek_v3", "jamba", "gpt_oss", "gemma2"]
)
def test_a_step_takes_as_much_beside_a_large_pool_as_beside_a_small_one(name, compiled):
    model, found = tiny_model(name), []
    for num_blocks in SIZES:
        engine = Engine(model, num_blocks=num_blocks, prefill_chunk=24, compile=compiled)
        pool = engine._models.pooled.pool
        assert not pool.in_place and not engine.lookahead
        tokens, peaks = run(engine)
        found.append(peaks)
        assert [*tokens.values()] == [solo_greedy(model, p, NUM_TOKENS) for p in PROMPTS]
    assert min(handle.nbytes for handle in pool.k) >= LARGE
    assert max(found[1]) < max(found[0]) + LARGE // 2


@pytest.mark.parametrize("kv_bits", [8, 4])
def test_quantized_rows_are_written_without_copies(kv_bits):
    model, found = tiny_model("llama", head_dim=32), []
    for num_blocks in SIZES:
        engine = Engine(model, num_blocks=num_blocks, kv_bits=kv_bits)
        tokens, peaks = run(engine)
        found.append(peaks)
    with quantized_mlx_lm(kv_bits):
        assert [*tokens.values()] == [solo_greedy(model, p, NUM_TOKENS) for p in PROMPTS]
    assert min(handle.nbytes for handle in engine._models.pooled.pool.k) >= LARGE
    assert max(found[1]) < max(found[0]) + LARGE // 2


def addresses(pool: KVPool) -> list[int]:
    """Where each array of a pool begins in memory."""
    mx.eval(pool.handles())
    kinds = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
    arrays = (each.transpose(1, 0, 2, 3).view(kinds[each.itemsize]) for each in pool.handles())
    memories = map(as_numpy, arrays)
    return [memory.__array_interface__["data"][0] for memory in memories]


@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_no_array_of_the_pool_is_allocated_again(name, kv_bits):
    """A write that copies an array has its result in other memory."""
    model = tiny_model(name, **({"head_dim": 32} if name == "llama" else {}))
    model.set_dtype(mx.bfloat16)
    engine = Engine(model, num_blocks=64, prefill_chunk=24, kv_bits=kv_bits, compile=False)
    pool, num_steps, num_moved = engine.manager.pool, 0, 0
    for prompt in PROMPTS:
        engine.add_request(prompt, max_tokens=NUM_TOKENS)
    before = addresses(pool)
    while engine.has_work:
        engine.step()
        after = addresses(pool)
        num_moved += sum(x != y for x, y in zip(before, after, strict=True))
        num_steps, before = num_steps + 1, after
    assert num_steps > NUM_TOKENS and num_moved == 0


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_completion_handlers_have_run_before_a_step_writes(name, monkeypatch):
    """Of jamba, before each forward of a step: prompts have one of their own."""
    done: list[str] = []
    synchronize, write = mx.synchronize, KVPool._scatter
    monkeypatch.setattr(mx, "synchronize", lambda: [done.append("wait"), synchronize()])
    monkeypatch.setattr(
        KVPool, "_scatter", lambda *given: [done.append(f"layer {given[1]}"), write(*given)]
    )
    model = tiny_model(name)
    engine = Engine(model, num_blocks=64, prefill_chunk=24, compile=False)
    run(engine)
    num_layers = engine.manager.pool.n_layers
    events = "; ".join(done).replace("; ".join(f"layer {i}" for i in range(num_layers)), "write")
    assert {*events.split("; ")} == {"wait", "write"}
    assert "write; write" not in events and events.count("wait") >= engine.stats.steps


def test_arrays_of_a_pool_are_made_while_mlxs_cache_is_empty():
    """For a buffer of the cache may be so large that each write would copy the array."""
    freed = mx.zeros((LARGE,))
    mx.eval(freed)
    del freed
    assert mx.get_cache_memory() >= LARGE
    pool, _ = filled()
    assert not pool.changes_in_place and mx.get_cache_memory() < LARGE


def test_a_fork_copies_a_block_and_no_pool():
    model, found = tiny_model("llama"), []
    for num_blocks in SIZES:
        engine = Engine(model, num_blocks=num_blocks, block_size=8)
        tokens, peaks = run(engine, forks=True)
        assert engine.stats.cow_clones > 0
        assert [*tokens.values()] == [solo_greedy(model, p, NUM_TOKENS) for p in PROMPTS]
        found.append(max(peaks))
    assert found[1] < found[0] + LARGE // 2


def test_mlx_traces_decodes_of_plain_mlx():
    engine = Engine(tiny_model("llama"), num_blocks=64, compile=True)
    runner = engine._models.runner
    assert runner.why_plain is None and runner.compiled is not None
    traced = runner.compiled.traces.count
    run(engine)
    assert runner.compiled.traces.count >= traced > 0


def filled(num_blocks: int = 6) -> tuple[KVPool, np.ndarray]:
    """A pool of one layer, and what its keys are: ``[2, num_blocks, 4, 8]``."""
    pool = KVPool([KVShape(2, 8, 8, mx.float32)], num_blocks, 4)
    rows = np.random.default_rng(0).normal(size=(num_blocks * 4, 2, 8)).astype(np.float32)
    pool.write(0, mx.array(rows), mx.array(rows), as_int32(range(num_blocks * 4)))
    return pool, rows.reshape(num_blocks, 4, 2, 8).transpose(2, 0, 1, 3)


@pytest.mark.parametrize("lazy", [False, True])
def test_rows_without_a_slot_change_no_block(lazy):
    pool, want = filled()
    slots = mx.array([-1, 5, 24, 2**31 - 1, -(2**31), 23], mx.int32)
    rows = mx.arange(6 * 16, dtype=mx.float32).reshape(6, 2, 8)
    pool.write(0, rows, rows, slots + mx.zeros_like(slots) if lazy else slots)
    want[:, 1, 1], want[:, 5, 3] = as_numpy(rows)[1], as_numpy(rows)[5]
    np.testing.assert_array_equal(as_numpy(pool.k[0])[:, :6], want)
    np.testing.assert_array_equal(as_numpy(pool.v[0])[:, :6], want)


def test_the_host_reads_no_slots(monkeypatch):
    pool, _ = filled()

    def read(*_):
        raise AssertionError("the host reads an array")

    monkeypatch.setattr("mlx_paged.ops.fallback.as_numpy", read)
    rows = mx.ones((2, 2, 8))
    pool.write(0, rows, rows, mx.array([3, -1], mx.int32))


def test_pools_grow_move_and_begin_again():
    pool, want = filled()
    pool.copy_blocks([BlockCopy(1, 4), BlockCopy(4, 0)])
    want = want[:, [1, 1, 2, 3, 1, 5]]
    np.testing.assert_array_equal(as_numpy(pool.k[0])[:, :6], want)
    pool.write(0, mx.ones((1, 2, 8)), mx.ones((1, 2, 8)), mx.array([-1], mx.int32))
    pool.grow(9)
    grown = np.concatenate([want, np.zeros((2, 3, 4, 8), np.float32)], axis=1)
    np.testing.assert_array_equal(as_numpy(pool.k[0])[:, :9], grown)
    pool.keep(np.array([5, 2], np.int32), 3)
    assert pool.num_blocks == 3
    np.testing.assert_array_equal(as_numpy(pool.v[0])[:, :2], want[:, [5, 2]])
    pool.reset_handles()
    assert all(not mx.any(handle) for handle in pool.handles())


def test_after_a_failure_an_engine_goes_on(monkeypatch):
    model = tiny_model("llama")
    engine = Engine(model, num_blocks=64)
    runner, begin, failed = engine._models.runner, mx.eval, []

    def fail_once(*arrays):
        if not failed and engine.stats.steps == 2:
            failed.append(True)
            raise RuntimeError("planted")
        return begin(*arrays)

    fake = SimpleNamespace(**{name: getattr(mx, name) for name in dir(mx)} | {"eval": fail_once})
    monkeypatch.setattr("mlx_paged.runner.model_runner.mx", fake)
    done = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    assert failed and engine.stats.faults == 1 and runner.error is None
    assert [each.tokens for each in done] == [solo_greedy(model, p, NUM_TOKENS) for p in PROMPTS]
