"""How large pools are by default, and which are refused, on Macs of several sizes."""

import gc

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_paged import Engine, make_prompt_cache, ops
from mlx_paged.drop_in.kv_caches import PagedKVCache
from mlx_paged.drop_in.pool_layer import layer_of
from mlx_paged.drop_in.shared_pool import SharedPool
from mlx_paged.kv import memory
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.blocks import OutOfBlocksError
from mlx_paged.kv.layer_groups import plan_pool
from mlx_paged.kv.memory import (
    default_kv_memory,
    memory_in_use,
    physical_memory,
    spare_memory,
)
from mlx_paged.kv.shapes import KVShape
from mlx_paged.runner.model_probe import probe
from tests.support.fake_macs import GB, MACS, FakeMac, fake_mac
from tests.support.models.tiny_models import tiny_model

MIB = 2**20
BLOCK = 16
LLAMA_8B = [KVShape(8, 128, 128, mx.bfloat16)] * 32
LLAMA_8B_BLOCK = BLOCK * 131_072
MARGINS = {"M1, 8 GB": 0.75 * GB, "M4 Pro, 24 GB": 3.14 * GB, "M3 Ultra, 512 GB": 41 * GB}


@pytest.fixture
def jamba():
    return tiny_model("jamba")


@pytest.fixture
def llama():
    return tiny_model("llama")


@pytest.fixture(params=MACS)
def mac(monkeypatch, request) -> FakeMac:
    return fake_mac(monkeypatch, request.param)


@pytest.fixture
def m1(monkeypatch) -> FakeMac:
    return fake_mac(monkeypatch, "M1, 8 GB")


def num_blocks_for(shapes: list[KVShape], block_size: int, *budget: int | None, **more: int) -> int:
    """Blocks of layers that share no arrays."""
    plan = plan_pool(shapes, [None] * len(shapes), block_size)
    return memory.num_blocks_for(plan, block_size, *budget, **more)


def leave(mac: FakeMac, spare: int) -> None:
    """Let others use so much of the memory that `spare` bytes are left for a pool: on a small Mac
    half of what can be spared."""
    mac.others = 0
    mac.others = spare_memory() - spare
    mac.others -= spare if default_kv_memory() < spare else 0
    assert default_kv_memory() == spare


def pool_bytes(engine: Engine) -> int:
    return engine.manager.pool.nbytes


@pytest.mark.slow
def test_a_small_model_on_a_large_mac_gets_no_more_slots_than_int32_can_number(monkeypatch):
    fake_mac(monkeypatch, "M3 Ultra, 512 GB")
    shapes = [KVShape(1, 8, 8, mx.bfloat16)]
    num_blocks = num_blocks_for(shapes, BLOCK, None)
    assert num_blocks == 2**31 // BLOCK - 1
    with pytest.raises(ValueError):
        BlockAllocator(num_blocks + 1, BLOCK)


@pytest.mark.slow
@pytest.mark.parametrize("name", MACS)
def test_the_default_leaves_room_below_the_limit_from_which_mlx_gives_memory_back(
    monkeypatch, name
):
    mac = fake_mac(monkeypatch, name)
    mac.others = int(4.5 * GB) - memory_in_use()  # what earlier tests left is in use, too
    weights = mx.get_active_memory()
    pool = num_blocks_for(LLAMA_8B, BLOCK, None) * LLAMA_8B_BLOCK
    room = 0.95 * mac.working_set - (weights + pool)
    assert MARGINS[name] <= room <= 1.05 * MARGINS[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gigabytes"), [("M1, 8 GB", 0.18), ("M4 Pro, 24 GB", 8.68), ("M3 Ultra, 512 GB", 346)]
)
def test_the_default_beside_the_weights_of_an_8b_model_in_4_bits(monkeypatch, name, gigabytes):
    mac = fake_mac(monkeypatch, name)
    mac.others = int(4.5 * GB) - memory_in_use()  # what earlier tests left is in use, too
    pool = num_blocks_for(LLAMA_8B, BLOCK, None) * LLAMA_8B_BLOCK
    assert pool / GB == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.slow
