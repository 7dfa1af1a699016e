"""K/V that a model reads itself: gathered by the batch's tables, under a class of its own."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import _ext
from mlx_paged.attention.forward import Forward, head_runs

RNG = np.random.default_rng(0)


LAYOUTS = {  # how the cache [H, N, S, D] lies in memory
    "of a pool": lambda cache: mx.contiguous(cache.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3),
    "in order": lambda cache: cache,
    "some columns": lambda cache: mx.pad(cache, [(0, 0)] * 3 + [(3, 3)])[..., 3:-3],
    "some heads": lambda cache: mx.contiguous(
        mx.pad(cache, [(1, 1), (0, 0), (0, 0), (0, 0)]).transpose(1, 0, 2, 3)
    ).transpose(1, 0, 2, 3)[1:-1],
    "the last blocks": lambda cache: mx.contiguous(
        mx.pad(cache, [(0, 0), (2, 0), (0, 0), (0, 0)]).transpose(1, 0, 2, 3)
    ).transpose(1, 0, 2, 3)[:, 2:],
}


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 12])
@pytest.mark.parametrize("head_dim", [1, 5])
@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_come_in_the_order_of_the_tables(layout, num_heads, head_dim, num_tokens):
    cache = RNG.normal(size=(num_heads, 6, 4, head_dim)).astype(np.float32)
    tables = RNG.integers(-1, 6, size=(5, 3)).astype(np.int32)  # -1: any block
    expected = [np.concatenate(cache[:, row].swapaxes(0, 1), axis=1) for row in tables]
    stored, tables = LAYOUTS[layout](mx.array(cache)), mx.array(tables)

    @mx.compile
    def traced(stored: mx.array, tables: mx.array) -> mx.array:
        return _ext.gather_blocks(stored, tables, num_tokens, head_runs(tables, num_heads))

    for out in (
        _ext.gather_blocks(stored, tables, num_tokens),
        _ext.gather_blocks(stored, tables, num_tokens, head_runs(tables, num_heads)),
        traced(stored, tables),
    ):
        assert out.shape == (5, num_heads, num_tokens, head_dim)
        np.testing.assert_array_equal(np.array(out), np.stack(expected)[:, :, :num_tokens])


@pytest.mark.parametrize(
    ("cache", "tables", "num_tokens", "message"),
    [
        ((2, 6, 4), (5, 3), 1, "3 and 2 axes: expected 4 and 2"),
        ((2, 6, 4, 8), (5,), 1, "4 and 1 axes: expected 4 and 2"),
        ((2, 6, 4, 8), (5, 3), 13, "num_tokens is 13: expected 0 to 12"),
        ((2, 6, 4, 8), (5, 3), -1, "num_tokens is -1: expected 0 to 12"),
    ],
)
def test_what_cannot_be_gathered_is_refused(cache, tables, num_tokens, message):
    with pytest.raises(ValueError, match=message):
        _ext.gather_blocks(mx.zeros(cache), mx.zeros(tables, mx.int32), num_tokens)


def test_layers_share_runs_until_the_tables_are_others():
    first, second, zeros = mx.array([[3, 1]]), mx.array([[0, 2]]), mx.zeros((1,), mx.int32)
    forward = Forward(1, zeros, zeros, first, zeros, 8, 0, 1)
    runs = forward.runs(first, 2)
    assert runs is forward.runs(first, 2) and runs.tolist() == [[[6, 2], [7, 3]]]
    assert forward.runs(first, 1).tolist() == [[[3, 1]]] and runs is forward.runs(first, 2)
    assert forward.runs(second, 2).tolist() == [[[0, 4], [1, 5]]]


def test_runs_of_other_tables_are_refused():
    tables = mx.zeros((5, 3), mx.int32)
    with pytest.raises(ValueError, match=r"head_runs has shape \(5, 1, 3\): expected \(5, 2, 3\)"):
        _ext.gather_blocks(mx.zeros((2, 6, 4, 8)), tables, 1, head_runs(tables, 1))


class Tagged(mx.array):
    tag: str


def test_a_view_is_the_array_under_another_class():
    array = mx.array([1.0, 2.0])
    view = _ext.view_as(Tagged, array)
    view.tag = "keys"
    assert type(view) is Tagged and view.tag == "keys" and view.tolist() == [1.0, 2.0]
    array += 1  # another array from now on
    assert view.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("kind", [int, object, list])
def test_a_view_of_a_class_of_no_arrays_is_refused(kind):
    with pytest.raises(ValueError, match=r"expected a subclass of mx\.array"):
        _ext.view_as(kind, mx.array(1.0))
