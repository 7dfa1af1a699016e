"""A state that a step loads from the disk is not on its way back in the same step."""

from tests.support.engine.disk_engines import GREEDY, make_engine, outputs, tokens_of
from tests.support.models import tiny_models


def test_a_state_that_a_step_loads_is_not_stored_by_it(monkeypatch, tmp_path):
    """Its key may leave the disk meanwhile: the state's content is not there before the step."""
    model, prompts = tiny_models.tiny_model("jamba"), [tokens_of(0)]
    expected = outputs(model, prompts, tmp_path)[0]
    engine = make_engine(model, tmp_path)
    tier, adopted, gone = engine.scheduler.tier, [], set()
    tier._seconds_to_compute = lambda start, stop: 0.0
    adopt, contains = tier._adopt, type(tier.store).__contains__

    def noted(awaited):
        loads = adopt(awaited)
        adopted.extend(load.state for load in loads if load.state)
        gone.update(load.key for load in loads if load.state)
        tier._coming.clear()  # as if the K/V had been in the pool
        return loads

    monkeypatch.setattr(tier, "_adopt", noted)
    monkeypatch.setattr(
        type(tier.store),
        "__contains__",
        lambda store, key: key not in gone and contains(store, key),
    )
    done = engine.generate(prompts, **GREEDY)
    assert adopted and engine.stats.faults == 0
    assert [each.tokens for each in done] == expected and done[0].cached_prompt_tokens == 48
    engine.close()
