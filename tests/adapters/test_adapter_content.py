"""Factors that are read from files are those that MLX reads, and so are their bytes."""

import json
from itertools import accumulate, pairwise

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine
from mlx_paged.adapters.formats import content_of, read_adapter
from mlx_paged.ops.low_rank_terms import read_factors, write_slot
from mlx_paged.runner.low_rank_places import places_of
from mlx_paged.tensor_files import header
from tests.support.models.adapters import random_arrays, write_adapter
from tests.support.models.architectures import build

FILE_TYPES = {mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16", mx.float64: "F64"}
"""MLX itself writes no float64."""
DTYPES = mx.float32, mx.float16, mx.bfloat16


def stored_in(path, arrays, **of):
    """A file with these arrays, and their tensors as `read_factors` takes them."""
    contents = [np.array(array.view(mx.uint8)).tobytes() for array in arrays.values()]
    ends, head = [0, *accumulate(map(len, contents))], {}
    for (name, array), place in zip(arrays.items(), pairwise(ends), strict=True):
        head[name] = {"dtype": FILE_TYPES[array.dtype], "shape": array.shape, "data_offsets": place}
    written = json.dumps(head).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + b"".join(contents))
    entries = [header(path)[0][name] for name in arrays]
    form = of.get("transposes", False), of.get("scale", 1.0), of.get("dtype", mx.float32)
    return [(e.begin, e.dtype, e.shape, *form) for e in entries]


def bits(array):
    return np.array(array.view(mx.uint8)).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of_file", FILE_TYPES, ids=str)
@pytest.mark.parametrize("transposes", [False, True])
def test_factors_of_any_type_have_the_bits_that_mlx_converts(tmp_path, of_file, dtype, transposes):
    rng = np.random.default_rng(7)
    numbers = {"a": rng.standard_normal((7, 83)), "b": 1e-6 * rng.standard_normal((3, 40, 5))}
    with mx.stream(mx.cpu):  # float64 is there alone
        arrays = {
            name: mx.array(each.astype(np.float64), mx.float64).astype(of_file)
            for name, each in numbers.items()
        }
        path, scale = tmp_path / "x.safetensors", 0.3
        stored = stored_in(path, arrays, transposes=transposes, scale=scale, dtype=dtype)
        every, factors, bad = read_factors(str(path), stored)
        assert bad == -1 and len(every) % 64 == 0
        for got, array in zip(factors, arrays.values(), strict=True):
            want = (array.astype(mx.float32) * scale).astype(dtype)
            want = mx.contiguous(want.swapaxes(-1, -2) if transposes else want)
            assert got.shape == want.shape and got.dtype == dtype and bits(got) == bits(want)


@pytest.mark.parametrize("number", [float("nan"), float("-inf"), 1e30])
def test_the_first_factor_that_is_not_finite_is_named(tmp_path, number):
    arrays = {name: mx.zeros((40, 3)) for name in "abcd"}
    arrays["c"][39, 1] = number
    arrays["d"][0, 0] = number
    path = tmp_path / "x.safetensors"
    stored = stored_in(path, arrays, dtype=mx.float16)
    assert read_factors(str(path), stored)[2] == 2


def test_a_file_that_became_shorter_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    stored = stored_in(path, {"a": mx.ones((4, 8))})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="shorter than its tensors") as told:
        read_factors(str(path), stored)
    assert str(tmp_path) not in str(told.value)  # a client of the server sees the message
    path.unlink()
    with pytest.raises(RuntimeError, match="cannot be opened"):
        read_factors(str(path), stored)


def test_a_folder_has_the_content_of_its_arrays(tmp_path):
    arrays, places = random_arrays(build("llama"), 1), places_of(build("llama"))
    read = read_adapter(write_adapter(tmp_path / "x", arrays), places)
    given = content_of(arrays, places, 4.0)
    assert list(read.factors) == list(given.factors) == sorted(read.factors)
    assert bits(read.numbers) == bits(given.numbers) and read.key == given.key
    other = content_of({name: 2 * each for name, each in arrays.items()}, places, 4.0)
    assert other.key != read.key
    engine = Engine(build("llama"), num_blocks=16, adapters={"x": tmp_path / "x"})
    engine.update_adapter("y", arrays, scale=4.0)
    assert engine.adapters["x"].version == engine.adapters["y"].version


def test_a_slot_has_its_factors_and_zeros_after_them():
    stacks = [mx.ones((3, 4, 5)), mx.ones((3, 2, 4, 5)), mx.ones((3, 4, 6))]
    factors = [mx.full((2, 5), 7.0), mx.full((2, 3, 5), 8.0), None]
    mx.eval(stacks, factors[:2])
    write_slot(stacks, factors, 1)
    for stack, factor in zip(stacks, factors, strict=True):
        want = np.ones(stack.shape)
        want[1] = 0
        if factor is not None:
            want[1][..., : factor.shape[-2], :] = np.array(factor)
        np.testing.assert_array_equal(np.array(stack), want)
    one_expert = mx.ones((1, 3, 5))
    for wrong in (
        [stacks[:1], [mx.ones((5, 5))], 1],
        [stacks[1:2], [one_expert], 1],
        [stacks[:1], [None], 3],
        [stacks, [], 0],
    ):
        with pytest.raises(ValueError, match="expected"):
            write_slot(*wrong)
