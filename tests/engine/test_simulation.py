"""Random lives of an engine end as they must."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.simulation import schedules as simulation
from tests.support.simulation.fake_model import FakePool
from tests.support.simulation.schedules import COUNTED, EVIDENCE, main, run_schedule

pytestmark = pytest.mark.usefixtures("limits_of_the_disk")


ROOT = Path(__file__).parents[2]


def counted(model: str, seed: int, num_schedules: int) -> Counter[str]:
    """Totals of schedules that must all be right."""
    totals: Counter[str] = Counter()
    for index in range(num_schedules):
        counts, failure = run_schedule(model, seed, index)
        assert failure is None, f"{failure!r} in schedule {index} of {seed}"
        totals.update(counts)
    return totals


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [8, 9])
def test_whatever_happens_every_request_gets_the_tokens_it_gets_alone(seed):
    totals = counted("fake", seed, num_schedules=200)
    assert totals["mismatches"] == totals["violations"] == totals["leaked_blocks"] == 0
    seen = set(COUNTED) - {"lives", "stored", "fetched", "dropped", "valid", "plans"}
    seen -= {"shrinks", "growths"}
    seen -= {"near_ties", "mismatches", "violations", "leaked_blocks", "failures"}
    assert totals["overtakes"] > 3, "hardly any long prompt was overtaken"
    seen -= {"overtakes"}
    assert not [name for name in seen if totals[name] < 35], "something hardly ever happened"


def test_images_are_told_apart_by_their_keys_alone():
    totals = counted("images", seed=7, num_schedules=100)
    assert totals["mismatches"] == totals["violations"] == totals["leaked_blocks"] == 0
    for name in ("preemptions", "forks", "samples", "beams", "cached_tokens", "restored"):
        assert totals[name] > 50, f"{name} hardly ever happened"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [7, 9])
def test_all_features_together_change_no_token(seed):
    totals = counted("all", seed, num_schedules=30)
    assert totals["mismatches"] == totals["violations"] == totals["leaked_blocks"] == 0
    rare = {"quantized", "compiled"}  # need a real model
    assert not [proof for proof in {*EVIDENCE.values()} - rare if not totals[proof]]


def test_pools_that_change_their_size_change_no_token():
    totals = counted("sizes", seed=7, num_schedules=60)
    assert totals["mismatches"] == totals["violations"] == totals["leaked_blocks"] == 0
    assert totals["shrinks"] > 60 and totals["growths"] > 30
    for name in ("preemptions", "forks", "samples", "beams", "cached_tokens", "restored"):
        assert totals[name] > 15, f"{name} hardly ever happened"


@pytest.mark.slow
def test_real_pools_that_change_their_size_change_no_token():
    totals = counted("sizes of real pools", seed=7, num_schedules=25)
    assert totals["mismatches"] == totals["leaked_blocks"] == 0
    assert totals["tokens"] > 200 and totals["shrinks"] > 20 and totals["near_ties"] <= 1


@pytest.mark.slow
def test_another_rank_reads_the_same_steps_and_keeps_nothing():
    totals = counted("ranks", seed=7, num_schedules=60)
    assert totals["plans"] > 1500
    for name in ("preemptions", "forks", "samples", "beams", "drafts", "restored"):
        assert totals[name] > 10, f"{name} hardly ever happened"


@pytest.mark.slow
def test_a_real_model_in_a_real_engine_gives_mlx_lms_tokens():
    totals = counted("tiny", seed=7, num_schedules=25)
    assert totals["mismatches"] == totals["leaked_blocks"] == 0
    assert totals["tokens"] > 200 and totals["near_ties"] <= 1


@pytest.mark.slow
def test_schemas_are_obeyed_and_other_requests_unchanged():
    totals = counted("structured", seed=7, num_schedules=12)
    assert totals["mismatches"] == totals["leaked_blocks"] == 0
    for name in ("valid", "forks", "preemptions", "samples", "faults"):
        assert totals[name] > 10, f"{name} hardly ever happened"


@pytest.mark.slow
def test_engines_that_live_one_after_the_other_on_a_disk_give_the_same_tokens():
    totals = counted("disk", seed=7, num_schedules=60)
    assert totals["mismatches"] == totals["violations"] == totals["leaked_blocks"] == 0
    for name in ("lives", "stored", "fetched", "restored", "preemptions"):
        assert totals[name] > 60, f"{name} hardly ever happened"


def test_the_same_schedule_is_the_same_every_time():
    assert run_schedule("fake", 3, 5)[0] == run_schedule("fake", 3, 5)[0]
    assert run_schedule("fake", 3, 5)[0] != run_schedule("fake", 4, 5)[0]


def test_the_last_line_is_one_json_object(capsys):
    assert main(["--schedules", "3", "--seed", "-5"]) == 0
    *before, last = capsys.readouterr().out.splitlines()
    assert not before and tuple(json.loads(last)) == COUNTED
    assert json.loads(last)["schedules"] == 3


def test_the_last_line_says_which_features_met(capsys):
    assert main(["--schedules", "4", "--seed", "7", "--model", "all"]) == 0
    told = json.loads(capsys.readouterr().out)
    features, never = told["features"], told["pairs_never"]
    assert set(features) == set(EVIDENCE) and "disk ranks" in never
    pairs = [pair for pair in told["pairs_seldom"] if pair not in never]
    assert pairs and all(features[name] for pair in pairs for name in pair.split())


@pytest.mark.slow
def test_a_failure_comes_with_the_command_that_repeats_it(capsys, monkeypatch):
    monkeypatch.setattr(FakePool, "copy", lambda pool, copies: None)
    assert main(["--schedules", "40", "--seed", "7"]) == 1
    *before, last = capsys.readouterr().out.splitlines()
    command = before[1].split()
    assert (
        command[:3] == ["python", "-m", "tests.support.simulation.schedules"]
        and json.loads(last)["failures"] > 0
    )
    assert main(command[3:]) == 1
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


@pytest.mark.slow
def test_it_runs_as_a_script():
    command = [sys.executable, "-m", simulation.__name__, "--schedules", "2", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout.splitlines()[-1])["mismatches"] == 0
