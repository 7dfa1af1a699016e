"""docs/metal-counts.md says what the emulator counts, and paging adds reads of the tables only."""

import pytest
from metal_emulator import require_emulator

from scripts.metal_counts import DOCUMENT, SHAPES, Shape, contiguous, paged, rows, section

CONTEXT = 512


@pytest.fixture(autouse=True, scope="module")
def emulator() -> None:
    require_emulator()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_document_has_the_counts(shape: Shape) -> None:
    fresh = section(shape, CONTEXT, [*rows(shape, CONTEXT)])
    assert fresh in DOCUMENT.read_text(), "run python -m scripts.metal_counts"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paging_adds_one_entry_a_block_to_each_threadgroup(shape: Shape) -> None:
    """Beside its context length; of keys and values, it loads what a contiguous kernel loads that
    computes the heads of a group together."""
    context, block_size = 1024, 16
    ours, theirs = paged(shape, context), contiguous(shape, context, passes=2)
    entries = context // block_size * shape.kv_heads + ours.threadgroups
    assert ours.counts.table_per_group * shape.heads == 4 * entries
    assert ours.counts.kv_once == theirs.counts.kv_once
    assert ours.counts.kv_per_group == theirs.counts.kv_per_group
    assert ours.counts.kv_asked == ours.counts.kv_per_group


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_line_that_a_load_touches_is_used_whole(shape: Shape) -> None:
    counts = paged(shape, CONTEXT).counts
    assert counts.kv_asked == 128 * counts.kv_lines


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_core_has_memory_for_three_threadgroups(shape: Shape) -> None:
    assert 3 * paged(shape, CONTEXT).threadgroup_bytes <= 32 * 1024
