"""The bench of adapters: what it prints; never times."""

import json

import pytest

from bench import adapters


def test_three_courses_decode(capsys):
    adapters.main(["--model=tiny", "--rows=3", "--rank=2", "--steps=2"])
    *_, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["bench"] == "adapters" and list(result["courses"]) == ["none", "one", "each"]
    assert all(course["tokens_s"] > 0 for course in result["courses"].values())
    assert result["courses"]["none"]["of_none"] == 1.0


def test_loads_beside_streams(capsys, monkeypatch):
    monkeypatch.setattr(adapters, "QUIET_S", 0.1)
    adapters.main(["--model=tiny", "--rows=2", "--rank=2", "--many=3"])
    *_, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["megabytes"] > 0 and result["held"] == 1
    assert result["first_token_longest_s"] >= result["load_median_s"] > 0
    assert result["again_token_median_s"] > 0 and result["again_gap_s"] > 0


def test_streams_that_end_too_early_are_told(monkeypatch):
    monkeypatch.setattr(adapters, "QUIET_S", 0.5)
    monkeypatch.setattr(adapters, "STREAM_TOKENS", 2)
    with pytest.raises(SystemExit, match="a stream ended after 2 tokens: take fewer --many"):
        adapters.main(["--model=tiny", "--rows=2", "--rank=2", "--many=3"])
