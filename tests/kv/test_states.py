"""Ids of recurrent states: who holds a state, and when a state is released."""

import pytest

from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.snapshots import Snapshot
from mlx_paged.kv.state_kind import EMPTY, Move
from mlx_paged.kv.states import SequenceStates, StateIds

BLOCK = 4


@pytest.fixture
def allocator() -> BlockAllocator:
    """With one sequence of 30 tokens, of which 8 are computed."""
    allocator = BlockAllocator(64, BLOCK, states=StateIds(3))
    allocator.admit(1, 30)
    allocator.advance(1, 0, 8)
    return allocator


def ids(move: Move) -> list[int]:
    return [state.id for state in move.leaves]


def advance(allocator: BlockAllocator, start: int, stop: int, *positions: int) -> Move:
    """Advance the sequence, with snapshots at these positions on the way."""
    held, snapshots = allocator._sequence(1).states, [Snapshot(each) for each in positions]
    return allocator.states.advance(held, start, stop, snapshots=snapshots)


def test_a_span_reads_the_state_that_the_span_before_left(allocator):
    first = allocator.state(1)
    move = allocator.advance(1, 8, 11)
    assert (move.reads, first.position) == (first, 8)
    assert [state.position for state in move.leaves] == [11]
    assert allocator.take_released() == [first.id]
    assert allocator.take_released() == []


def test_decodes_together_do_what_each_does_alone(allocator):
    allocator.fork(1, 2)
    shared = allocator.state(1)
    _, moves = allocator.append_each([1, 2], [8, 8])
    assert [reads for reads, _ in moves] == [shared, shared]
    assert allocator.take_released() == [shared.id]
    assert [leaves for _, leaves in moves] == [(allocator.state(1),), (allocator.state(2),)]
    assert allocator.state(1).id != allocator.state(2).id
    allocator.check_integrity()


@pytest.mark.parametrize("ends_first", [1, 2])
def test_a_fork_is_a_second_reader(allocator, ends_first):
    shared = allocator.state(1)
    allocator.fork(1, 2)
    allocator.free(ends_first)
    assert allocator.take_released() == []
    assert allocator.state(3 - ends_first) == shared
    allocator.free(3 - ends_first)
    assert allocator.take_released() == [shared.id]
    allocator.check_integrity()


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_a_wrong_draft_releases_what_was_left_and_keeps_what_was_read(allocator, num_right):
    read = allocator.state(1)
    (left,) = ids(allocator.advance(1, 8, 11, is_sure=False))
    assert allocator.take_released() == [] and allocator.state(1) == read
    computed = 9 + num_right
    allocator.truncate(1, computed)
    is_right = num_right == 2
    assert allocator.take_released() == [read.id if is_right else left]
    assert allocator.begins_at(1, computed) == (computed if is_right else 8)
    move = allocator.advance(1, computed, computed + 1)
    assert move.reads.id == (left if is_right else read.id)
    allocator.check_integrity()


def test_the_state_before_several_steps_of_drafts_is_kept(allocator):
    read = allocator.state(1)
    left = [ids(allocator.advance(1, at, at + 1, is_sure=False))[0] for at in (8, 9, 10)]
    assert allocator.take_released() == left[:2]
    allocator.truncate(1, 10)
    assert allocator.take_released() == left[2:] and allocator.state(1) == read
    allocator.check_integrity()


def test_snapshots_on_the_way_are_states_that_the_prefix_cache_holds(allocator):
    tokens = list(range(30))
    allocator.make_writable(1, 0, 30)
    move = advance(allocator, 8, 20, 12, 20)
    assert [state.position for state in move.leaves] == [12, 20]
    allocator.register_prefix(1, tokens, 20)
    allocator.check_integrity()
    allocator.take_released()
    allocator.free(1)
    assert allocator.take_released() == []
    match = allocator.admit(2, 30, tokens)
    assert match.num_cached == 20 and allocator.state(2) == move.leaves[1]
    allocator.forget_prefixes()
    assert allocator.take_released() == [move.leaves[0].id]
    allocator.free(2)
    assert allocator.take_released() == [move.leaves[1].id]


def test_snapshots_that_nothing_registers_are_released(allocator):
    move = advance(allocator, 8, 20, 12)
    read = move.reads.id
    allocator.free(1)
    assert sorted(allocator.take_released()) == sorted([read, *ids(move)])
    allocator.check_integrity()


def test_a_model_without_recurrent_layers_has_no_ids():
    allocator = BlockAllocator(64, BLOCK)
    allocator.admit(1, 30)
    assert allocator.advance(1, 5, 9).reads.position == 5
    assert not allocator.advance(1, 5, 9).leaves
    assert allocator.state(1) == EMPTY and allocator.begins_at(1, 9) == 9
    allocator.free(1)
    assert allocator.take_released() == []


def test_a_state_is_at_rest_when_only_a_snapshot_holds_it():
    """A sequence and its fork are at the same state when one of them ends."""
    ids = StateIds(3, 100, 30, layout="fewer bytes")
    parent = SequenceStates()
    ids.advance(parent, 0, 5)
    state = parent.newest.id
    fork = ids.fork(parent)
    ids.leave(fork, lambda snapshot: ids.snapshots.add(0, 1, snapshot))
    ids.end(fork)
    assert not ids.rested and state in ids.snapshots.state_ids()
    assert [line.num_bytes for line in ids.holdings()] == [0, 100]
    ids.end(parent)
    assert ids.rested == [state]
    assert [line.num_bytes for line in ids.holdings()] == [30, 0]
    ids.snapshots.clear()
    assert ids.released[-1] == state and not ids._at_rest
    assert [line.num_bytes for line in ids.holdings()] == [0, 0]
