"""The Metal kernels move four neighbouring elements at once, where they lie at whole vectors."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import _ext
from tests.metal_emulator import LaunchStats, Lines, Mode
from tests.support.ops.metal_runner import MetalRunner
from tests.support.ops.numpy_reference import copy_blocks_numpy, write_kv_numpy
from tests.support.ops.paged_cases import TOLERANCE, Case, as_numpy, random_case, worst_error

HEADS, TOKENS, DIM = 2, 6, 64
WHOLE_QUERIES = 13
"""Index of the function constant."""
PAIRS = mx.array([[0, 1], [2, 0]], mx.int32)
SLOTS = mx.array([3, 19, 7, 0, 4, 12], mx.int32)


def random_array(*shape: int, dtype: mx.Dtype = mx.float16) -> mx.array:
    return mx.array(np.random.default_rng(0).standard_normal(shape)).astype(dtype)


def columns_of(array: mx.array, first: int, width: int) -> mx.array:
    """The same values as columns of a wider array, beginning with `first`."""
    pads = [(0, 0)] * (array.ndim - 1)
    wide = mx.pad(array, [*pads, (first, width - first - array.shape[-1])])
    mx.eval(wide)
    return wide[..., first : first + array.shape[-1]]


def from_element(array: mx.array, first: int) -> mx.array:
    """The same values, dense, beginning with element `first` of their memory."""
    memory = mx.pad(array.reshape(-1), (first, 0))
    mx.eval(memory)
    return memory[first:].reshape(array.shape)


def sparse(array: mx.array) -> mx.array:
    """The same values, each the first of two."""
    memory = mx.repeat(array, 2, axis=-1)
    mx.eval(memory)
    return memory[..., ::2]


def pool(dtype: mx.Dtype = mx.float16) -> mx.array:
    return random_array(HEADS, 5, 4, DIM, dtype=dtype)


PLANS = {
    "paged_attention": lambda k, v: _ext.metal.plan_attention(
        mx.zeros((1, HEADS, 1, DIM), k.dtype),
        *(k, v, mx.zeros((1, 1), mx.int32), mx.ones((1,), mx.int32)),
        scale=1.0,
    ),
    "write_kv": lambda k, v: _ext.metal.plan_write_kv(
        *(mx.zeros((TOKENS, HEADS, DIM), k.dtype),) * 2, k, v, SLOTS
    ),
    "copy_blocks": lambda k, v: _ext.metal.plan_copy_blocks(k, v, PAIRS),
}


@pytest.mark.parametrize("op", PLANS)
class TestPoolsThatAreRefused:
    @pytest.mark.parametrize("argument", ["k_cache", "v_cache"])
    def test_rows_that_begin_within_a_vector(self, op, argument):
        pools = {"k_cache": pool(), "v_cache": pool()}
        pools[argument] = columns_of(pool(), 2, DIM + 4)
        with pytest.raises(RuntimeError, match=rf"\[{op}\] {argument} begins at element 2 "):
            PLANS[op](*pools.values())

    def test_rows_that_are_no_whole_number_of_vectors_apart(self, op):
        with pytest.raises(RuntimeError, match=r"strides 1320, 264 and 66: .* multiples of 4"):
            PLANS[op](columns_of(pool(), 0, DIM + 2), pool())

    def test_rows_that_are_not_dense(self, op):
        with pytest.raises(ValueError, match=r"v_cache .* has stride 2 on its last axis"):
            PLANS[op](pool(), sparse(pool()))


def attention(metal: MetalRunner, case: Case) -> LaunchStats:
    """What it took, after asserting that the result is right."""
    q, k_cache, v_cache, tables, lens = case.arrays
    out = metal.paged_attention(q, [k_cache], [v_cache], tables, lens, **case.options)
    assert worst_error(out, case.expected()[0]) < TOLERANCE[out.dtype]
    return metal.trace.stats[0]


def written(metal: MetalRunner, k: mx.array, v: mx.array, *pools: mx.array) -> LaunchStats:
    want = [as_numpy(each) for each in pools]
    write_kv_numpy(as_numpy(k), as_numpy(v), *want, np.array(SLOTS))
    metal.write_kv(k, v, *pools, SLOTS)
    for got, expected in zip(pools, want, strict=True):
        np.testing.assert_array_equal(as_numpy(got), expected)
    return metal.trace.stats[0]


def copied(metal: MetalRunner, *pools: mx.array) -> LaunchStats:
    want = [as_numpy(each) for each in pools]
    copy_blocks_numpy(*want, np.array(PAIRS))
    metal.copy_blocks(*pools, PAIRS)
    for got, expected in zip(pools, want, strict=True):
        np.testing.assert_array_equal(as_numpy(got), expected)
    return metal.trace.stats[0]


@pytest.fixture
def metal() -> MetalRunner:
    return MetalRunner(Mode.RACE)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_pools_may_be_columns_of_wider_ones(metal, dtype):
    case = random_case([45, 3], dtype=dtype)
    case.k_cache = columns_of(case.k_cache, 4, DIM + 8)
    attention(metal, case)
    written(
        MetalRunner(Mode.RACE),
        *(random_array(TOKENS, HEADS, DIM, dtype=dtype) for _ in range(2)),
        columns_of(pool(dtype), 4, DIM + 8),
        pool(dtype),
    )
    copied(MetalRunner(Mode.RACE), pool(dtype), columns_of(pool(dtype), 8, DIM + 8))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("first", "is_whole"), [(0, 1), (4, 1), (1, 0), (2, 0)])
def test_queries_load_whole_vectors_where_they_can(metal, first, is_whole):
    case = random_case([16], num_heads=1, num_kv_heads=1, head_dim=DIM, dtype=mx.float16)
    case.q = from_element(case.q, first)
    (launch,) = _ext.metal.plan_attention(*case.arrays, scale=1.0)["launches"]
    assert launch["constants"][WHOLE_QUERIES] == is_whole
    attention(metal, case)
    attention(MetalRunner(Mode.UBSAN), case)  # finds a vector that is not aligned


def moved_in_pairs(lines: Lines, rows: int) -> bool:
    """Whether each instruction moved two rows, which are a line each."""
    return lines.load_instructions + lines.store_instructions == rows / 2


def test_rows_are_written_in_whole_vectors(metal):
    k, v = (random_array(TOKENS, HEADS, DIM) for _ in range(2))
    lines = written(metal, k, v, pool(), pool()).lines
    for loaded, stored in ((0, 4), (1, 5)):
        assert lines[loaded].loaded == lines[stored].stored == TOKENS * HEADS
        assert moved_in_pairs(lines[loaded], TOKENS * HEADS)
        assert moved_in_pairs(lines[stored], TOKENS * HEADS)


@pytest.mark.parametrize(
    "rows",
    [lambda a: from_element(a, 1), lambda a: columns_of(a, 0, DIM + 2), sparse],
    ids=["from an odd element", "columns", "sparse"],
)
def test_rows_from_anywhere_are_written(rows):
    k, v = (random_array(TOKENS, HEADS, DIM) for _ in range(2))
    written(MetalRunner(Mode.UBSAN), k, rows(v), pool(), pool())
    written(MetalRunner(Mode.UBSAN), rows(k), v, pool(), pool())


def test_blocks_are_copied_in_whole_vectors(metal):
    rows = len(PAIRS) * HEADS * 4
    lines = copied(metal, pool(), pool()).lines
    for each in (lines[2], lines[3]):
        assert each.loaded == each.stored == rows
        assert moved_in_pairs(each, 2 * rows)


def spread(array: mx.array) -> mx.array:
    """The same values as every second element of memory of NaNs."""
    values = np.full((*array.shape, 2), np.nan, np.float32)
    values[..., 0] = as_numpy(array)
    memory = mx.array(values).reshape(*array.shape[:-1], -1).astype(array.dtype)
    mx.eval(memory)
    return memory[..., ::2]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("layout", ["every second", "one for all"])
@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("sinks", "sinks"),
        ("alibi", "alibi_slopes"),
        ("rope", "rope_freqs"),
        ("mapping", "kv_head_mapping"),
    ],
)
def test_options_may_lie_anywhere(option, name, layout, split):
    case = random_case([3000 if split else 45, 7], options=[option])
    array = case.options[name]
    if layout == "every second":
        case.options[name] = spread(array)
    else:
        case.options[name] = mx.broadcast_to(array.flatten()[:1].squeeze(0), array.shape)
    out = MetalRunner().paged_attention(
        case.q, [case.k_cache], [case.v_cache], *case.arrays[3:], scale=case.scale, **case.options
    )
    assert worst_error(out, case.expected()[0]) <= TOLERANCE[case.q.dtype]
