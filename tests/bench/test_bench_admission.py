"""The admission bench: what it does to both kinds of caches and what it prints; never times."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache as make_mlx_lm_cache

from bench import admission
from bench.admission import CALLS, Cost, LiveBatch, cost_of, token_bytes
from mlx_paged import make_prompt_cache

ROWS, TOKENS = 3, 40
SMALL = ["--model=tiny", f"--rows={ROWS}", f"--tokens={TOKENS}", "--rounds=1"]


def rows_of(cache) -> list[np.ndarray]:
    """K of each row without its padding."""
    keys = np.array(mx.array(cache.keys))
    lengths = cache.offset.tolist()
    first = cache.left_padding.tolist()
    return [row[:, i : i + n] for row, i, n in zip(keys, first, lengths, strict=True)]


@pytest.mark.slow
def test_both_kinds_of_batches_hold_the_same_after_every_call(model):
    batches = [
        LiveBatch(make, model, ROWS, TOKENS, 9) for make in (make_mlx_lm_cache, make_prompt_cache)
    ]
    expected = {
        "growth": [240] * 3,
        "decode": [241] * 3,
        "admission": [241] * 3 + [9],
        "first decode": [242] * 3 + [10],
        "completion": [242] * 3,
        "fork": [242] * 3,
    }
    assert list(expected) == list(CALLS)
    for (_, call), lengths in zip(CALLS.values(), expected.values(), strict=True):
        held = []
        for batch in batches:
            mx.random.seed(1)
            assert call(batch).ms > 0
            held.append([rows_of(cache) for cache in batch.caches])
            assert batch.caches[0].offset.tolist() == lengths
        for theirs, ours in zip(*held, strict=True):
            for a, b in zip(theirs, ours, strict=True):
                assert np.array_equal(a, b)


@pytest.mark.slow
def test_memory_is_that_of_the_call_alone():
    mx.eval(mx.ones(1 << 24) + 1)  # a higher peak, before
    kept = []
    cost = cost_of(lambda: kept.append(mx.ones(1 << 20)) or mx.eval(kept, mx.ones(1 << 19) + 1))
    assert cost.kept == 4 << 20 and 6 << 20 <= cost.peak < 16 << 20
    assert cost_of(kept.clear).kept == -(4 << 20)


@pytest.mark.slow
def test_the_bench_measures_every_call_and_visit_of_both(capsys, model):
    admission.main(SMALL)
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["live_mib"] == pytest.approx(ROWS * TOKENS * token_bytes(model) / 2**20, abs=0.01)
    assert token_bytes(model) == 2 * 2 * 32 * 4
    for call in admission.CALLS:
        assert set(result[call]) == {"mlx_lm", "mlx_paged"}
        assert all(row["ms"] > 0 for row in result[call].values())
        assert sum(line.startswith(f"{call} ") for line in lines) == 2
    assert set(result["visit"]) == {"mlx_lm", "mlx_lm, patched", "mlx_paged"}
    assert result["admission"]["mlx_paged"]["kept_mib"] == 0
    assert result["admission"]["mlx_lm"]["kept_mib"] > 0


def test_a_table_shows_medians_over_rounds():
    costs = [
        Cost(ms, peak << 20, kept << 20) for ms, peak, kept in ((1, 9, 2), (5, 3, 2), (3, 4, 0))
    ]
    assert admission.medians(costs) == {"ms": 3, "peak_mib": 4, "kept_mib": 2}


def test_a_visit_is_what_it_takes_beyond_the_steps_of_the_others(monkeypatch):
    """Plain steps of 2 s; the visitor's two steps take 3 s and 5 s, its insertion 1 s. A call that
    only tells how far its prompt got is none."""
    now = [0.0]
    seconds = iter([2, 2, 2, 0, 3, 5, 2, 2, 2])
    monkeypatch.setattr(admission.time, "perf_counter", lambda: now[0])

    class Response:
        def __init__(self, uid):
            self.uid = uid

    class Generator:
        calls = 0

        def insert(self, prompts, max_tokens):
            now[0] += 1
            return [7]

        def next(self):
            now[0] += next(seconds)
            self.calls += 1
            uids = {4: [], 5: [0, 7]}.get(self.calls, [0])
            return [], [Response(uid) for uid in uids]

    assert admission.Streams(Generator()).visit([1]).ms == pytest.approx(1000 * (1 + 8 - 2 * 2))


@pytest.mark.parametrize("option", ["--rows", "--tokens", "--admitted-tokens", "--rounds"])
def test_a_wrong_argument_is_reported_in_one_line(option, capsys):
    with pytest.raises(SystemExit) as end:
        admission.main([option, "0"])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert (
        err == f"bench.admission: error: argument {option}: expected a whole number >= 1, got '0'\n"
    )
