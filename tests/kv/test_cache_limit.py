"""MLX's limit for freed buffers: set while engines live, and restored; the budget of an engine."""

import gc
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_paged import BatchGenerator, Engine, ops
from mlx_paged.kv.memory import (
    RECLAIM_SHARE,
    MemoryBudget,
    default_cache_limit,
    default_kv_memory,
    memory_in_use,
)
from tests.support.fake_macs import GB, NO_LIMIT, FakeMac, fake_mac
from tests.support.models.tiny_models import tiny_model

MIB = 2**20


@pytest.fixture
def mac(monkeypatch) -> FakeMac:
    return fake_mac(monkeypatch, "M4 Pro, 24 GB")


def test_a_tenth_of_the_working_set_while_an_engine_lives(mac, llama):
    engine = Engine(llama, max_kv_tokens=64)
    assert mac.cached == [NO_LIMIT, int(0.1 * mac.working_set)]
    engine.generate([[1, 2, 3]], max_tokens=3)
    del engine
    gc.collect()
    assert mac.cached == [NO_LIMIT, int(0.1 * mac.working_set), NO_LIMIT]


class TestWhatMLXKeeps:
    """What is freed while the former limit holds stays in MLX's cache, unless that is cleared."""

    @pytest.fixture
    def kept(self, mac, monkeypatch) -> list[int]:
        """Bytes of pools that are there each time that MLX's cache is cleared."""
        found: list[int] = []
        before = ops.reserved_bytes()
        monkeypatch.setattr(mx, "clear_cache", lambda: found.append(ops.reserved_bytes() - before))
        return found

    @pytest.mark.parametrize("ending", ["dropped", "closed", "under way", "in a cycle"])
    def test_the_pool_is_gone_when_the_cache_is_cleared(self, kept, llama, ending):
        engine = Engine(llama, num_blocks=32)
        engine.add_request([1, 2, 3], max_tokens=9)
        engine.step()
        if ending == "in a cycle":
            engine.manager.pool.k.append(engine.manager.pool)
        if ending != "under way":
            engine._settle()
        if ending == "closed":
            engine.close()
            assert kept == [engine.manager.pool.nbytes]
        del engine
        gc.collect()
        assert kept[-1] == 0

    def test_nothing_is_cleared_while_another_engine_may_compute(self, kept, llama):
        engine, other = (Engine(llama, num_blocks=32) for _ in range(2))
        engine.close()
        del engine
        gc.collect()
        assert kept == []
        del other
        gc.collect()
        assert kept == [0]

    def test_a_closed_engines_memory_is_cleared_after_a_wait(self, mac, llama, monkeypatch):
        engine = Engine(llama, num_blocks=32)
        engine.close()
        monkeypatch.setattr(mx, "clear_cache", lambda: mac.calls.append("clear"))
        mac.calls.clear()
        del engine
        gc.collect()
        assert mac.calls == [("synchronize", None), "clear"]

    def test_a_batch_generator_gives_its_pool_back(self, kept, llama):
        generator = BatchGenerator(llama, num_blocks=32)
        generator.insert([[1, 2, 3]], [3])
        generator.next()
        del generator
        gc.collect()
        assert kept[0] > kept[-1] == 0

    def test_a_draft_models_pool_is_gone_too(self, kept, llama):
        Engine(llama, num_blocks=32, draft_model=llama)
        gc.collect()
        assert kept[-1] == 0


def test_the_limits_are_held_before_the_pool_is_made(mac, llama, monkeypatch):
    """And so before kernels are compiled and a first step runs."""
    limits, zeros = [], ops.pool_zeros

    def made(*shape, **options) -> mx.array:
        limits.append(mac.cached[-1])
        return zeros(*shape, **options)

    monkeypatch.setattr(ops, "pool_zeros", made)
    Engine(llama, num_blocks=32)
    assert limits and max(limits) < NO_LIMIT


