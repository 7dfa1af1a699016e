"""The bench of shared prefixes: what it computes and prints; never times."""

import json

import mlx.core as mx
import pytest

from bench import shared_prefixes
from bench.flags.head_counts import HeadCounts
from bench.shared_prefixes import Batch, attention, gain, least_seconds

SMALL = ["--rounds=1", "--heads=4:2:32", "--dtypes=float32", "--batches=3x160+20"]
SERVED = ["--model=tiny", "--agents=3", "--samples=3", "--shared-tokens=200", "--max-tokens=4"]


def test_both_measurements(capsys):
    shared_prefixes.main([*SMALL, *SERVED])
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    (row,) = result["op"]
    assert (row["heads"], row["dtype"], row["batch"]) == ("4:2:32", "float32", "3x160+20")
    assert row["alone_ms"] > 0 and row["together_ms"] > 0 and row["least_ms"] > 0
    assert [each["served"] for each in result["served"]] == ["3 agents", "3 samples"]
    assert all(each["together_tokens_s"] > 0 for each in result["served"])
    assert any(line.startswith("served") for line in lines)


def test_other_bits_are_an_error(monkeypatch):
    """The keys of a sequence that says it shares what it does not."""
    monkeypatch.setattr(mx, "array_equal", lambda a, b: False)
    with pytest.raises(ArithmeticError, match="other bits together than alone"):
        attention(Batch(2, 128, 16), HeadCounts(2, 1, 32), "float32")


def test_the_least_time_is_that_of_the_bytes_or_of_the_products():
    batch, heads = Batch(4, 96, 4), HeadCounts(4, 2, 32)
    rows, keys = 96 + 4 * 4, 4 * 100
    by_bytes = least_seconds(batch, heads, "bfloat16", 1.0, 1e9)
    assert by_bytes == pytest.approx(2 * rows * 2 * 32 * 2 / 2**30)
    by_products = least_seconds(batch, heads, "bfloat16", 1e9, 1.0)
    assert by_products == pytest.approx(4 * keys * 4 * 32 / 1e9)
    assert gain({"alone": [4.0, 9.0, 2.0], "together": [2.0, 3.0, 2.0]}) == 2.0


@pytest.mark.parametrize("text", ["16x4096", "1x64+4", "3x15+4", "3x64+0", "axb+c"])
def test_a_wrong_batch_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        shared_prefixes.main(["--batches", text])
    assert "SEQUENCESxSHARED+OWN" in capsys.readouterr().err
