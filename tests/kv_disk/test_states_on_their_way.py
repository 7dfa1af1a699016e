"""States of recurrent layers on their way to the disk and back."""

from mlx_paged import Engine
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.runner.recurrent_states import RecurrentStates
from tests.support.engine.begun import has_begun
from tests.support.models.tiny_models import tiny_model


def test_states_on_their_way_begin_with_their_step(monkeypatch, tmp_path):
    """Else a copy would be computed after the step that follows, and the tokens would wait for it;
    a state that was read would be computed by the thread that needs it."""
    model = tiny_model("lfm2")
    options = {"block_size": 4, "num_blocks": 60, "kv_disk": tmp_path, "model_files": []}
    copy, transfer, put = RecurrentStates.copy, ModelRunner._transfer, RecurrentStates.put
    moved, begun = [], []

    def copied(states, state_id):
        moved.append(copy(states, state_id))
        return moved[-1]

    def stored(states, state_id, content):
        moved.append(content)
        put(states, state_id, content)

    def transferred(runner, stores, loads):
        moved.clear()
        transfer(runner, stores, loads)
        begun.extend(
            has_begun(a) for each in moved for layer in each for a in layer if a is not None
        )

    monkeypatch.setattr(RecurrentStates, "copy", copied)
    monkeypatch.setattr(RecurrentStates, "put", stored)
    monkeypatch.setattr(ModelRunner, "_transfer", transferred)
    for _ in range(2):
        engine = Engine(model, **options)
        engine.scheduler.tier._seconds_to_compute = lambda start, stop: 0.0  # always read
        engine.generate([[1 + i % 50 for i in range(40)]], max_tokens=3)
        while engine.copy_when_idle():
            pass
        engine.close()
        assert begun and all(begun)
        begun.clear()
