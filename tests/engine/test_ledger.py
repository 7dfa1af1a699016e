"""The ledger of an engine's memory, compared with arrays, with /proc and with the allocator."""

import mmap
import platform
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_paged import Engine
from mlx_paged.engine.ledger import account
from mlx_paged.holdings import Holding, summed
from mlx_paged.system_memory import resident_bytes, unused_heap
from tests.support.models.architectures import build
from tests.support.models.tiny_models import tiny_model

LOAD = """
from bench.models import random_llama
from bench.names import REFERENCE
from mlx_paged import Engine
from scripts.ledger import accounts, deviation

size = REFERENCE | {"vocab_size": 1 << 16}
engine = Engine(random_llama(size), num_blocks=150, compile=False)
found = list(accounts(engine, 2048, waves=2, every=4))
print([deviation(each) for each in found], found[-1])
assert len(found) > 4
assert engine.metrics()["evictions"], "the pool was never full"
assert max(abs(deviation(each)) for each in found) < 0.05
"""
"""Half of the weights' 268 MB are embeddings, so that steps take little time."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="compares with Linux's figures")
def test_what_is_held_adds_up_to_what_the_process_has():
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="compares with Linux's pages")
def test_pages_in_memory_are_those_that_were_touched():
    memory = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    view = np.frombuffer(memory, np.uint8)
    address = view.__array_interface__["data"][0]
    assert resident_bytes(address, view.nbytes) == 0
    view[1 << 20 : 6 << 20] = 1
    assert resident_bytes(address, view.nbytes) == 5 << 20
    assert resident_bytes(address + (1 << 20) - 1, 2) == 1 * mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("architecture", "kv_bits"),
    [("llama", None), ("llama", 8), ("llama", 6), ("llama", 4), ("deepseek_v3", None)],
)
def test_the_memory_of_a_pool_of_any_type_is_found(architecture, kv_bits, dtype):
    model = build(architecture)
    model.set_dtype(dtype)
    engine = Engine(model, num_blocks=20, kv_bits=kv_bits)
    engine.generate([[1, 2, 3]], max_tokens=2)
    pool = engine.manager.pool
    assert sum(size for _, size in pool.places()) == pool.nbytes
    found = held(engine)
    assert found["pool_idle"] == pool.block_bytes
    assert found["pool_unused"] <= pool.nbytes + mmap.PAGESIZE * len(pool.places())


def test_unused_heap_is_what_glibc_tells():
    assert unused_heap() >= 0
    if platform.libc_ver()[0] == "glibc":
        assert unused_heap() > 0


def held(engine: Engine) -> dict[str, int]:
    return {name: line["bytes"] for name, line in engine.metrics()["memory"]["held"].items()}


def test_lines_are_what_arrays_and_blocks_are():
    model = tiny_model("llama")
    engine = Engine(model, block_size=4, num_blocks=64)
    assert held(engine)["weights"] == sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    ids = [engine.add_request([*range(1, 20)], max_tokens=30) for _ in range(2)]
    for _ in range(4):
        engine.step()
    block = sum(a[:, 0].nbytes for a in engine.manager.pool.handles())
    store = engine.manager.allocator.store
    in_use = sum(1 for count in store.counts if count)
    assert in_use > 6 and held(engine)["pool_live"] == in_use * block
    for each in ids:
        engine.abort(each)
    engine.settle()
    found = held(engine)
    assert found["pool_live"] == 0 and found["pool_idle"] == len(store.idle) * block > 0
    assert engine.metrics()["memory"]["held"]["pool_idle"]["limit"] == 64 * block


def test_states_and_snapshots_are_lines_of_recurrent_models():
    engine = Engine(build("qwen3_next"), block_size=4, num_blocks=64)
    engine.generate([[*range(1, 30)], [*range(3, 20)]], max_tokens=3)
    engine.add_request([*range(5, 15)], max_tokens=30)
    for _ in range(3):
        engine.step()
    found, states = held(engine), engine.manager.runner.states
    assert len(states) > 2
    arrays = [a for i in states._held for layer in states.copy(i) for a in layer]
    assert found["snapshots"] + found["states"] == sum(a.nbytes for a in arrays)
    assert found["states"] > 0 and found["snapshots"] > 0


def test_whoever_adds_a_holder_is_in_the_account():
    engine = Engine(tiny_model("llama"), num_blocks=16)
    before = engine.metrics()["memory"]["sum_bytes"]
    engine.ledger.holders.append(lambda: [Holding("feature", 10**12, 2 * 10**12)])
    found = engine.metrics()["memory"]
    assert found["held"]["feature"] == {"bytes": 10**12, "limit": 2 * 10**12}
    assert found["sum_bytes"] - before > 0.99 * 10**12


def test_arrays_of_a_line_are_not_counted_twice():
    arrays = mx.zeros((1 << 22,))
    mx.eval(arrays)
    own = account([Holding("own", arrays.nbytes, is_mlx=True)])
    none = account([])
    assert none["held"]["arrays"]["bytes"] - own["held"]["arrays"]["bytes"] == arrays.nbytes
    assert own["held"]["own"]["bytes"] == arrays.nbytes


def test_lines_of_one_name_are_summed():
    lines = [Holding("a", 1, 10), Holding("b", 2), Holding("a", 5, 20, True), Holding("b", 3, 7)]
    assert summed(lines) == [Holding("a", 6, 30), Holding("b", 5)]


def test_memory_that_is_kept_for_adapters_is_no_weight():
    model = build("llama")
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    for adapters in (None, {}):
        engine = Engine(model, num_blocks=8, adapters=adapters)
        assert engine.metrics()["memory"]["held"]["weights"]["bytes"] == weights