def test_weights_that_are_not_computed_yet_count(m1, llama, boundless):
    others = llama.parameters()
    llama.update(tree_map(lambda weight: weight + 1, others))
    weights = sum(array.nbytes for _, array in tree_flatten(others))
    leave(m1, 300 * MIB)
    engine = Engine(llama)
    assert weights > 4 * engine.manager.pool.block_bytes
    assert pool_bytes(engine) <= 300 * MIB - weights // 2  # half of what can be spared on this Mac


def counted() -> int:
    """Bytes that MLX counts, and those of pools."""
    return mx.get_active_memory() + ops.reserved_bytes()


class TestSeveralEngines:
    @pytest.mark.slow
    def test_the_second_gets_what_the_first_left(self, mac, llama, boundless):
        leave(mac, 300 * MIB)
        Engine(llama, num_blocks=1)  # what a trace of the model leaves is in use from now on
        first = Engine(llama, kv_memory=3 * MIB)
        left = default_kv_memory()
        second = Engine(llama)
        assert left < 300 * MIB and pool_bytes(first) <= 3 * MIB
        assert left // 2 < pool_bytes(second) + 4 * second.manager.pool.block_bytes
        assert pool_bytes(second) <= left  # a step has the other half, or less

    @pytest.mark.slow
    def test_where_nothing_is_left_an_error_says_so(self, mac, llama, boundless):
        leave(mac, 300 * MIB)
        first = Engine(llama)
        size = pool_bytes(first)
        mac.others += spare_memory()
        gc.collect()  # numbers of earlier tests must not be freed meanwhile
        with pytest.raises(ValueError, match=r"but 0 bytes are left on the device"):
            Engine(llama)
        del first
        leave(mac, 300 * MIB)
        assert pool_bytes(Engine(llama)) == pytest.approx(size, rel=0.01)

    @pytest.mark.slow
    def test_paged_caches_get_what_an_engine_left(self, m1, llama):
        leave(m1, 300 * MIB)
        engine = Engine(llama)
        m1.others += spare_memory()
        with pytest.raises(OutOfBlocksError):
            llama(mx.zeros((1, 200), mx.int32), cache=make_prompt_cache(llama))
        size = pool_bytes(engine)
        del engine
        assert spare_memory() >= size
        llama(mx.zeros((1, 200), mx.int32), cache=make_prompt_cache(llama))

    @pytest.mark.slow
    def test_snapshots_count_before_they_are_taken(self, m1, jamba):
        in_use = memory_in_use()
        engine = Engine(jamba, num_blocks=64, block_size=BLOCK, max_running=2)
        snapshots = engine.manager.allocator.states.snapshots
        state_bytes = probe(jamba).states.num_bytes
        assert memory_in_use() - counted() == 8 * state_bytes > 0
        engine.generate([[1] * 40], max_tokens=2)
        assert len(snapshots) > 0
        yet_to_come = memory_in_use() - counted()
        assert yet_to_come == (8 - len(snapshots)) * state_bytes
        del engine, snapshots
        assert memory_in_use() < in_use + MIB


