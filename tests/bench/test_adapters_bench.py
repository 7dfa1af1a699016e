"""The bench of adapters: what it prints; never times."""

import json

from bench import adapters


def test_three_courses_decode(capsys):
    adapters.main(["--model=tiny", "--rows=3", "--rank=2", "--steps=2"])
    *_, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["bench"] == "adapters" and list(result["courses"]) == ["none", "one", "each"]
    assert all(course["tokens_s"] > 0 for course in result["courses"].values())
    assert result["courses"]["none"]["of_none"] == 1.0
