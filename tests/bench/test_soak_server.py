"""The soak over HTTP: what it counts as grown, and a short one; never the times."""

import json

import pytest

from mlx_paged import demo_model_path
from scripts import soak_server

FLAT = {
    **{"rss_mib": 500.0, "descriptors": 10.0, "threads": 20.0},
    **{"step_ms": 20.0, "cpu_ms": 30.0, "gap_ms": 25.0},
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"rss_mib": 600.0}, ["life 2: rss_mib from 500.0 to 600.0"]),
        ({"descriptors": 17.0}, ["life 2: descriptors from 10.0 to 17.0"]),
        ({"threads": 23.0}, ["life 2: threads from 20.0 to 23.0"]),
        ({"step_ms": 40.0}, []),
        ({"step_ms": 40.0, "cpu_ms": 60.0}, ["life 2: step_ms from 20.0 to 40.0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_a_process_has_more_at_its_end_is_named(changed, expected):
    smaller = dict.fromkeys(FLAT, 1.0)  # while it warms up
    lives = [[smaller, FLAT, FLAT], [smaller, FLAT, FLAT | changed]]
    assert soak_server.grown(lives) == expected


def test_the_median_lies_within_its_bucket():
    counts = {"<= 0.01": 10.0, "<= 0.02": 30.0, "<= +Inf": 30.0, "cpu": 7.0}
    assert soak_server.median_of_buckets(counts) == pytest.approx(0.0125)
    assert soak_server.median_of_buckets(dict.fromkeys(counts, 0.0)) == 0


def test_a_wrong_directory_is_named_in_one_line(capsys):
    with pytest.raises(SystemExit) as exit_:
        soak_server.main(["--model", "nowhere"])
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "argument --model: expected a directory, got 'nowhere'" in line


@pytest.mark.slow
def test_a_short_soak_answers_everything_and_finds_its_prompts_on_the_disk(capsys):
    model = str(demo_model_path())
    soak_server.main(["--model", model, "--minutes", "0.3", "--pause", "0.05"])
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert len(lines) == 10, lines
    assert report["failures"] == report["differing_probes"] == report["blocks_in_use"] == 0
    assert report["cached_after_restart"] > 0 and report["from_disk"] > 0
    assert report["exit_status"] == 0 and len(report["counts"]) >= 7
