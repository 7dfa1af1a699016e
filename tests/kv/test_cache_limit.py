"""MLX's limit for freed buffers: set while engines live, and restored; the budget of an engine."""

import gc

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_paged import Engine
from mlx_paged.kv.memory import MemoryBudget, default_cache_limit
from tests.support.fake_macs import GB, NO_LIMIT, FakeMac, fake_mac
from tests.support.models.tiny_models import tiny_model

MIB = 2**20


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


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


def test_a_pool_of_an_asked_size_needs_half_of_it_but_a_steps_arrays(mac):
    assert default_cache_limit(2 * GB, GB // 2) == GB
    assert default_cache_limit(2 * GB, 3 * GB // 2) == 3 * GB // 2
    assert default_cache_limit(100 * GB, 50 * GB) == int(0.1 * mac.working_set)


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
    monkeypatch.setattr(mx, "synchronize", fail)
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
        snapshots = pooled.max_snapshots * pooled.profile.state_bytes
        assert budget.pool == (2 if others else 1) * pooled.pool.nbytes + snapshots
        assert budget.parts == engine.stats.memory_budget


def test_the_line_at_the_start_has_the_parts_their_sum_and_the_flags(mac):
    line = MemoryBudget(700_000_000, 6_750_000_000, 1_150_000_000, 400_000_000).line
    assert line == (
        "memory: weights 0.70 + pool 6.75 + cache 1.15 + step 0.40 = 9.00 of 17.18 GB; "
        "--kv-memory and --cache-limit change it"
    )
    assert MemoryBudget(1, 2, None, 3).line.endswith("; --kv-memory changes it")
