"""Wrong arguments of an engine, of its service and of prompt caches are named."""

import re
from dataclasses import replace
from inspect import signature
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from transformers import AutoTokenizer

from mlx_paged import (
    BatchGenerator,
    Engine,
    EngineService,
    SamplingParams,
    UnsupportedModelError,
    make_prompt_cache,
)
from mlx_paged.cli import demo_model_path
from mlx_paged.loading import load_model
from tests.support.models.tiny_models import tiny_model

PATH = str(demo_model_path())


@pytest.fixture(scope="module")
def loaded():
    return load_model()


def no_models(model, tokenizer):
    """What new callers give where a model is expected."""
    return [PATH, demo_model_path(), (model, tokenizer), tokenizer, None, nn.Linear(2, 2), print]


@pytest.mark.parametrize("make", [Engine, BatchGenerator, make_prompt_cache])
def test_what_is_no_model_is_named(loaded, make):
    for given in no_models(*loaded):
        with pytest.raises(ValueError, match=r"^\[\w+\] model is .*: expected a model, the first"):
            make(given)


def test_a_model_in_the_place_of_a_tokenizer_is_named(loaded):
    model, tokenizer = loaded
    for given in (model, PATH, tokenizer._tokenizer._tokenizer):
        with pytest.raises(ValueError, match=r"^\[Engine\] tokenizer is .*: expected the second"):
            Engine(model, given)
    with pytest.raises(ValueError, match=r"^\[Engine\] draft_model is .*: expected a model"):
        Engine(model, tokenizer, draft_model=PATH)


def test_a_prompt_that_is_longer_than_the_context_is_told_once(loaded, caplog):
    model, tokenizer = loaded
    positions = model.args.max_position_embeddings
    engine = Engine(model, tokenizer, num_blocks=positions // 16 + 16, prewarm=False)
    told = []
    for count in (positions - 1, positions, positions + 1):
        engine.abort(engine.add_request([1] * count, max_tokens=1))
        told.append([record.getMessage() for record in caplog.records])
    assert told[0] == [] and told[1] == told[2]
    (line,) = told[1]
    assert f"{positions} tokens, but the model has {positions} positions" in line


def test_a_tokenizer_of_transformers_is_one(loaded):
    model, tokenizer = loaded
    engines = Engine(model, AutoTokenizer.from_pretrained(PATH)), Engine(model, tokenizer)
    ours, expected = (e.generate("def main(", max_tokens=64)[0] for e in engines)
    assert ours.text == expected.text != ""
    assert ours.finish_reason == expected.finish_reason


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda e: SamplingParams(temp=0.7),
            "SamplingParams() {}'temp' (did you mean temperature?)",
        ),
        (lambda e: e.generate("x", temp=0.7), "{}'temp' (did you mean temperature?)"),
        (lambda e: e.add_request([1], max_token=7), "{}'max_token' (did you mean max_tokens?)"),
        (lambda e: e.sample("x", 2, topp=0.7), "{}'topp' (did you mean top_p?)"),
        (
            lambda e: e.generate("x", n=2),
            "{}'n' (several completions of a prompt: Engine.sample(prompts, n))",
        ),
        (lambda e: e.stream("x", zzz=0.7), "SamplingParams() {}'zzz'"),
        (lambda e: replace(SamplingParams(), temp=1), "{}'temp' (did you mean temperature?)"),
        (lambda e: Engine(None, kv_mem=1), "Engine() {}'kv_mem' (did you mean kv_memory?)"),
        (lambda e: Engine(None, max_run=1), "Engine() {}'max_run' (did you mean max_running?)"),
        (
            lambda e: BatchGenerator(None, prefix=False),
            "BatchGenerator() {}'prefix' (did you mean prefix_cache?)",
        ),
    ],
)
def test_an_unknown_option_is_answered_with_a_similar_one(loaded, call, message):
    engine = Engine(*loaded, num_blocks=16, prewarm=False)
    expected = re.escape(message.format("got an unexpected keyword argument "))
    with pytest.raises(TypeError, match=f"{expected}$"):
        call(engine)
    assert not engine.has_work


def test_the_signatures_of_classes_that_suggest_are_whole():
    assert signature(SamplingParams).parameters["temperature"].default == 0.0
    assert signature(Engine).parameters["kv_disk_gb"].default == 20.0


WRONG = {
    "policy": (["lifo", None, 1, np.array([[1]])], "one of fcfs, priority, shortest"),
    "preempt": (["oldest", None, mx.array(1)], "one of newest, longest, fewest-generated"),
    "speculate": (["n-gram", [1], {"a": 1}], "None or, without a draft model, one of ngram"),
    "prefix_cache": ([None, "no", np.array([1, 2])], "True or False"),
    "lookahead": ([None, "no", 1], "True or False"),
    "profile": ([None, "no"], "True or False"),
    "cpu_linear": (["no", 0], "True, False or None"),
    "compile": (["no", np.array([1, 2])], "True, False or None"),
    "prewarm": (["no", 1], "True, False or None"),
    "metrics_jsonl": ([0, True, b"x"], "a path or None"),
    "kv_disk": ([1.5, {}, b"x"], "a path or None"),
    "kv_bits": ([np.array([8, 4]), [8], 5, 8.0, True, "5"], "8, 6 or 4"),
    "max_running": (["8", 0, [PATH] * 99], "an integer >= 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_of_an_engine_are_named(loaded, name):
    values, expected = WRONG[name]
    for value in values:
        with pytest.raises(ValueError, match=rf"^\[Engine\] {name} is ") as error:
            Engine(*loaded, num_blocks=4, **{name: value})
        assert f": expected {expected}" in str(error.value)
        assert len(str(error.value)) < 250 and "\n" not in str(error.value)


def test_outputs_go_to_what_can_be_called(loaded):
    engine = Engine(*loaded, num_blocks=16)
    for call in (engine.generate, lambda *args, **options: engine.sample(*args, 2, **options)):
        with pytest.raises(ValueError, match=re.escape("on_output is 'print': expected a callab")):
            call("x", on_output="print")
    assert not engine.has_work


def test_a_service_takes_an_engine(loaded):
    for given in (*loaded, PATH, None, Engine):
        with pytest.raises(ValueError, match=r"^\[EngineService\] engine is .*: expected an Eng"):
            EngineService(given)
    engine = Engine(*loaded, num_blocks=4)
    for given in (0, None, "many", 1.5):
        with pytest.raises(ValueError, match=r"max_unread is .*: expected an integer >= 1"):
            EngineService(engine, max_unread=given)


class ModelOfVision(type(tiny_model("llama"))):
    """Returns its logits as mlx-vlm's language models do."""

    def __call__(self, *args, **options):
        return SimpleNamespace(logits=super().__call__(*args, **options))


def test_a_model_that_returns_no_logits_is_refused_by_name():
    model = tiny_model("llama")
    model.__class__ = ModelOfVision
    with pytest.raises(UnsupportedModelError, match="llama is refused: it returns SimpleNamespace"):
        Engine(model)


def test_each_option_reaches_the_config_under_its_own_name(monkeypatch, loaded):
    """Nothing but the configuration sees an option before the option is checked."""
    names = [name for name in signature(Engine).parameters if name not in ("model", "tokenizer")]
    given = {name: object() for name in names}
    found = {}

    def config(**options):
        found.update(options)
        raise ValueError("it sees them")

    monkeypatch.setattr("mlx_paged.engine.engine.EngineConfig", config)
    with pytest.raises(ValueError, match="it sees them"):
        Engine(*loaded, **given)
    assert found == given
