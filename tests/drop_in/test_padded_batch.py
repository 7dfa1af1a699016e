"""Where the columns of a padded forward lie in the pool."""

import numpy as np
import pytest

from mlx_paged.drop_in.padded_batch import PaddedBatch, PaddedSpans
from tests.support.ops.attention_paths import attending_by

TABLES = np.array([[7, 3, 5], [2, 9, 0]], np.int32)


def step(starts, columns, lengths=None) -> PaddedBatch:
    lengths = None if lengths is None else np.array(lengths)
    return PaddedBatch((0, 1), PaddedSpans.of(starts, columns, lengths), TABLES, 4, range(2))


def test_padding_has_no_slot():
    slots = np.array(step([-2, 3], 4, [4, 2]).slot_mapping).reshape(2, 4)
    assert slots.tolist() == [[-1, -1, 28, 29], [11, 36, -1, -1]]


def test_a_chunk_is_a_rows_tokens_without_its_padding():
    with attending_by("gather"):
        left, right = step([-2, 3], 9, [6, 3]).row_chunks
    assert (left.first, left.start, left.length, left.stop) == (2, 0, 4, 4)
    assert (right.first, right.start, right.length, right.stop) == (0, 3, 3, 6)
    assert np.array(left.block_ids).tolist() == [7]
    assert np.array(right.block_ids).tolist() == [2, 9]


@pytest.mark.parametrize(
    ("starts", "lengths"), [([-9, 0], None), ([-12, 0], None), ([5, 0], [0, 9])]
)
def test_a_row_of_padding_is_no_chunk(starts, lengths):
    with attending_by("gather"):
        padding, tokens = step(starts, 9, lengths).row_chunks
    assert padding is None and tokens.length == 9


def test_tables_reach_the_last_column_and_no_further():
    assert np.array(step([0, 2], 3).block_tables).tolist() == [[7, 3], [2, 9]]
    assert step([0, 0], 17, [1, 1]).block_tables.shape == (2, 5)


@pytest.mark.parametrize(
    ("ids", "starts", "columns", "lengths", "expected"),
    [
        ((0, 1), [3, 5], 2, None, True),
        ((1, 0), [3, 5], 2, None, False),
        ((0, 1), [3, 4], 2, None, False),
        ((0, 1), [3, 5], 3, [2, 2], False),
        ((0, 1), [3, 5], 2, [2, 1], False),
    ],
    ids=["same", "rows", "starts", "columns", "lengths"],
)
def test_a_step_serves_the_same_forward_only(ids, starts, columns, lengths, expected):
    made = step([3, 5], 2)
    lengths = None if lengths is None else np.array(lengths)
    asked = PaddedSpans.of(starts, columns, lengths)
    assert made.serves(ids, asked) == expected
    made.valid = False
    assert not made.serves(ids, asked)
