"""In random schedules every access of a pool's block is ordered."""

import json
from copy import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.gpu_order.model.backend import judge
from tests.gpu_order.model.knockouts import FIXES
from tests.gpu_order.model.lives import KINDS, small_model
from tests.gpu_order.model.rules import ALL_RULES, Rule
from tests.gpu_order.model.trace import Event
from tests.gpu_order.model.tracer import Tracer
from tests.gpu_order.schedules import main, run_schedule

SAMPLE = 3 * len(KINDS)


@pytest.mark.slow
def test_nothing_is_unordered_in_random_schedules(capsys):
    assert main(["--schedules", str(SAMPLE), "--seed", "7"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["hazards"] == 0 and counts["schedules"] == SAMPLE
    seen = ("PagedAttention", "PoolRead", "WriteKV", "CopyBlocks", "preemptions", "forks", "beams")
    seen += ("aborts", "cached_tokens", "samples", "faults", "held_back", *KINDS)
    assert not [name for name in seen if not counts.get(name)], "something never happened"


@pytest.mark.slow
def test_a_hazard_comes_with_the_command_that_repeats_it(capsys):
    fix = "attention registers the pool"
    found = next(i for i in range(100) if run_schedule(5, i, FIXES[fix]).report.hazards)
    assert main(["--seed", "5", "--only", str(found), "--without", fix]) == 1
    *before, last = capsys.readouterr().out.splitlines()
    assert before[1].startswith("  WAR: ") and f"--only {found} --without '{fix}'" in before[-1]
    assert json.loads(last)["hazards"] > 0


def trace_of_mlx(waits: bool) -> list[Event]:
    """A prompt in chunks and a decode, with MLX's own KVCache. No eval is waited for, unless it
    `waits`; a chunk depends on the one before by the cache alone."""
    trace: list[Event] = []
    model, tracer = small_model("llama"), Tracer(trace.append)
    kept: list[list[mx.array]] = []
    with tracer.installed():
        evaluate = mx.eval if waits else mx.async_eval
        cache = make_prompt_cache(model)
        token = mx.array([[1, 2, 3]])
        for is_chunk in (True, True, False, False, False):
            logits = model(token, cache=cache)
            # An update replaces what is behind the cache's own Python objects.
            kept.append([copy(x) for layer in cache for x in (layer.keys, layer.values)])
            tracer.know(*kept[-1])
            if is_chunk:
                evaluate(kept[-1])
            else:
                token = mx.argmax(logits[:, -1:], axis=-1)
                evaluate(token)
    return trace


@pytest.mark.sampled(2)
@pytest.mark.parametrize("max_ops", [0, 7, 40])
@pytest.mark.parametrize("waits", [False, True])
def test_mlx_s_own_cache_is_clean(waits, max_ops):
    trace = trace_of_mlx(waits)
    assert sum(op.name == "SliceUpdate" for event in trace for op in getattr(event, "ops", ())) > 10
    assert not judge(trace, max_ops=max_ops).hazards


def test_mlx_s_own_cache_is_clean_because_what_is_read_is_not_donated():
    hazards = judge(trace_of_mlx(False), ALL_RULES - {Rule.DONATION}, max_ops=0).hazards
    assert {(h.kind, h.second.op.name) for h in hazards} == {("WAR", "SliceUpdate")}
