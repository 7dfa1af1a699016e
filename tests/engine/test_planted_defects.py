"""A defect planted anywhere in an engine is noticed by the simulation of random lives."""

from copy import copy as shallow
from dataclasses import replace

import numpy as np
import pytest

from mlx_paged.engine import pipeline
from mlx_paged.engine.beams import BeamGroup
from mlx_paged.engine.core import EngineCore
from mlx_paged.engine.request_maker import RequestMaker
from mlx_paged.engine.text import OutputProcessor
from mlx_paged.kv import group_prefixes
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.block_tables import BlockTables
from mlx_paged.kv.blocks import BlockStore
from mlx_paged.kv.group_prefixes import GroupPrefixes
from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.kv.snapshots import Snapshots
from mlx_paged.kv.state_kind import State
from mlx_paged.kv.states import StateIds
from mlx_paged.request import Request
from mlx_paged.sampling import sampler
from mlx_paged.sampling.grammar import GrammarState
from mlx_paged.scheduler.progress import Progress
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import SampledToken, Span, Step
from mlx_paged.scheduler.turns import Turn
from tests.support.simulation.fake_model import FakePool, FakeRunner, FakeTransfer
from tests.support.simulation.schedules import run_schedule

pytestmark = pytest.mark.usefixtures("limits_of_the_disk")


def loads_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FakePool.transfer
    monkeypatch.setattr(FakePool, "transfer", lambda pool, t: whole(pool, replace(t, loads=[])))


def copied_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = FakeRunner.launch

    def transfer(self: FakeRunner, stores: list, loads: list) -> None:
        self._queue.append(FakeTransfer([], list(loads)))
        self.late = FakeTransfer(list(stores), [])

    def late_launch(self: FakeRunner, step: Step, before: object) -> object:
        launched = launch(self, step, before)
        self._queue.append(self.__dict__.pop("late", FakeTransfer([], [])))
        return launched

    monkeypatch.setattr(FakeRunner, "transfer", transfer)
    monkeypatch.setattr(FakeRunner, "launch", late_launch)


def salts_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_prefixes, "root_hash", lambda salt: b"")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plant", [loads_not_written, copied_too_late, salts_not_hashed])
def test_a_defect_of_the_disk_tier_is_noticed(plant, monkeypatch):
    plant(monkeypatch)
    assert any(run_schedule("disk", 1, index)[1] for index in range(40))


def known_blocks_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupPrefixes, "renumber", lambda self, numbers: None)


def snapshots_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshots, "renumber", lambda self, numbers: None)


def tables_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockTables, "renumber", lambda self, kept: None)


def the_first_blocks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FakePool.resize

    def resize(self: FakePool, num_blocks: int, kept: np.ndarray | None) -> None:
        whole(self, num_blocks, None if kept is None else np.arange(len(kept)))

    monkeypatch.setattr(FakePool, "resize", resize)


def wide_entries_keep_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BlockStore.compact

    def compact(self: BlockStore, num_blocks: int) -> np.ndarray:
        before = self._blocks
        kept = whole(self, num_blocks)
        self._blocks = [blocks[:, :num_blocks] for blocks in before]
        return kept

    monkeypatch.setattr(BlockStore, "compact", compact)


def pools_are_smaller_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "least_blocks", lambda self, unended: 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "plant",
    [
        known_blocks_keep_their_numbers,
        snapshots_keep_their_numbers,
        tables_keep_their_numbers,
        the_first_blocks_are_kept,
        wide_entries_keep_their_blocks,
        pools_are_smaller_than_a_request,
    ],
)
def test_a_defect_of_a_pool_that_shrinks_is_noticed(plant, monkeypatch):
    plant(monkeypatch)
    assert any(run_schedule("sizes", 7, index)[1] for index in range(40))


def forks_share_a_matcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(state: GrammarState, tokens: list[int]) -> GrammarState:
        twin = shallow(state)
        twin.forced = list(state.forced)
        twin.follow(tokens)
        return twin

    monkeypatch.setattr(GrammarState, "copy", copy)


def masks_of_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sampler.masks_of

    def turned(rows: list, vocab: int) -> tuple:
        allowed, *others = whole(rows, vocab)
        return allowed[::-1], *others

    monkeypatch.setattr(sampler, "masks_of", turned)


