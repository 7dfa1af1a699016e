"""Graphs that are built again from a tape, beside what ``mx.compile`` and NumPy compute."""

import gc
import weakref

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.runner.recorded_graph import recorded_graph


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def step(x, rest):
    """Of a primitive with two outputs, one that is used twice, and a constant."""
    low, high = mx.split(x, 2, axis=-1)
    both = mx.tanh(low) * high + mx.array([0.5, -1.0])
    return {"y": both @ rest[0], "same": [rest[1], None, both]}


def in_numpy(x, rest):
    low, high = np.split(x, 2, axis=-1)
    both = np.tanh(low) * high + np.array([0.5, -1.0], np.float32)
    return both @ rest[0], rest[1], both


def test_results_for_other_inputs_are_those_of_numpy():
    first = mx.array(numbers(0, 3, 4)), [mx.array(numbers(1, 2, 5)), mx.array(numbers(2, 1))]
    graph = recorded_graph(mx.compile(step), first)
    for seed in range(3, 9, 3):
        x, weight, other = numbers(seed, 3, 4), numbers(seed + 1, 2, 5), numbers(seed + 2, 1)
        given = [mx.array(each) for each in (x, weight, other)]
        found = graph(given)
        expected = in_numpy(x, [weight, other])
        assert found["same"][1] is None
        for one, two in zip((found["y"], *found["same"][::2]), expected, strict=True):
            np.testing.assert_allclose(np.array(one), two, rtol=1e-5, atol=1e-6)


def test_the_graph_is_the_one_that_mlx_builds():
    """Its nodes are as many, and its bits are the same."""
    x, rest = mx.array(numbers(0, 3, 4)), [mx.array(numbers(1, 2, 5)), mx.array(numbers(2, 1))]
    compiled = mx.compile(step)
    graph = recorded_graph(compiled, (x, rest))
    ops.set_fusion(True)
    for one, two in zip(
        ops.arrays_in(graph([x, *rest]))[0], ops.arrays_in(compiled(x, rest))[0], strict=True
    ):
        assert np.array(one).tobytes() == np.array(two).tobytes()


def test_inputs_of_other_shapes_or_dtypes_have_no_results():
    x, rest = mx.array(numbers(0, 3, 4)), [mx.array(numbers(1, 2, 5)), mx.array(numbers(2, 1))]
    graph = recorded_graph(mx.compile(step), (x, rest))
    assert graph([x[:2], *rest]) is None
    assert graph([x.astype(mx.float16), *rest]) is None
    assert graph([x, rest[0]]) is None
    assert graph([x, *rest]) is not None


def test_one_array_may_be_several_inputs():
    x = mx.array(numbers(0, 2))
    graph = recorded_graph(mx.compile(lambda a, b: a - 2 * b), (x, x))
    assert mx.array_equal(graph([x, mx.zeros(2)]), x)
    with pytest.raises(ValueError, match="two inputs are one array"):
        ops.Tape([x, x], [x + x], [])


def test_an_input_that_the_function_keeps_is_refused():
    kept = mx.array(numbers(0, 2))
    with pytest.raises(ValueError, match="depends on an array of elsewhere"):
        recorded_graph(mx.compile(lambda a, b: a + kept), (mx.zeros(2), kept))


def test_nothing_is_evaluated_when_a_graph_is_recorded():
    def reads(x):
        return x * x.sum().item()

    with pytest.raises(ValueError, match=r"\[eval\]"):
        recorded_graph(mx.compile(reads), (mx.ones(2),))


def test_a_tape_holds_no_input_and_lets_mlx_use_the_memory_again():
    size = 1 << 20
    graph = recorded_graph(mx.compile(lambda x: mx.tanh(mx.tanh(mx.tanh(x)))), (mx.zeros(size),))
    given = mx.ones(size)
    mx.eval(given)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    (found,) = [graph([given])]
    del given
    mx.eval(found)
    assert mx.get_peak_memory() - before < size  # four arrays of 4 * size bytes would be kept else
    assert mx.get_active_memory() - before < size


def test_the_functions_own_graph_is_freed():
    class Owner:
        pass

    owner = Owner()
    gone = weakref.ref(owner)
    graph = recorded_graph(mx.compile(lambda x, _o=owner: x + 1), (mx.zeros(2),))
    del owner
    gc.collect()
    assert gone() is None
    assert graph([mx.ones(2)]).tolist() == [2, 2]


def test_trees_keep_what_is_not_an_array():
    tree = {"a": [mx.zeros(1), None, (1, mx.ones(2))], "b": "text"}
    arrays, number = ops.arrays_in(tree)
    other = ops.with_arrays(tree, [mx.array([7]), mx.array([8, 9])])
    assert other["a"][0].item() == 7 and other["a"][1] is None and other["b"] == "text"
    assert isinstance(other["a"][2], tuple) and other["a"][2][1].tolist() == [8, 9]
    assert ops.arrays_in(other)[1] == number != ops.arrays_in({**tree, "b": None})[1]
    for wrong, text in ((arrays[:1], "more arrays"), ([*arrays, arrays[0]], "fewer arrays")):
        with pytest.raises(ValueError, match=text):
            ops.with_arrays(tree, wrong)


def heads(x):
    """``[B, L, 6]`` to ``[B, 2, L, 3]``, and back after a function."""
    split = x.reshape(*x.shape[:2], 2, 3).transpose(0, 2, 1, 3)
    back = mx.tanh(split).transpose(0, 2, 1, 3).reshape(x.shape)
    return split, back, x.flatten(0, 1).reshape(x.shape), x[None].squeeze(0) + 1


def heads_in_numpy(x):
    split = x.reshape(*x.shape[:2], 2, 3).transpose(0, 2, 1, 3)
    back = np.tanh(split).transpose(0, 2, 1, 3).reshape(x.shape)
    return split, back, x, x + 1


@pytest.mark.parametrize("length, num_nodes", [(1, 4), (2, 6)])
def test_reshapes_in_a_row_are_one_node(length, num_nodes):
    """A transpose is one of these only if it moves axes of length 1."""
    graph = recorded_graph(mx.compile(heads), (mx.zeros((3, length, 6)),))
    assert graph.num_nodes == num_nodes
    x = numbers(5, 3, length, 6)
    for one, two in zip(graph([mx.array(x)]), heads_in_numpy(x), strict=True):
        np.testing.assert_allclose(np.array(one), two, rtol=1e-5, atol=1e-6)


def test_reshapes_of_a_transposed_array_copy_it_in_order():
    def turned(x):
        return x.T.reshape(2, 3, 2).flatten()

    x = numbers(6, 3, 4)
    (found,) = [recorded_graph(mx.compile(turned), (mx.zeros((3, 4)),))([mx.array(x)])]
    assert np.array(found).tobytes() == x.T.flatten().tobytes()
