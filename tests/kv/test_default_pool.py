"""What bounds a default pool, and what it leaves to others; the table of docs/on-a-mac.md."""

from unittest import mock

import mlx.core as mx
import pytest

from mlx_paged import Engine, system_memory
from mlx_paged.kv.default_pool import Beside, Needs, default_blocks, largest_default
from mlx_paged.kv.layer_groups import LayerGroup, plan_pool
from mlx_paged.kv.memory import (
    MemoryBudget,
    default_cache_limit,
    default_kv_memory,
    memory_in_use,
    spare_memory,
)
from mlx_paged.kv.pool import planned_block_bytes
from mlx_paged.kv.shapes import KVShape
from tests.gpu_memory import report
from tests.support.documents import ROOT
from tests.support.fake_macs import GB, FakeMac, fake_mac

MIB = 2**20
BLOCK = 16
MACS_OF_THE_TABLE = {
    8: 5_726_633_984,
    16: 11_453_251_584,
    24: 17_179_869_184,
    36: 28_991_029_248,
    64: 51_539_607_552,
    128: 103_079_215_104,
}
"""Recommended working sets by the memory in GB."""

LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
LLAMA_1B |= {"head_dim": 64, "tie_word_embeddings": True}
SHAPES = {
    "llama 1B": [KVShape(8, 64, 64, mx.bfloat16)] * 16,
    "llama 8B": [KVShape(8, 128, 128, mx.bfloat16)] * 32,
}
WEIGHTS = {"llama 1B": 0.7, "llama 8B": 4.5}
"""GB in 4 bits."""

PLAIN = ", plain MLX"


@pytest.fixture(scope="module")
def steps() -> dict[str, int]:
    """Bytes of a step of each model in the table."""
    model_class, args, config = report.MODELS["llama 8B"]
    with mock.patch.dict(report.MODELS, {"llama 1B": (model_class, args, config | LLAMA_1B)}):
        return {
            name + kind: report.promised(report.made(name), plain)
            for name in SHAPES
            for kind, plain in (("", False), (PLAIN, True))
        }


@pytest.fixture
def mac(monkeypatch) -> FakeMac:
    mac = fake_mac(monkeypatch, "M1, 8 GB")
    mac.memory, mac.working_set = 17_179_869_184, MACS_OF_THE_TABLE[16]
    return mac


def needs_of(shapes: list[KVShape], **more: int | None) -> tuple[int, Needs]:
    """Bytes of a block, and what 32 sequences need."""
    plan = plan_pool(shapes, [None] * len(shapes), BLOCK)
    given = {"max_running": 32, "positions": 131_072, "kv_tokens": None} | more
    return planned_block_bytes(plan.arrays), Needs.of(plan.groups, BLOCK, 2048, **given)


def budget_of(
    mac: FakeMac, weights: float, shapes: list[KVShape], step: int, **more: int | None
) -> MemoryBudget:
    """Of an engine by default, beside weights of so many GB."""
    mac.others += int(weights * GB) - memory_in_use()
    block_bytes, needs = needs_of(shapes, **more)
    cache = default_cache_limit(None, step) or 0
    num_blocks, bound = default_blocks(block_bytes, needs, Beside(step, max(0, cache - step), 0))
    pool = num_blocks * block_bytes
    cache = default_cache_limit(None, step, memory_in_use() + pool + step)
    return MemoryBudget(int(weights * GB), pool, cache, step, 0, num_blocks * BLOCK, bound)


