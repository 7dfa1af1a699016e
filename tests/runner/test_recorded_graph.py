"""Graphs that are built again from a tape, beside what ``mx.compile`` and NumPy compute."""

import gc
import io
import re
import weakref
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_paged import ops
from mlx_paged._ext import layers
from mlx_paged.runner.recorded_graph import recorded_graph


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bits(array):
    return np.array(array.astype(mx.float32)).tobytes()


def nodes_of(tree):
    """The primitives that MLX would evaluate."""
    drawing = io.StringIO()
    mx.export_to_dot(drawing, *[array for _, array in tree_flatten(tree)])
    return re.findall(r'label ?= ?"(\w+)", shape=rectangle', drawing.getvalue())


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


@pytest.mark.parametrize("length, num_nodes", [(1, 4), (2, 4)])
def test_reshapes_in_a_row_are_one_node(length, num_nodes):
    """A transpose is one of these only if it moves axes of length 1; else one node makes both."""
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


def linear(x, weight):
    return x.astype(weight.dtype) @ weight.T


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_view_that_one_node_reads_is_no_node(dtype):
    x, weight = mx.array(numbers(0, 2, 4)).astype(dtype), mx.array(numbers(1, 5, 4)).astype(dtype)
    graph = recorded_graph(mx.compile(linear), (x, weight))
    assert graph.names == ["Matmul"]
    negative = -weight
    mx.eval(x, weight, negative)
    assert nodes_of(graph([x, weight])) == ["Matmul"]
    lazy = -negative
    assert sorted(nodes_of(graph([x, lazy]))) == ["Matmul", "Negative"]
    expected = bits(x @ weight.T)
    assert bits(graph([x, lazy])) == bits(graph([x, weight])) == expected
    mx.async_eval(lazy)
    assert bits(graph([x, lazy])) == expected


def views(x, weight):
    """Of what is computed, which several nodes read or which is a result; and of an input."""
    turned = mx.tanh(x).T
    return mx.exp(turned) @ turned.T, mx.square(x).T, mx.sin(weight.T), mx.cos(weight.T)


def test_views_that_others_read_are_nodes():
    x, weight = mx.array(numbers(0, 2, 4)), mx.array(numbers(1, 5, 4))
    graph = recorded_graph(mx.compile(views), (x, weight))
    counts = Counter(graph.names)
    assert counts["Transpose"] == 2 and len(graph.names) == 8, graph.names
    for one, two in zip(graph([x, weight]), views(x, weight), strict=True):
        assert one.shape == two.shape and bits(one) == bits(two)


def test_a_copy_that_a_node_makes_of_its_input_lasts_until_the_node_is_computed():
    """MLX copies what is reshaped out of order. Else arrays of the host would take the copy's
    memory while the stream is busy with something before it."""
    x, weight, busy = (mx.array(numbers(0, size, size)) for size in (128, 128, 500))
    graph = recorded_graph(mx.compile(lambda x, w: x.T.reshape(256, 64) @ w), (x, weight[:64]))
    assert graph.names == ["Matmul"]
    given, zeros = [x, weight[:64] + 0], np.zeros((128, 128), np.float32)
    mx.eval(given, busy)
    expected = bits(x.T.reshape(256, 64) @ given[1])
    for _ in range(3):
        mx.async_eval(busy @ busy)
        (found,) = [graph(given)]
        mx.async_eval(found)
        others = [mx.array(zeros) for _ in range(8)]
        assert bits(found) == expected
        assert not any(other.any().item() for other in others)


def test_a_view_of_an_input_of_any_strides_is_the_view_that_mlx_makes():
    """Of arrays in order, transposed, broadcast, of every second column, and of one row."""
    square, row = mx.array(numbers(0, 4, 4)), mx.array(numbers(1, 1, 4))
    wide = mx.array(numbers(2, 4, 8))
    for weight in (square, square.T, mx.broadcast_to(row, (4, 4)), wide[:, ::2], wide[:, 4:]):
        mx.eval(weight)
        graph = recorded_graph(mx.compile(lambda w: mx.negative(w.T)), (weight,))
        assert nodes_of(graph([weight])) == ["Negative"]
        np.testing.assert_array_equal(np.array(graph([weight])), -np.array(weight).T)
    empty = mx.zeros((0, 4))
    mx.eval(empty)
    assert recorded_graph(mx.compile(lambda w: mx.negative(w.T)), (empty,))([empty]).shape == (4, 0)


