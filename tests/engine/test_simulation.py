"""Random lives of an engine end as they must, and a defect planted anywhere is noticed."""

import json
import subprocess
import sys
from collections import Counter
from copy import copy as shallow
from dataclasses import replace
from pathlib import Path

import pytest
import simulation
from fake_model import FakePool, FakeRunner, FakeTransfer
from simulation import COUNTED, main, run_schedule

from mlx_paged.engine import pipeline
from mlx_paged.engine.arguments import RequestMaker
from mlx_paged.engine.beams import BeamGroup
from mlx_paged.engine.core import EngineCore
from mlx_paged.engine.text import OutputProcessor
from mlx_paged.kv import group_prefixes
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.group_prefixes import GroupPrefixes
from mlx_paged.kv.layer_groups import LayerGroup
from mlx_paged.kv.snapshots import Snapshots
from mlx_paged.kv_disk import tier
from mlx_paged.request import Request
from mlx_paged.sampling import sampler
from mlx_paged.sampling.grammar import GrammarState
from mlx_paged.scheduler.runner_protocol import SampledToken
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.speculation import Speculation
from mlx_paged.scheduler.step import Span, Step
from mlx_paged.scheduler.turns import Turn

SCRIPT = Path(simulation.__file__)


def counted(model: str, seed: int, num_schedules: int) -> Counter[str]:
    """Totals of schedules that must all be right."""
    totals: Counter[str] = Counter()
    for index in range(num_schedules):
        counts, failure = run_schedule(model, seed, index)
        assert failure is None, f"{failure!r} in schedule {index} of {seed}"
        totals.update(counts)
    return totals


@pytest.fixture(autouse=True)
def limits_of_the_disk(monkeypatch):
    """Simulated lives draw these; other tests need the real ones."""
    for name in ("STEP_BYTES", "WAIT"):
        monkeypatch.setattr(tier, name, getattr(tier, name))


def test_whatever_happens_every_request_gets_the_tokens_it_gets_alone():
    totals = counted("fake", seed=7, num_schedules=400)
    assert totals["mismatches"] == totals["violations"] == totals["leaked_blocks"] == 0
    seen = set(COUNTED) - {"lives", "stored", "fetched", "dropped", "valid", "plans"}
    seen -= {"near_ties", "mismatches", "violations", "leaked_blocks", "failures"}
    assert totals["overtakes"] > 10, "hardly any long prompt was overtaken"
    seen -= {"overtakes"}
    assert not [name for name in seen if totals[name] < 100], "something hardly ever happened"


def test_another_rank_reads_the_same_steps_and_keeps_nothing():
    totals = counted("ranks", seed=7, num_schedules=60)
    assert totals["plans"] > 1500
    for name in ("preemptions", "forks", "samples", "beams", "drafts", "restored"):
        assert totals[name] > 10, f"{name} hardly ever happened"


def test_a_real_model_in_a_real_engine_gives_mlx_lms_tokens():
    totals = counted("tiny", seed=7, num_schedules=25)
    assert totals["mismatches"] == totals["leaked_blocks"] == 0
    assert totals["tokens"] > 200 and totals["near_ties"] <= 1


def test_schemas_are_obeyed_and_other_requests_unchanged():
    totals = counted("structured", seed=7, num_schedules=12)
    assert totals["mismatches"] == totals["leaked_blocks"] == 0
    for name in ("valid", "forks", "preemptions", "samples", "faults"):
        assert totals[name] > 10, f"{name} hardly ever happened"


def test_engines_that_live_one_after_the_other_on_a_disk_give_the_same_tokens():
    totals = counted("disk", seed=7, num_schedules=60)
    assert totals["mismatches"] == totals["violations"] == totals["leaked_blocks"] == 0
    for name in ("lives", "stored", "fetched", "restored", "preemptions"):
        assert totals[name] > 60, f"{name} hardly ever happened"


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


