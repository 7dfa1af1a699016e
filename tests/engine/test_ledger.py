"""The ledger of an engine's memory, compared with arrays, with /proc and with the allocator."""

import ast
import ctypes
import mmap
import platform
import subprocess
import sys
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_paged import Engine, ops, system_memory
from mlx_paged.engine import ledger
from mlx_paged.engine.ledger import account, process_bytes
from mlx_paged.holdings import CountedBy, Holding, summed
from mlx_paged.metrics import stats
from mlx_paged.system_memory import c_heap, resident_bytes
from tests.support.models.architectures import build
from tests.support.models.tiny_models import tiny_model

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc tells of its heap")

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


@glibc
@pytest.mark.parametrize(("size", "count"), [(1000, 8000), (8 << 20, 1)])
def test_the_heap_in_use_is_what_malloc_gave_out(size, count):
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    before = lines()["objects"]
    taken = [library.malloc(ctypes.c_size_t(size)) for _ in range(count)]
    assert size * count <= lines()["objects"] - before < 1.1 * size * count
    for each in taken:
        library.free(ctypes.c_void_p(each))
    assert abs(lines()["objects"] - before) < 1 << 20
    assert c_heap().unused > 0


@glibc
def test_arrays_in_the_heap_are_no_objects():
    before = lines()
    arrays = [mx.ones((size,)) for size in [1000] * 4000 + [1 << 23]]
    mx.eval(arrays)
    found = lines()
    size = sum(each.nbytes for each in arrays)
    assert 1 <= (found["arrays"] - before["arrays"]) / size < 1.1
    assert abs(found["objects"] - before["objects"]) < size / 10


@glibc
def test_lines_in_the_heap_are_not_counted_twice():
    own = lines([Holding("own", 1 << 20, counted_by=CountedBy.HEAP)])
    assert own["own"] == 1 << 20
    assert abs(lines()["objects"] - own["objects"] - own["own"]) < 1 << 16


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts pages of files")
def test_pages_of_files_are_a_line(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(16 << 20))
    before, process = lines()["mapped_files"], process_bytes()
    pages = np.memmap(path, np.uint8, "r")
    assert not pages[:: mmap.PAGESIZE].any()
    found = lines()["mapped_files"] - before
    assert 16 << 20 <= found < 18 << 20
    assert abs(process_bytes() - process - found) < 2 << 20


@pytest.fixture
def first_engine():
    """As if no engine was made yet: `libraries` is measured anew, here and afterwards."""
    ledger.libraries_bytes.cache_clear()
    yield
    ledger.libraries_bytes.cache_clear()


@pytest.mark.usefixtures("first_engine")
def test_systems_without_these_figures_have_lines_of_zero(monkeypatch):
    monkeypatch.setattr(system_memory, "_c_library", object)
    monkeypatch.setattr(stats, "STATM", "/nowhere/statm")
    found = lines()
    assert found["objects"] == found["unused_heap"] == found["mapped_files"] == 0
    counted = found["arrays"] + found["freed_buffers"] + ops.reserved_bytes()
    assert lines()["libraries"] == max(0, process_bytes() - counted)


def test_what_another_line_has_is_not_in_libraries_too():
    code = "from mlx_paged.engine.ledger import account; print(account([]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = ast.literal_eval(done.stdout)
    assert abs(found["sum_bytes"] / found["process_bytes"] - 1) < 0.02


def lines(found: Sequence[Holding] = ()) -> dict[str, int]:
    return {name: line["bytes"] for name, line in account(found)["held"].items()}


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
    assert engine.metrics()["memory"]["held"]["states"]["limit"] is None


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
    own = account([Holding("own", arrays.nbytes, counted_by=CountedBy.MLX)])
    none = account([])
    assert none["held"]["arrays"]["bytes"] - own["held"]["arrays"]["bytes"] == arrays.nbytes
    assert own["held"]["own"]["bytes"] == arrays.nbytes


def test_lines_of_one_name_are_summed():
    mlx = CountedBy.MLX
    parts = [Holding("a", 1, 10), Holding("b", 2), Holding("a", 5, 20, mlx), Holding("b", 3, 7)]
    assert summed(parts) == [Holding("a", 6, 30), Holding("b", 5)]
    assert summed([Holding("a", 1, 10, mlx), parts[2]]) == [Holding("a", 6, 30, mlx)]


def test_memory_that_is_kept_for_adapters_is_no_weight():
    model = build("llama")
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    for adapters in (None, {}):
        engine = Engine(model, num_blocks=8, adapters=adapters)
        assert engine.metrics()["memory"]["held"]["weights"]["bytes"] == weights
