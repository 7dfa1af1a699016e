"""An engine that synchronises between phases computes the same and tells their times."""

import numpy as np
import pytest

from mlx_paged import Engine
from mlx_paged.metrics.recorder import PhaseTimes
from mlx_paged.metrics.tick import PHASES
from tests.support.models.tiny_models import VOCAB, tiny_model

BLOCK = 4
rng = np.random.default_rng(0)
PROMPTS = [rng.integers(0, VOCAB, n).tolist() for n in (30, 7, 18)]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def test_a_phase_does_not_count_what_lies_within_it():
    times = iter([0, 1, 3, 4, 6, 10])
    phases = PhaseTimes(lambda: next(times))
    with phases.measure("outer"):
        with phases.measure("inner"):
            pass
        with phases.measure("inner"):
            pass
    assert phases.take() == {"outer": 10 - 4, "inner": 4}
    assert phases.take() == {}


@pytest.mark.parametrize("architecture", ["llama", "jamba", "gemma3_text"])
def test_profiling_times_the_phases_and_changes_no_token(architecture):
    model = tiny_model(architecture)
    options = {"block_size": BLOCK, "num_blocks": 64, "prefill_chunk": 16}
    plain = Engine(model, **options)
    profiled = Engine(model, profile=True, **options)
    expected = plain.generate(PROMPTS, max_tokens=8)
    found = profiled.generate(PROMPTS, max_tokens=8)
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    for tick in profiled.ticks:
        phases = [getattr(tick, name) for name in PHASES]
        assert 0 < sum(phases) <= tick.launch_ms + tick.gc_ms
        assert tick.kv_write_ms > 0 and tick.forward_ms > 0
    assert all(getattr(tick, name) is None for tick in plain.ticks for name in PHASES)
    assert profiled.metrics()["profile"] and not plain.metrics()["profile"]


@pytest.mark.parametrize("lookahead", [False, True])
def test_profiling_goes_on_after_a_failure(model, lookahead):
    engine = Engine(model, num_blocks=64, profile=True, lookahead=lookahead)
    launch = engine.runner.launch
    for prompt in PROMPTS:  # no one of them is to blame, so all go on
        engine.add_request(prompt, max_tokens=6)
    engine.step()
    engine.runner.launch = lambda *args: 1 / 0
    engine.step()
    engine.runner.launch = launch
    while engine.has_work:
        engine.step()
    (failed,) = (tick.index for tick in engine.ticks if tick.faults)
    assert max(tick.sample_ms for tick in engine.ticks if tick.index > failed) > 0


def test_without_profiling_nothing_is_wrapped(model):
    engine = Engine(model, num_blocks=8)
    wrapped = {"write", "gather", "copy_blocks", "attend"}
    for owner in (engine.manager.pool, *engine.runner.layers):
        assert not wrapped & vars(owner).keys()