@pytest.mark.parametrize("plant", [loads_not_written, copied_too_late, salts_not_hashed])
def test_a_defect_of_the_disk_tier_is_noticed(plant, monkeypatch):
    plant(monkeypatch)
    assert any(run_schedule("disk", 1, index)[1] for index in range(40))


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
    whole = pipeline.StepPipeline.forced_after

    def after(self: pipeline.StepPipeline, choice: SampledToken) -> list:
        return whole(self, choice) * 2

    monkeypatch.setattr(pipeline.StepPipeline, "forced_after", after)


@pytest.mark.parametrize(
    "plant", [forks_share_a_matcher, masks_of_other_rows, forced_tokens_come_twice]
)
def test_a_defect_of_grammars_is_noticed(plant, monkeypatch):
    plant(monkeypatch)
    assert any(run_schedule("structured", 7, index)[1] for index in range(40))


def test_the_same_schedule_is_the_same_every_time():
    assert run_schedule("fake", 3, 5)[0] == run_schedule("fake", 3, 5)[0]
    assert run_schedule("fake", 3, 5)[0] != run_schedule("fake", 4, 5)[0]


def test_the_last_line_is_one_json_object(capsys):
    assert main(["--schedules", "3", "--seed", "-5"]) == 0
    *before, last = capsys.readouterr().out.splitlines()
    assert not before and tuple(json.loads(last)) == COUNTED
    assert json.loads(last)["schedules"] == 3


def test_a_failure_comes_with_the_command_that_repeats_it(capsys, monkeypatch):
    monkeypatch.setattr(FakePool, "copy", lambda pool, copies: None)
    assert main(["--schedules", "40", "--seed", "7"]) == 1
    *before, last = capsys.readouterr().out.splitlines()
    command = before[1].split()
    assert (
        command[:2] == ["python", "tests/support/simulation.py"]
        and json.loads(last)["failures"] > 0
    )
    assert main(command[2:]) == 1
    assert capsys.readouterr().out.splitlines()[0] == before[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedules", "0"], "argument --schedules: expected a whole number >= 1, got '0'"),
        (["--schedules", "x"], "argument --schedules: expected a whole number >= 1, got 'x'"),
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--only", "-1"], "argument --only: expected a whole number >= 0, got '-1'"),
        (["--model", "huge"], "argument --model: invalid choice: 'huge'"),
        (["7"], "unrecognized arguments: 7"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_named_in_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_it_runs_as_a_script():
    command = [sys.executable, str(SCRIPT), "--schedules", "2", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert json.loads(done.stdout.splitlines()[-1])["mismatches"] == 0


# Planted defects


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
    monkeypatch.setattr(FakeRunner, "drop", lambda runner, request: None)


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
    whole = Scheduler._allocate

    def allocate(scheduler, step, request, spare):
        done = whole(scheduler, step, request, spare)
        step.restores.clear()
        return done

    monkeypatch.setattr(Scheduler, "_allocate", allocate)


def snapshots_outlive_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshots, "forget", lambda snapshots, block: None)


def a_snapshot_in_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BlockAllocator.attach_snapshot

    def keep(allocator, request_id, tokens, snapshot):
        snapshot.position = max(1, snapshot.position - 1)
        return whole(allocator, request_id, tokens, snapshot)

    monkeypatch.setattr(BlockAllocator, "attach_snapshot", keep)


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
    monkeypatch.setattr(Speculation, "accept", lambda speculation, step, choices: choices)


def what_wrong_drafts_wrote_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The K/V of all drafts counts as that of tokens to come."""
    whole = Speculation._settle

    def settle(speculation, span, accepted):
        whole(speculation, span, accepted)
        if span.request.id in speculation._allocator and accepted < len(span.drafts):
            span.request.num_computed = span.start + 2 + accepted
            speculation._allocator.make_writable(
                span.request.id, span.start + 1 + accepted, span.start + 2 + accepted
            )

    monkeypatch.setattr(Speculation, "_settle", settle)


def windows_follow_wrong_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Scheduler.commit

    def commit(scheduler, step):
        for span in step.spans:
            if span.drafts and span.request.id in scheduler.allocator:
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
    long_prompts_never_overdue,
)


@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_noticed(monkeypatch, plant):
    plant(monkeypatch)
    assert any(run_schedule("fake", 7, index)[1] is not None for index in range(200))
