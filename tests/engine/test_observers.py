"""Who measures an engine sees its steps pass: launched, then settled."""

import pytest

from mlx_paged import Engine
from mlx_paged.loading import load_model
from mlx_paged.scheduler.levels import Levels

PROMPTS = ["def f(x):", "import os\n" * 8, "class A:"]


@pytest.fixture
def engine() -> Engine:
    return Engine(*load_model(), num_blocks=64, prefill_chunk=16)


def run(engine: Engine, max_tokens: int = 6) -> list[int]:
    """The tokens that the engine returns, in order."""
    for prompt in PROMPTS:
        engine.add_request(prompt, max_tokens=max_tokens, ignore_eos=True)
    tokens = []
    while engine.has_work:
        tokens += [output.token for output in engine.step()]
    return tokens


def test_each_step_is_launched_and_then_settled_in_order(engine):
    launched, settled = [], []
    engine.observers.launched.append(launched.append)
    engine.observers.settled.append(lambda each: settled.append((each, len(launched))))
    run(engine)
    assert [each for each, _ in settled] == launched[: len(settled)]
    assert len(settled) == engine.stats.steps > 3
    ahead = [count - index for index, (_, count) in enumerate(settled, 1)]
    assert set(ahead) == {0, 1}, "a step is launched before the one before it is settled"


def test_a_report_has_the_tokens_and_the_times_of_its_step(engine):
    choices, seconds = [], []

    def note(launched) -> None:
        report = launched.report
        choices.extend(choice.token for choice in report.choices)
        seconds.append(report.seconds)
        assert report.step.spans and 0 < report.blocks_in_use <= 64
        assert min(report.launch_seconds, report.commit_seconds, report.settle_seconds) > 0

    engine.observers.settled.append(note)
    assert run(engine) == choices
    assert engine.stats.generation_tokens == len(choices)
    assert sum(tick.launched_prefill_tokens for tick in engine.ticks) == engine.stats.prompt_tokens


def test_wrong_drafts_leave_the_report():
    engine = Engine(*load_model(), num_blocks=64, speculate="ngram", lookahead=False)
    kept, computed = [], []
    engine.observers.settled.append(lambda each: kept.append(len(each.report.choices)))
    engine.observers.settled.append(lambda each: computed.append(len(each.requests)))
    speculation = engine.scheduler.decoding
    speculation._depths = lambda likely: {request: 3 for request, p in likely.items() if p}
    run(engine, max_tokens=40)
    wrong = speculation.num_drafted - speculation.num_right
    assert sum(computed) - sum(kept) == wrong > 0
    assert engine.levels().reported["drafts"] == speculation.num_drafted


def test_levels_are_those_of_the_latest_tick(engine):
    engine.add_request("def f(x):", max_tokens=4, ignore_eos=True)
    engine.step()
    tick, levels = engine.ticks[-1], engine.levels()
    assert isinstance(levels, Levels) and levels.running == 1
    for name in ("running", "waiting", "blocks_in_use", "blocks_cached"):
        assert getattr(tick, name) == getattr(levels, name), name
    metrics = engine.metrics()
    assert [metrics[n] for n in ("running", "waiting")] == [levels.running, levels.waiting]