def before(mac: FakeMac, weights: float, step: int) -> tuple[float, float]:
    """GB of the pool, and of all, when only the device bounded both it and the cache."""
    mac.others += int(weights * GB) - memory_in_use()
    cache = mac.working_set // 10
    pool = default_kv_memory(step + cache)
    left = int(0.95 * mac.working_set) - memory_in_use() - pool - step
    cache = max(cache // 2, min(cache, left))
    return pool / GB, weights + (pool + cache + step) / GB


@pytest.mark.parametrize("size", MACS_OF_THE_TABLE)
def test_the_document_has_the_default_pools_of_macs(mac, size, steps):
    """Half of each Mac's memory is available when the weights are loaded."""
    mac.working_set, mac.available = MACS_OF_THE_TABLE[size], size * GB // 2
    cells = [f"{mac.working_set / GB:.2f}", f"{mac.available / GB:.0f}"]
    for name, shapes in SHAPES.items():
        cells += [f"{gigabytes:.2f}" for gigabytes in before(mac, WEIGHTS[name], steps[name])]
        try:
            budget = budget_of(mac, WEIGHTS[name], shapes, steps[name])
        except ValueError:
            cells += ["refused", ""]
            assert spare_memory() < steps[name] + needs_of(shapes)[0] * 1024
            continue
        parts = budget.parts.values()
        assert sum(parts) <= mac.working_set and "swapping" not in budget.line
        assert sum(parts) - budget.weights <= mac.available
        sizes = " + ".join(f"{part / GB:.2f}" for part in parts)
        cells += [f"{sizes} = {sum(parts) / GB:.2f}", f"{budget.tokens:,}, {budget.bound}"]
    row = f"| {size} | {' | '.join(cells)} |"
    print(row)
    assert row in (ROOT / "docs/on-a-mac.md").read_text().splitlines(), row


def divided(mac: FakeMac, weights: float, shapes: list[KVShape], step: int) -> str:
    """GB of the pool when six pools were counted as copies of plain MLX."""
    mac.others += int(weights * GB) - memory_in_use()
    block_bytes, needs = needs_of(shapes)
    beside = step + max(0, (default_cache_limit(None, step) or 0) - step)
    bounds = default_kv_memory(beside), mac.available * 5 // 16 - beside
    one = needs.one * block_bytes
    if 7 * one + step > min(spare_memory(), mac.available):
        return "refused"
    return f"{max(one, min(*(each // 7 for each in bounds), needs.usual * block_bytes)) / GB:.2f}"


@pytest.mark.parametrize("size", MACS_OF_THE_TABLE)
def test_the_document_has_the_default_pools_of_plain_mlx(mac, size, steps):
    mac.working_set, mac.available = MACS_OF_THE_TABLE[size], size * GB // 2
    cells = []
    for name, shapes in SHAPES.items():
        step, plain = steps[name], steps[name + PLAIN]
        cells.append(divided(mac, WEIGHTS[name], shapes, step))
        try:
            budget = budget_of(mac, WEIGHTS[name], shapes, plain)
        except ValueError:
            cells += ["refused", ""]
            continue
        assert sum(budget.parts.values()) - budget.weights <= mac.available
        cells += [f"{budget.pool / GB:.2f} + {step / GB:.2f} + {max(0, plain - step) / GB:.2f}"]
        cells += [f"{budget.tokens:,}, {budget.bound}"]
    row = f"| {size} | {' | '.join(cells)} |"
    print(row)
    assert row in (ROOT / "docs/on-a-mac.md").read_text().splitlines(), row


@pytest.mark.parametrize("name", SHAPES)
def test_a_small_model_leaves_five_of_eight_gigabytes(mac, name):
    """0.4 GB of weights on 16 GB of which 8 are available: 3 GB at most in all."""
    mac.available = 8 * GB
    for step in (GB // 10, GB, int(1.9 * GB)):
        budget = budget_of(mac, 0.4, SHAPES["llama 1B"][: 4 if name == "llama 8B" else 16], step)
        assert sum(budget.parts.values()) <= 3 * GB


class TestBounds:
    def test_the_least_bounds_and_is_named(self, mac):
        block_bytes, needs = needs_of(SHAPES["llama 1B"])
        beside = Beside(GB // 2, GB // 2, GB // 4)
        usual = needs.usual * block_bytes

        def found(**more: int) -> tuple[int, str]:
            return default_blocks(block_bytes, needs_of(SHAPES["llama 1B"], **more)[1], beside)

        mac.working_set, mac.available = 100 * GB, 1000 * GB
        assert found() == (needs.usual, "32 sequences of up to 8,192 tokens")
        mac.available = 32 * GB // 10 * 3
        left = mac.available * 5 // 16 - GB - GB // 4
        assert found() == (left // block_bytes, "the memory that is available")
        mac.available, mac.working_set = 1000 * GB, 12 * GB
        device = default_kv_memory(GB) - GB // 4
        assert found() == (device // block_bytes, "the memory of the device")
        assert device < usual
        assert found(max_running=1) == (1024, "one request of 16,384 tokens")
        assert found(positions=512) == (32 * 32, "32 sequences of up to 8,192 tokens")
        assert found(kv_tokens=100) == (7, "the tokens that are asked for")

    def test_layers_with_windows_need_fewer_blocks(self):
        groups = LayerGroup(), LayerGroup(64)
        needs = Needs.of(groups, BLOCK, 32, 2, 4096, None)
        of_window = (64 + 32 + 2 * BLOCK) // BLOCK
        assert needs.usual == 2 * (4096 // BLOCK + of_window)
        assert needs.one == 4096 // BLOCK + of_window and needs.tokens == 4096

    def test_a_system_that_tells_nothing_bounds_nothing(self, mac, monkeypatch):
        block_bytes, needs = needs_of(SHAPES["llama 1B"])
        monkeypatch.setattr(system_memory, "available_memory", lambda: None)
        _, bound = default_blocks(block_bytes, needs, Beside(GB, 0, 0))
        assert bound == "the memory of the device" and largest_default() == default_kv_memory()


class TestRefusal:
    def test_names_the_figures_and_the_flag(self, mac):
        """Not where the request just fits."""
        block_bytes, needs = needs_of(SHAPES["llama 8B"])
        step, one = 2 * GB, needs.one * block_bytes
        mac.others += GB - memory_in_use()
        mac.available = step + one
        assert default_blocks(block_bytes, needs, Beside(step, 0, 0))[0] == needs.one
        mac.available -= 1
        message = (
            rf"one request of 16384 tokens takes {one} bytes .* and a step {step} bytes.* but "
            rf"{spare_memory()} bytes.* left on the device, {mac.available} bytes.*--kv-memory"
        )
        with pytest.raises(ValueError, match=message):
            default_blocks(block_bytes, needs, Beside(step, 0, 0))

    def test_a_size_that_is_given_is_not_refused(self, mac, llama):
        mac.available = MIB
        with pytest.raises(ValueError, match="one request of 1024 tokens"):
            Engine(llama)
        engine = Engine(llama, kv_memory=2 * MIB)
        assert engine.memory_budget.bound == "kv_memory"
        assert Engine(llama, num_blocks=8).memory_budget.tokens == 8 * BLOCK


def test_an_engine_says_what_bounds_its_pool(mac, llama):
    budget = Engine(llama, max_running=3).memory_budget
    assert budget.tokens == 3 * 1024
    assert "the pool holds 3,072 tokens, bounded by 3 sequences of up to 8,192" in budget.line


def test_on_linux_the_available_memory_bounds_too(monkeypatch, llama, boundless):
    if mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("there is a GPU")
    monkeypatch.setattr(system_memory, "available_memory", lambda: 600 * MIB)
    budget = Engine(llama).memory_budget
    assert budget.bound == "the memory that is available"
    assert 180 * MIB < budget.pool <= 600 * MIB * 5 // 16
    monkeypatch.setattr(system_memory, "available_memory", lambda: MIB)
    with pytest.raises(ValueError, match="one request of 16384 tokens"):
        Engine(llama)