def test_no_view_keeps_a_replaced_weight_or_gives_its_memory_away():
    size = 1 << 20
    weight = mx.ones((size // 8, 8))
    mx.eval(weight)
    graph = recorded_graph(mx.compile(lambda w: mx.tanh(w.T)), (weight,))
    mx.eval(graph([weight]))
    assert weight.min().item() == 1  # tanh did not take the memory of its input
    mx.clear_cache()
    before = mx.get_active_memory()
    weight = mx.full(weight.shape, 2.0)
    found = graph([weight])
    mx.eval(found)
    assert found.max().item() == pytest.approx(np.tanh(2.0))
    del found
    assert mx.get_active_memory() <= before


def block(x, norm, weight, other):
    """Of a layer: ``[B, L, D]`` to the same, with products of ``[B L, D]``."""
    for _ in range(2):
        flat = layers.rms_norm(x, norm, 1e-5) @ weight.T
        gate, up = flat @ other[0].T, flat @ other[1].T
        x = x + (mx.sigmoid(gate) * up) @ other[2].T
    return x * 2, x[:, 0]


def test_rows_stay_flat_between_products():
    """On shape ``[B, 1, D]`` as MLX's own products flatten rows."""
    norm, weight = mx.array(numbers(1, 4)), mx.array(numbers(2, 4, 4))
    other = [mx.array(numbers(seed, 4, 4)) for seed in (3, 4, 5)]
    for batch, length in ((1, 1), (3, 1), (2, 3)):
        x = mx.array(numbers(0, batch, length, 4)) + 0
        graph = recorded_graph(mx.compile(block), (x, norm, weight, other))
        counts = Counter(graph.names)
        assert counts["Matmul"] == 8 and counts["Transpose"] == 0
        reshapes = sum(counts[name] for name in ("Reshape", "Flatten", "Unflatten"))
        assert reshapes <= 4, graph.names
        for one, two in zip(
            graph([x, norm, weight, *other]), block(x, norm, weight, other), strict=True
        ):
            assert one.shape == two.shape and bits(one) == bits(two)


def chain(x, weight):
    """A result, and another one on which it does not depend."""
    y = layers.rms_norm(x, None, 1e-5)
    for _ in range(20):
        y = layers.silu(y @ weight, y)
    return y.reshape(-1), y.T, mx.exp(y)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("rows", [1, 300])
def test_nodes_in_a_row_are_one_node_on_a_cpu(dtype, rows):
    """A group ends after 32 nodes or 1 MiB; what the first result does not need is in none."""
    x, weight = mx.array(numbers(0, rows, 64)).astype(dtype), mx.array(numbers(1, 64, 64))
    weight = weight.astype(dtype)
    graph = recorded_graph(mx.compile(chain), (x, weight), groups=True)
    names = graph.names
    assert names[-2:] == ["Transpose", "Exp"] and set(names[:-2]) == {"PagedGroup"}
    size = rows * 64 * dtype.size
    assert len(names) - 2 == max(-(-42 // 32), -(-42 // ((1 << 20) // size)))
    for _ in range(3):
        for one, two in zip(graph([x, weight]), chain(x, weight), strict=True):
            assert one.shape == two.shape and bits(one) == bits(two)


def test_a_group_that_fails_computes_nothing_more():
    """The error of a node within a group is the error of the group; later steps are right."""

    def gathers(x, weight):
        return mx.gather_mm(x * 2, weight, rhs_indices=mx.array([0])) + 1

    x, weight = mx.ones((1, 2, 4), mx.bfloat16), mx.ones((1, 4, 3), mx.bfloat16)
    graph = recorded_graph(mx.compile(gathers), (x, weight), groups=True)
    with pytest.raises(RuntimeError, match="float32"):
        mx.eval(graph([x, weight]))
    assert (x * 2).sum().item() == 16


def copies(x, weight):
    """Reshapes of transposed arrays, which MLX copies, between other nodes."""
    y = mx.swapaxes(layers.rms_norm(x, None, 1e-5), 0, 1).reshape(-1)
    return layers.silu(mx.swapaxes((y + 1).reshape(4, -1), 0, 1).reshape(x.shape) @ weight)


def test_groups_have_copies_too():
    x, weight = mx.array(numbers(0, 6, 4)), mx.array(numbers(1, 4, 4))
    graph = recorded_graph(mx.compile(copies), (x, weight), groups=True)
    assert graph.names == ["PagedGroup"]
    assert bits(graph([x, weight])) == bits(copies(x, weight))


@pytest.mark.parametrize("rows", [1, 40])
def test_a_layer_and_its_terms_follow_what_they_read_within_a_group(rows):
    """The layer of a node with terms is computed after the nodes of the group before it."""

    def adapted(x, weight, a, b):
        for _ in range(3):
            normal = layers.rms_norm(x, None, 1e-5)
            slots = mx.array([0] * rows, mx.int32)
            x = layers.low_rank_terms(layers.linear(normal, weight), normal, a, b, slots)
        return x

    arrays = [
        mx.array(numbers(seed, *shape))
        for seed, shape in enumerate([(rows, 64), (64, 64), (1, 4, 64), (1, 4, 64)])
    ]
    graph = recorded_graph(mx.compile(adapted), tuple(arrays), groups=True)
    assert graph.names == ["PagedGroup"]
    plain = mx.array(arrays[0])
    for _ in range(3):
        normal = layers.rms_norm(plain, None, 1e-5)
        mx.eval(normal)
        y = layers.linear(normal, arrays[1])
        mx.eval(y)  # so that the terms are a node of their own
        plain = layers.low_rank_terms(y, normal, *arrays[2:], mx.array([0] * rows, mx.int32))
    for _ in range(20):
        assert bits(graph(arrays)) == bits(plain)