def forced_tokens_come_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pipeline.StepPipeline.known_after

    def after(self: pipeline.StepPipeline, choice: SampledToken) -> list:
        return whole(self, choice) * 2

    monkeypatch.setattr(pipeline.StepPipeline, "known_after", after)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant", [forks_share_a_matcher, masks_of_other_rows, forced_tokens_come_twice]
)
def test_a_defect_of_grammars_is_noticed(plant, monkeypatch):
    plant(monkeypatch)
    assert any(run_schedule("structured", 7, index)[1] for index in range(40))


def no_copy_on_write(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BlockAllocator.make_writable
    monkeypatch.setattr(BlockAllocator, "make_writable", lambda *a: whole(*a)[1:])


def copies_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePool, "copy", lambda pool, copies: None)


def tails_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BlockAllocator.admit
    monkeypatch.setattr(BlockAllocator, "admit", lambda *a, **k: replace(whole(*a, **k), copies=[]))


def prefixes_offered_before_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Scheduler._schedule

    def early(scheduler, step, request, budget):
        whole(scheduler, step, request, budget)
        if scheduler.prefix_cache and request.id in scheduler.allocator:
            known = min(scheduler.allocator.num_tokens(request.id), len(request.tokens))
            scheduler.allocator.register_prefix(request.id, request.tokens, known)

    monkeypatch.setattr(Scheduler, "_schedule", early)


def tails_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BlockAllocator.register_tail
    monkeypatch.setattr(
        BlockAllocator,
        "register_tail",
        lambda self, i, tokens, n: whole(self, i, tokens, min(self.num_tokens(i), len(tokens))),
    )


def tenants_share(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BlockAllocator.admit
    monkeypatch.setattr(BlockAllocator, "admit", lambda *a, **k: whole(*a, **(k | {"salt": b""})))


def prefixes_survive_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockAllocator, "forget_prefixes", lambda allocator: None)


def one_cached_token_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BlockAllocator.admit

    def admit(allocator, request_id, num_tokens, **options):
        admission = whole(allocator, request_id, num_tokens, **options)
        return replace(admission, num_cached=min(admission.num_cached + 1, num_tokens - 1))

    monkeypatch.setattr(BlockAllocator, "admit", admit)


def a_reference_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BlockAllocator.fork

    def fork(allocator, parent, child):
        whole(allocator, parent, child)
        allocator.store.counts[int(allocator.table(child)[0])] -= 1

    monkeypatch.setattr(BlockAllocator, "fork", fork)


def kept_blocks_never_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "release", lambda scheduler, request: None)


def everyone_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAX_FAULTS", 1)


def draws_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "num_generated", property(lambda r: len(r.tokens) - r.num_prompt))


def stop_tokens_do_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutputProcessor, "stop_token_ids", lambda self, request: frozenset())


def states_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRunner, "release", lambda runner, state_ids: None)


def beams_never_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "unpark", lambda scheduler, request: None)


def too_few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BeamGroup, "num_candidates", property(lambda group: group.num_beams))


def refused_though_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    most = property(lambda request: request.num_prompt + request.params.max_tokens)
    monkeypatch.setattr(Request, "max_kv_tokens", most)


def samples_draw_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RequestMaker.__call__

    def make(maker, tokens, params, seed, *place):
        return whole(maker, tokens, params, params.seed if seed is not None else None, *place)

    monkeypatch.setattr(RequestMaker, "__call__", make)


def forks_leave_a_token_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCore, "_settle", lambda engine: None)


def interrupts_lose_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EngineCore.step

    def step(engine):
        try:
            return whole(engine)
        except KeyboardInterrupt:
            engine.ready.clear()
            raise

    monkeypatch.setattr(EngineCore, "step", step)