def test_a_pool_of_an_asked_size_needs_half_of_it_but_a_steps_arrays(mac):
    assert default_cache_limit(2 * GB, GB // 2) == GB
    assert default_cache_limit(2 * GB, 3 * GB // 2) == 3 * GB // 2
    assert default_cache_limit(100 * GB, GB) == int(0.1 * mac.working_set)


@pytest.mark.parametrize("pool", [None, GB, 100 * GB])
def test_the_arrays_of_a_step_are_kept_whatever_the_pool(mac, pool):
    assert default_cache_limit(pool, 3 * GB, beside=mac.working_set) == 3 * GB


@pytest.mark.parametrize("size", [{"kv_memory": 300 * MIB}, {"num_blocks": 1 << 17}])
def test_a_size_of_the_pool_is_known_to_the_limit(mac, llama, size):
    engine = Engine(llama, **size)
    budget = engine.memory_budget
    assert budget.pool == engine.manager.pool.nbytes
    assert budget.cache == max(budget.pool // 2, budget.step) < 0.1 * mac.working_set
    engine.close()


def test_the_largest_of_several_counts_until_its_engine_is_gone(mac, llama):
    engines = [Engine(llama, num_blocks=32, cache_limit=size * MIB) for size in (5, 9, 7)]
    for engine in (engines[1], engines[0], engines[2]):
        engine.close()
    assert mac.cached == [NO_LIMIT, *(size * MIB for size in (5, 9, 7)), NO_LIMIT]


def test_a_smaller_limit_of_the_caller_stays(mac, llama):
    """Whatever the engines ask for; the budget has it."""
    mac.cached.append(8 * MIB)
    engines = [Engine(llama, num_blocks=32, cache_limit=size * MIB) for size in (9, 7, 20)]
    assert mac.cached[-1] == 8 * MIB
    assert [engine.memory_budget.cache for engine in engines] == [8 * MIB, 7 * MIB, 8 * MIB]
    for engine, left in zip(engines[::2], (8, 7), strict=True):
        engine.close()
        assert mac.cached[-1] == left * MIB
    engines[1].close()
    assert mac.cached[-1] == 8 * MIB


def test_another_gpu_has_a_limit_but_wires_nothing(mac, llama, monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 80 * GB})
    Engine(llama, max_kv_tokens=64).close()
    assert mac.cached == [NO_LIMIT, 8 * GB, NO_LIMIT] and mac.wired == 0


def test_on_a_cpu_nothing_is_set(mac, llama, monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a CPU"})
    engine = Engine(llama, num_blocks=32, cache_limit=GB)
    assert mac.cached == [NO_LIMIT] and engine.memory_budget.cache is None
    assert "cache" not in str(engine.memory_budget)


def test_it_is_restored_where_the_device_fails(mac, llama, monkeypatch):
    def fail(stream=None) -> None:
        raise RuntimeError("device error")

    engine = Engine(llama, num_blocks=32)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "synchronize", fail)
        with pytest.raises(RuntimeError, match="device error"):
            engine.close()
    assert mac.cached[-1] == NO_LIMIT


def test_the_budget_has_the_weights_the_pools_and_the_snapshots(mac, llama):
    jamba = tiny_model("jamba")
    for model, others in ((llama, {"draft_model": llama}), (jamba, {})):
        engine = Engine(model, num_blocks=32, max_running=2, **others)
        budget, pooled = engine.memory_budget, engine.manager
        weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        assert budget.weights == (2 if others else 1) * weights
        snapshots = pooled.allocator.states.promised_bytes
        assert budget.pool == (2 if others else 1) * pooled.pool.nbytes + snapshots
        assert budget.parts == engine.stats.memory_budget


def test_where_plain_mlx_computes_what_it_gathers_counts(mac, llama, monkeypatch):
    """The pool that the device lets be is as large as with the kernels, less that."""
    full, engine = default_kv_memory(), Engine(llama, num_blocks=32)
    budget = engine.memory_budget
    assert budget.gathered == 0 and "gathered" not in budget.line
    monkeypatch.setitem(ops.refused, "write_kv_float", "planted")
    assert engine.memory_budget == budget  # its simplest form runs
    monkeypatch.setattr(ops, "plain", {"write_elements_float"})
    plain = engine.memory_budget
    assert plain.gathered > 0 and replace(plain, gathered=0) == budget
    assert default_kv_memory() == pytest.approx(full, rel=0.01)
    again = Engine(llama, num_blocks=32).memory_budget
    assert again.gathered == plain.gathered and again.cache >= again.step + again.gathered
    assert " + gathered " in again.line


def test_the_line_at_the_start_has_the_parts_their_sum_and_the_flags(mac):
    line = MemoryBudget(700_000_000, 6_750_000_000, 1_150_000_000, 400_000_000).line
    assert line == (
        "memory: at most 8.60 of 17.18 GB (weights 0.70 + pool 6.75 + cache 0.75 + step 0.40);"
        " --kv-memory and --cache-limit change it"
    )
    assert MemoryBudget(1, 2, None, 3).line.endswith("; --kv-memory changes it")
    told = MemoryBudget(1, 2, None, 3, tokens=13_104, bound="kv_memory").line
    assert "; the pool holds 13,104 tokens, bounded by kv_memory; --kv" in told
    too_much = MemoryBudget(1, mac.working_set, None, 3).line
    assert too_much.endswith(" it; this exceeds the working set: expect swapping")


@pytest.mark.parametrize("max_running", [1, 32, 256])
@pytest.mark.parametrize("model_type", ["llama", "jamba"])
def test_what_an_engine_takes_by_default_is_less_than_mlx_may_hold(
    monkeypatch, model_type, max_running, boundless
):
    """The states of running requests count."""
    mac = fake_mac(monkeypatch, "M3 Ultra, 512 GB")
    model = tiny_model(model_type)
    mx.eval(model.parameters())
    mac.others = int(0.85 * mac.working_set) - memory_in_use() - 900 * MIB
    budget = Engine(model, max_running=max_running).memory_budget
    held = mac.others + sum(budget.parts.values())
    assert budget.pool > 400 * MIB and held <= RECLAIM_SHARE * mac.working_set
    assert "swapping" not in budget.line


def test_what_the_cache_keeps_of_a_step_counts_once(mac):
    assert sum(MemoryBudget(1, 2, 10, 10).parts.values()) == 13
    assert sum(MemoryBudget(1, 2, 15, 10).parts.values()) == 18
    assert sum(MemoryBudget(1, 2, 5, 10).parts.values()) == 13