class TestTooMuch:
    @pytest.mark.slow
    def test_more_than_is_left_is_refused(self, mac):
        mac.others = 3 * GB
        in_use = memory_in_use()
        left = mac.working_set - in_use
        message = (
            rf"\[Engine\] kv_memory is {left + 1} bytes \({left / 1e9:.3f} GB\), but the device "
            rf"can hold {mac.working_set} bytes .* and {in_use} bytes.* are in use: expected at "
            rf"most {left} bytes \({left / 1e9:.3f} GB\)$"
        )
        with pytest.raises(ValueError, match=message):
            num_blocks_for(LLAMA_8B, BLOCK, left + 1)
        assert num_blocks_for(LLAMA_8B, BLOCK, left) == left // LLAMA_8B_BLOCK

    def test_snapshots_that_are_to_come_are_not_left(self, m1):
        gc.collect()  # memory of earlier tests must not be freed meanwhile
        left = m1.working_set - memory_in_use()
        assert num_blocks_for(LLAMA_8B, BLOCK, left - GB, reserved=GB)
        with pytest.raises(ValueError, match=f"expected at most {left - GB} bytes"):
            num_blocks_for(LLAMA_8B, BLOCK, left - GB + 1, reserved=GB)

    @pytest.mark.slow
    def test_paged_caches_are_refused_more_than_the_device_holds(self, mac, llama):
        make_prompt_cache(llama, kv_memory=mac.working_set)
        most = mac.working_set
        message = rf"kv_memory is {most + 1} bytes \(.* GB\): expected at most {most} bytes"
        with pytest.raises(ValueError, match=message):
            make_prompt_cache(llama, kv_memory=mac.working_set + 1)

    def test_on_another_gpu_memory_is_its_own(self, monkeypatch, llama):
        """MLX's CUDA backend names it and recommends no working set."""
        mx.eval(llama.parameters())
        monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": GB})
        assert memory.device_memory() == GB
        with pytest.raises(ValueError, match="expected at most"):
            Engine(llama, kv_memory=2 * GB)

    def test_on_a_cpu_memory_is_the_machines(self):
        if mx.default_device() != mx.Device(mx.cpu):
            pytest.skip("there is a GPU")
        with pytest.raises(ValueError, match=f"the device can hold {physical_memory()} bytes"):
            num_blocks_for(LLAMA_8B, BLOCK, physical_memory() + 1)


LAYERS = {
    "wide values": (KVShape(8, 128, 192, mx.bfloat16), 8 * 192 * 2),
    "wide keys": (KVShape(8, 192, 128, mx.bfloat16), 8 * 192 * 2),
    "latents": (KVShape(1, 576, 512, mx.bfloat16, latent=True), 576 * 2),
}


class TestLongArrays:
    """A single layer, whose keys are as long as Metal lets an array be."""

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", LAYERS)
    def test_bound_the_default(self, mac, kind):
        shape, token_bytes = LAYERS[kind]
        mac.longest_buffer = GB
        num_blocks = num_blocks_for([shape], BLOCK, None)
        assert num_blocks == GB // (BLOCK * token_bytes)

    @pytest.mark.slow
    def test_do_not_matter_where_memory_ends_before(self, mac):
        assert num_blocks_for(LLAMA_8B, BLOCK, None) == default_kv_memory() // LLAMA_8B_BLOCK

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", LAYERS)
    def test_are_refused(self, mac, kind):
        shape, token_bytes = LAYERS[kind]
        mac.longest_buffer = GB
        most = GB // (BLOCK * token_bytes) * BLOCK * shape.token_bytes
        assert num_blocks_for([shape], BLOCK, most) == GB // (BLOCK * token_bytes)
        message = (
            rf"kv_memory is {most + 1} bytes .*, but an array .* {GB} bytes .* at most {most} bytes"
        )
        with pytest.raises(ValueError, match=message):
            num_blocks_for([shape], BLOCK, most + 1)

    @pytest.mark.slow
    @pytest.mark.parametrize("kv_memory", [None, MIB])
    def test_bound_a_pool_that_grows(self, m1, kv_memory):
        m1.longest_buffer = 10 * 2 * BLOCK * 16 * 4  # ten blocks of 2 heads of 16 float32
        layer = layer_of(SharedPool(1, BLOCK, kv_memory), 0)
        cache = PagedKVCache.of(layer, [layer.pool.new_sequence()], [0])
        cache.update_and_fetch(*[mx.zeros((1, 2, 10 * BLOCK, 16))] * 2)
        assert layer.pool.allocator.num_blocks == 10
        with pytest.raises(OutOfBlocksError):
            cache.update_and_fetch(*[mx.zeros((1, 2, 1, 16))] * 2)
