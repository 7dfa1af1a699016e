"""The soak: arguments, what it counts, and the JSON line; never the times."""

import json

import pytest

from scripts import soak


def test_a_short_soak_serves_every_request_and_frees_every_block(capsys):
    report = soak.main(["--requests", "200", "--num-blocks", "24", "--per-step", "3"])
    *tenths, last = capsys.readouterr().out.splitlines()
    printed = json.loads(last)
    assert len(tenths) == 10 and printed == report
    assert 200 <= report["requests"] < 205 and report["leaked_blocks"] == 0
    assert min(report["tokens"], report["aborts"], report["cached_tokens"]) > 0
    assert abs(report["active_growth_bytes"]) < 100_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests", "9"], "--requests: expected a whole number >= 10, got '9'"),
        (["--per-step", "0"], "--per-step: expected a number from 0.01 to 100, got '0'"),
        (["--num-blocks", "15"], "--num-blocks: expected a whole number >= 16, got '15'"),
        (["--model", "huge"], "--model: invalid choice: 'huge'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_arguments_are_named_in_one_line(capsys, options, message):
    with pytest.raises(SystemExit) as exit_:
        soak.main(options)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