def states_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first span after a known prefix begins with no state."""
    whole = StateIds.begin

    def begin(states, match):
        begun = whole(states, match)
        states.release(begun.newest.id)
        begun.newest = State(0, begun.newest.position)
        return begun

    monkeypatch.setattr(StateIds, "begin", begin)


def the_state_with_a_wrong_draft_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StateIds.settle

    def settle(states, of_sequence, num_tokens):
        if of_sequence.newest.position > num_tokens:
            of_sequence.newest = State(of_sequence.newest.id, num_tokens)
        whole(states, of_sequence, num_tokens)

    monkeypatch.setattr(StateIds, "settle", settle)


def a_fork_does_not_hold_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(states, parent):
        return replace(parent, planned=[])

    monkeypatch.setattr(StateIds, "fork", fork)


def snapshots_outlive_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshots, "forget", lambda snapshots, block: None)


def a_snapshot_in_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = GroupPrefixes.keep

    def keep(prefixes, sequence, tokens, snapshot):
        snapshot.position = max(1, snapshot.position - 1)
        return whole(prefixes, sequence, tokens, snapshot)

    monkeypatch.setattr(GroupPrefixes, "keep", keep)


def more_snapshots_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Snapshots.add

    def add(snapshots, block, run, snapshot):
        most, snapshots.max_snapshots = snapshots.max_snapshots, 10**9
        is_wanted = whole(snapshots, block, run, snapshot)
        snapshots.max_snapshots = most
        return is_wanted

    monkeypatch.setattr(Snapshots, "add", add)


def long_prompts_never_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Turn.__init__

    def patient(turn, *args):
        whole(turn, *args)
        turn._is_overdue, turn.limit = False, turn._before + turn._room

    monkeypatch.setattr(Turn, "__init__", patient)


def snapshots_filled_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what a span ends with, not with what it has at a snapshot on its way."""
    monkeypatch.setattr(Span, "pieces", lambda span: [span])


def windows_let_go_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LayerGroup.kept_from
    early = lambda group, position: whole(group, position + 2)  # noqa: E731
    monkeypatch.setattr(LayerGroup, "kept_from", early)


def windows_never_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockAllocator, "trim", lambda *args, **options: None)


def copies_of_one_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FakePool.copy
    first = lambda pool, copies: whole(pool, [c for c in copies if c.group == 0])  # noqa: E731
    monkeypatch.setattr(FakePool, "copy", first)


def hits_without_their_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupPrefixes, "_missing", lambda prefixes, known, count: None)


def wrong_drafts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "_verified", lambda progress, report, drafted: report.choices)


def what_wrong_drafts_wrote_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The K/V of all drafts counts as that of tokens to come."""
    whole = Progress.correct

    def correct(progress, request, num_computed):
        allocator = progress._allocator
        has_wrong = allocator.num_tokens(request.id) > num_computed
        whole(progress, request, num_computed)
        if has_wrong:
            request.num_computed += 1
            allocator.make_writable(request.id, num_computed, num_computed + 1)

    monkeypatch.setattr(Progress, "correct", correct)


def windows_follow_wrong_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Scheduler.commit

    def commit(scheduler, step):
        for span in step.spans:
            if span.further and span.request.id in scheduler.allocator:
                scheduler.allocator.trim(span.request.id, span.stop)
        whole(scheduler, step)

    monkeypatch.setattr(Scheduler, "commit", commit)


DEFECTS = (
    wrong_drafts_stay,
    what_wrong_drafts_wrote_is_known,
    windows_follow_wrong_drafts,
    windows_let_go_too_early,
    windows_never_let_go,
    copies_of_one_group_only,
    hits_without_their_window,
    no_copy_on_write,
    copies_ignored,
    tails_not_copied,
    prefixes_offered_before_they_are_computed,
    tails_too_long,
    tenants_share,
    prefixes_survive_a_crash,
    one_cached_token_too_many,
    a_reference_too_few,
    kept_blocks_never_released,
    everyone_is_blamed,
    draws_depend_on_the_batch,
    stop_tokens_do_not_stop,
    states_left_behind,
    beams_never_resume,
    too_few_candidates,
    refused_though_it_fits,
    samples_draw_alike,
    forks_leave_a_token_behind,
    interrupts_lose_outputs,
    states_not_restored,
    snapshots_outlive_their_blocks,
    a_snapshot_in_the_place_of_another,
    more_snapshots_than_allowed,
    snapshots_filled_too_late,
    the_state_with_a_wrong_draft_stays,
    a_fork_does_not_hold_its_state,
    long_prompts_never_overdue,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        no_copy_on_write,
        loads_not_written,
        wrong_drafts_stay,
        states_not_restored,
        forced_tokens_come_twice,
        windows_let_go_too_early,
    ],
)
def test_a_planted_defect_is_noticed_among_all_features(monkeypatch, plant):
    plant(monkeypatch)
    assert any(run_schedule("all", 7, index)[1] is not None for index in range(30))


@pytest.mark.slow
@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_noticed(monkeypatch, plant):
    plant(monkeypatch)
    assert any(run_schedule("fake", 7, index)[1] is not None for index in range(240))
