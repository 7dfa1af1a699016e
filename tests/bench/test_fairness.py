"""The bench of fairness over HTTP: one client's requests beside another's, in steps."""

import json

import pytest

from bench import fairness
from bench.flags.fairness import parse

SMALL = ["--requests", "80", "--probes", "6", "--prompt-tokens", "12"]


def test_a_client_is_served_beside_one_that_fills_the_queue(capsys):
    """The queue has room for a half of the many requests; the others are refused."""
    fairness.main([*SMALL, "--queue", "8"])
    head, alone, beside, last = capsys.readouterr().out.splitlines()[-4:]
    result = json.loads(last)
    assert head.startswith("steps") and alone.startswith("alone") and beside.startswith("beside")
    assert result["alone"]["count"] == result["beside"]["count"] == 6
    assert result["many"]["503"] == 40 and result["under_way"] > 0
    assert result["later"] <= fairness.MOST_MORE and result["is_fair"]


@pytest.mark.slow
def test_without_turns_the_client_waits_or_is_refused():
    late = fairness.measure(parse([*SMALL, "--policy", "fcfs"]))
    assert late["later"] > fairness.MOST_MORE and not late["is_fair"]
    refused = fairness.measure(parse([*SMALL, "--policy", "fcfs", "--queue", "8"]))
    assert refused["refused"].get(503, 0) > 0 and not refused["is_fair"]
