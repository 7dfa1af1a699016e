"""A model that engines use stays its owner's: it can be copied, and several threads share it."""

import copy
import pickle
import threading

import numpy as np
import pytest

from mlx_paged import Engine, ops
from mlx_paged.runner.compiled_decode import CompiledDecode
from tests.support.models.architectures import VOCAB, build
from tests.support.models.tiny_models import solo_greedy

PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (3, 5)).tolist()
OPTIONS = {"block_size": 4, "num_blocks": 64, "prewarm": False}


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("name", ["llama", "jamba", "lfm2"])
def test_a_copy_is_a_plain_model_of_its_own(name, copied):
    model = build(name)
    kinds = [type(module) for module in model.modules()]
    engine = Engine(model, **OPTIONS)
    twin = copied(model)
    assert [type(module) for module in twin.modules()] == kinds
    expected = [solo_greedy(model, prompt, 5) for prompt in PROMPTS]
    twin.update(build(name, seed=1).parameters())
    assert [solo_greedy(model, prompt, 5) for prompt in PROMPTS] == expected
    others = [solo_greedy(twin, prompt, 5) for prompt in PROMPTS]
    assert others != expected
    for own, tokens in ((engine, expected), (Engine(twin, **OPTIONS), others)):
        assert [c.tokens for c in own.generate(PROMPTS, max_tokens=5)] == tokens


@pytest.mark.parametrize("is_there", [False, True], ids=["a new engine", "an engine"])
def test_no_thread_sees_the_parameters_of_a_trace(is_there, monkeypatch):
    model = build("llama")
    engine = Engine(model, **OPTIONS, compile=False)
    traces, plain = Engine(model, **OPTIONS, compile=True), CompiledDecode._plain
    tracing, found = threading.Event(), []

    def other() -> None:
        assert tracing.wait(10)
        own = engine if is_there else Engine(model, **OPTIONS, compile=True)
        found.extend(completion.tokens for completion in own.generate(PROMPTS, max_tokens=5))

    thread = threading.Thread(target=other)

    def waits(self, arrays):
        if not ops.has_values(arrays[0]) and not tracing.is_set():
            tracing.set()
            thread.join(0.5)  # as long as this trace lasts, the other thread has to wait
        return plain(self, arrays)

    monkeypatch.setattr(CompiledDecode, "_plain", waits)
    thread.start()
    own = [completion.tokens for completion in traces.generate(PROMPTS, max_tokens=5)]
    thread.join()
    assert tracing.is_set()
    assert own == found == [solo_greedy(model, prompt, 5) for prompt in PROMPTS]
