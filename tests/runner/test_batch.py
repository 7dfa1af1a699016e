"""A step's spans as arrays: every number by its definition."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.attention.causal import FULL, causal
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.request import Request
from mlx_paged.runner.batch import Batch, BatchTables, Layout
from mlx_paged.sampling.sampler import PendingTokens
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.step import Span

BLOCK = 4


def make_spans(allocator: BlockAllocator, *spans: tuple[int, int, int]) -> list[Span]:
    """Spans ``(tokens known, start, stop)`` of sequences 0, 1, ..., interleaved in the pool."""
    made = []
    for seq_id, (num_tokens, start, stop) in enumerate(spans):
        allocator.admit(seq_id, 1)
        tokens = [100 * seq_id + i for i in range(num_tokens)]
        request = Request(seq_id, tokens, SamplingParams(), seed=0)
        made.append(Span(request, start, stop, samples=stop == num_tokens))
    for position in range(1, max(stop for _, _, stop in spans)):
        for seq_id, (_, _, stop) in enumerate(spans):
            if position < stop:
                allocator.make_writable(seq_id, position, position + 1)
    return made


def mixed_batch() -> tuple[BlockAllocator, Batch]:
    allocator = BlockAllocator(num_blocks=32, block_size=BLOCK)
    spans = make_spans(allocator, (20, 3, 9), (6, 5, 6), (11, 8, 11), (9, 8, 9))
    return allocator, Batch(spans, allocator)


def test_single_tokens_come_first_then_chunks_short_ones_first():
    _, batch = mixed_batch()
    assert batch.seq_ids == [1, 3, 2, 0]
    assert batch.num_decodes == 2
    assert batch.tokens.tolist() == [105, 308, 208, 209, 210, 3, 4, 5, 6, 7, 8]
    assert batch.forwards[0].positions.tolist() == [5, 8, 8, 9, 10, 3, 4, 5, 6, 7, 8]
    assert batch.forwards[0].cu_seqlens.tolist() == [0, 1, 2, 5, 11]
    assert batch.inputs.shape == (11, 1)


def test_chunks_of_one_length_keep_their_order():
    allocator = BlockAllocator(num_blocks=32, block_size=BLOCK)
    batch = Batch(make_spans(allocator, (9, 3, 6), (9, 8, 9), (11, 8, 11), (9, 0, 3)), allocator)
    assert batch.seq_ids == [1, 0, 2, 3]


def test_decodes_alone_have_no_cu_seqlens():
    allocator = BlockAllocator(num_blocks=32, block_size=BLOCK)
    batch = Batch(make_spans(allocator, (6, 5, 6), (9, 8, 9)), allocator)
    assert batch.forwards[0].cu_seqlens is None


def test_slots_are_where_the_block_tables_say():
    allocator, batch = mixed_batch()
    owners = [1, 3, *[2] * 3, *[0] * 6]
    expected = [
        allocator.table(owner)[p // BLOCK] * BLOCK + p % BLOCK
        for owner, p in zip(owners, batch.forwards[0].positions.tolist(), strict=True)
    ]
    assert batch.forwards[0].slot_mapping.tolist() == expected


def test_every_row_has_the_block_table_of_its_sequence():
    allocator, batch = mixed_batch()
    tables, owners = batch.forwards[0].row_tables.tolist(), [1, 3, *[2] * 3, *[0] * 6]
    positions = batch.forwards[0].positions.tolist()
    assert batch.forwards[0].max_context == 11 and len(tables) == batch.num_tokens
    for table, owner, position in zip(tables, owners, positions, strict=True):
        blocks = position // BLOCK + 1
        assert table[:blocks] == allocator.table(owner)[:blocks].tolist()


def test_every_sequence_has_a_table_and_a_context_that_includes_its_tokens():
    allocator, batch = mixed_batch()
    assert batch.forwards[0].context_lens.tolist() == [6, 9, 11, 9]
    for table, owner in zip(batch.forwards[0].block_tables.tolist(), [1, 3, 2, 0], strict=True):
        blocks = allocator.table(owner).tolist()
        assert table[: len(blocks)] == blocks


def test_chunks_know_their_rows_and_blocks():
    allocator, batch = mixed_batch()
    first, second = batch.forwards[0].chunks
    assert (first.first, first.start, first.length, first.stop) == (2, 8, 3, 11)
    assert (second.first, second.start, second.length) == (5, 3, 6)
    assert first.block_ids.tolist() == allocator.table(2).tolist()
    assert second.block_ids.tolist() == allocator.table(0).tolist()


# spans (tokens known, start, stop), of which those up to the last known token are sampled
CHUNK, END, DECODE, PIECE = (20, 3, 9), (11, 8, 11), (6, 5, 6), (30, 4, 5)


@pytest.mark.parametrize(
    ("spans", "sampled"),
    [
        ([CHUNK, DECODE, END, PIECE, (17, 2, 17)], [1, 2, 4]),
        ([CHUNK, DECODE, PIECE], [1]),
        ([DECODE, PIECE], [0]),
        ([DECODE, END], [0, 1]),
        ([CHUNK, END], [1]),
    ],
)
def test_sampled_rows_alone_have_the_tables_of_their_sequences(spans, sampled):
    allocator = BlockAllocator(num_blocks=32, block_size=BLOCK)
    [rows] = Batch(make_spans(allocator, *spans), allocator).sampled_alone()
    stops = [spans[owner][2] for owner in sampled]
    assert rows.slot_mapping is None and rows.max_context == max(stops)
    assert rows.positions.tolist() == [stop - 1 for stop in stops]
    assert rows.context_lens.tolist() == stops
    for row, owner in zip(rows.block_tables.tolist(), sampled, strict=True):
        table = allocator.table(owner).tolist()
        assert row[: len(table)] == table


def test_where_all_sequences_are_sampled_their_tables_are_used_again():
    allocator = BlockAllocator(num_blocks=32, block_size=BLOCK)
    batch = Batch(make_spans(allocator, (9, 3, 9), (6, 5, 6), (9, 8, 9)), allocator)
    [rows] = batch.sampled_alone()
    assert rows.block_tables is batch.forwards[0].block_tables
    assert rows.positions.tolist() == [5, 8, 8]


def test_the_mask_of_sampled_rows_is_theirs_in_the_batchs_mask():
    _, batch = mixed_batch()
    [rows] = batch.sampled_alone()
    for window in (None, 3):
        whole = np.array(batch.forwards[0].mask(1, causal(window)))[batch.sampled_rows.tolist()]
        assert np.array_equal(np.array(rows.mask(1, causal(window))), whole)


def test_only_rows_that_yield_a_token_are_sampled():
    _, batch = mixed_batch()
    assert [request.id for request in batch.sampled] == [1, 3, 2]  # 0 has more prompt to come
    assert batch.sampled_rows.tolist() == [0, 1, 4]


def test_a_chunk_layout_holds_one_sequence():
    allocator = BlockAllocator(num_blocks=8, block_size=BLOCK)
    batch = Batch(make_spans(allocator, (9, 4, 9)), allocator, Layout.CHUNK)
    assert batch.inputs.tolist() == [[4, 5, 6, 7, 8]]
    forward, [chunk] = batch.forwards[0], batch.forwards[0].row_chunks
    assert (batch.num_decodes, forward.chunks, forward.offset) == (0, (), 4)
    assert (chunk.first, chunk.start, chunk.length) == (0, 4, 5)
    assert forward.block_tables.tolist() == [allocator.table(0).tolist()]
    assert forward.context_lens.tolist() == [9]
    assert forward.mask(2, FULL).tolist() == [[[[True] * 8 + [False], [True] * 9]]]
    assert batch.sampled_rows.tolist() == [4]


def test_masks_are_causal_within_the_window():
    _, batch = mixed_batch()
    forward = batch.forwards[0]
    positions = np.array(forward.positions)[:, None]
    keys = np.arange(forward.max_context)[None]
    assert forward.max_context == 11
    np.testing.assert_array_equal(np.array(forward.mask(1, FULL))[:, 0, 0], keys <= positions)
    windowed = (keys <= positions) & (keys > positions - 3)
    np.testing.assert_array_equal(np.array(forward.mask(1, causal(3)))[:, 0, 0], windowed)


def test_a_token_that_is_alone_has_a_mask_only_if_keys_are_hidden():
    allocator = BlockAllocator(num_blocks=8, block_size=BLOCK)
    [forward] = Batch(make_spans(allocator, (9, 8, 9)), allocator).forwards
    assert forward.mask(1, FULL) is None and forward.max_context == 9
    assert forward.mask(1, causal(3)).tolist() == [[[[False] * 6 + [True] * 3]]]
    assert forward.mask(2, FULL).tolist() == [[[[True] * 8 + [False], [True] * 9]]]
    traced = replace(forward, is_traced=True, max_context=16)  # as wide as the table
    assert traced.mask(1, FULL).tolist() == [[[[True] * 9 + [False] * 7]]]


def test_tokens_still_being_chosen_come_from_the_step_that_chooses_them():
    allocator = BlockAllocator(num_blocks=32, block_size=BLOCK)
    spans = make_spans(allocator, (5, 5, 6), (3, 0, 3), (4, 4, 5))
    requests = [span.request for span in spans]
    coming = PendingTokens([requests[2], requests[0]], mx.array([71, 72], mx.int32))
    batch = Batch(spans, allocator, coming=coming)
    assert batch.seq_ids == [0, 2, 1]
    assert batch.tokens.tolist() == [72, 71, 100, 101, 102]


def test_a_token_still_being_chosen_may_come_after_known_ones():
    allocator = BlockAllocator(num_blocks=32, block_size=BLOCK)
    spans = make_spans(allocator, (4, 3, 4), (5, 5, 6), (3, 0, 3))
    coming = PendingTokens([spans[1].request], mx.array([71], mx.int32))
    batch = Batch(spans, allocator, coming=coming)
    assert batch.tokens.tolist() == [3, 71, 200, 201, 202]


def test_samples_of_a_prompt_draw_from_its_one_row_of_logits():
    allocator = BlockAllocator(num_blocks=32, block_size=BLOCK)
    first, second = make_spans(allocator, (4, 3, 4), (6, 0, 6))
    forks = tuple(Request(i, [0], SamplingParams(), seed=0) for i in (7, 8))
    batch = Batch([first, replace(second, forks=forks)], allocator)
    assert batch.sampled_rows.tolist() == [0, 6]
    assert [request.id for request in batch.sampled] == [0, 1, 7, 8]
    assert batch.logits_of.tolist() == [0, 1, 1, 1]
    assert batch.newest.tolist() == [3, 105, 105, 105]


def test_samples_share_the_one_row_of_a_prompt_of_which_one_token_was_left():
    allocator = BlockAllocator(num_blocks=32, block_size=BLOCK)
    (span,) = make_spans(allocator, (4, 3, 4))
    forks = tuple(Request(i, [0], SamplingParams(), seed=0) for i in (7, 8))
    batch = Batch([replace(span, forks=forks)], allocator)
    assert not batch.samples_all
    assert batch.newest.tolist() == [3, 3, 3]
    assert batch.sampled_lengths.tolist() == [4, 4, 4]


def test_tables_that_are_handed_on_give_the_same_batch_as_new_ones():
    allocator = BlockAllocator(num_blocks=64, block_size=BLOCK)
    spans = make_spans(allocator, (9, 8, 9), (8, 7, 8), (14, 8, 14))
    tables = BatchTables.of_groups(allocator)
    for num_more in range(9):
        for each in spans[:2]:
            each.request.tokens.append(num_more)
            each.start, each.stop = each.start + 1, each.stop + 1
            allocator.make_writable(each.request.id, each.start, each.stop)
        chosen = spans if num_more % 3 else spans[1::-1]
        kept, new = Batch(chosen, allocator, tables=tables), Batch(chosen, allocator)
        assert kept.tokens.tolist() == new.tokens.tolist()
        for name in ("positions", "slot_mapping", "block_tables", "context_lens"):
            same = [getattr(batch.forwards[0], name).tolist() for batch in (kept, new)]
            assert same[0] == same[1]
        slots = [int(allocator.slots(s.request.id, s.start, s.stop)[0]) for s in chosen[:2]]
        assert kept.forwards[0].slot_mapping.tolist()[:2] == slots
