"""docs/metal-counts.md says what the emulator counts, and paging adds reads of the tables only."""

import pytest
from metal_emulator import require_emulator

from scripts.metal.counts import DOCUMENT, section
from scripts.metal.launches import SHAPES, Shape, contiguous, paged, rows

CONTEXT = 512


@pytest.fixture(autouse=True, scope="module")
def emulator() -> None:
    require_emulator()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_document_has_the_counts(shape: Shape) -> None:
    fresh = section(shape, CONTEXT, [*rows(shape, CONTEXT)])
    assert fresh in DOCUMENT.read_text(), "run python -m scripts.metal.counts"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paging_adds_one_entry_a_block_to_each_threadgroup(shape: Shape) -> None:
    """Beside its context length; of keys and values, it loads what a contiguous kernel loads that
    computes the heads of a group together."""
    context, block_size = 1024, 16
    ours, theirs = paged(shape, context), contiguous(shape, context, blocks=64)
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
def test_threadgroup_memory_leaves_room_for_more_than_the_registers_do(shape: Shape) -> None:
    limits = paged(shape, CONTEXT).work().limits
    assert limits["registers"] < limits["memory"]


@pytest.mark.parametrize(
    ("size", "context", "blocks"),
    [
        ("base", 4095, 0),
        ("base", 4096, 64),
        ("Pro", 4095, 0),
        ("Max", 1023, 0),
        ("Max", 1024, 64),
        ("Ultra", 1023, 0),
        ("Ultra", 32768, 128),
    ],
)
def test_what_mlx_launches(size: str, context: int, blocks: int) -> None:
    """By the comparisons in the host code of its 0.32.4."""
    assert SHAPES[0].mlx_blocks(size, context) == blocks


def test_other_groups_than_of_four_are_refused() -> None:
    with pytest.raises(ValueError, match=r"H 16, H_kv 2.*four query heads"):
        Shape(16, 2, 128).mlx_blocks("base", 512)
