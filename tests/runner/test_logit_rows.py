"""The output projection computes the sampled rows only, and the model does not change for it."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_paged.runner.skip_unsampled import LogitRows, override
from tests.support.models.tiny_models import VOCAB, tiny_model

TOKENS = mx.array(np.random.default_rng(0).integers(VOCAB, size=(3, 7)))
ROWS = mx.array([6, 0, 3, 3])


@pytest.fixture(params=["untied", "tied", "untied, quantized", "tied, quantized"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    model = tiny_model("llama", tie_word_embeddings=request.param.startswith("tied"))
    if request.param.endswith("quantized"):
        nn.quantize(model, group_size=32, bits=8)
    return model


@pytest.fixture
def projected(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of what the model's vocabulary projections are given, before anything wraps them."""
    shapes: list[tuple[int, ...]] = []
    names = {
        nn.Linear: "__call__",
        nn.QuantizedLinear: "__call__",
        nn.Embedding: "as_linear",
        nn.QuantizedEmbedding: "as_linear",
    }
    for kind, method in names.items():
        original = getattr(kind, method)

        def recording(module, x, original=original):
            if module.weight.shape[0] == VOCAB:
                shapes.append(x.shape)
            return original(module, x)

        monkeypatch.setattr(kind, method, recording)
    yield shapes


def assert_close(given: mx.array, expected: mx.array) -> None:
    """Equal to the rounding of a matrix product of other sizes."""
    assert given.shape == expected.shape
    difference = np.array(given, np.float64) - np.array(expected, np.float64)
    assert np.sqrt((difference**2).mean()) < 1e-6 * np.array(expected).std()


@pytest.mark.parametrize("axis", [0, 1], ids=["batch axis", "token axis"])
def test_selected_logits_are_those_rows_of_all_logits(model, axis):
    rows = ROWS % TOKENS.shape[axis]
    expected = mx.take(model(TOKENS), rows, axis=axis)
    with LogitRows.of(model).only(rows, axis):
        assert_close(model(TOKENS), expected)


def test_the_projection_sees_the_selected_rows_only(projected, model):
    selector = LogitRows.of(model)
    model(TOKENS)
    with selector.only(ROWS, 1):
        model(TOKENS)
    with selector.only(mx.array([2]), 0):
        model(TOKENS)
    hidden = model.args.hidden_size
    assert projected == [(3, 7, hidden), (3, 4, hidden), (1, 7, hidden)]


def test_no_rows_give_no_logits(model):
    with LogitRows.of(model).only(mx.array([], mx.int32), 1):
        assert model(TOKENS).shape == (3, 0, VOCAB)


def test_outside_the_context_all_logits_come(model):
    before = model(TOKENS)
    selector = LogitRows.of(model)
    assert mx.array_equal(model(TOKENS), before)
    with selector.only(ROWS, 1):
        model(TOKENS)
    assert mx.array_equal(model(TOKENS), before)


def test_an_exception_ends_the_selection(model):
    before = model(TOKENS)
    with pytest.raises(KeyError), LogitRows.of(model).only(ROWS, 1):
        raise KeyError
    assert mx.array_equal(model(TOKENS), before)


def test_other_threads_get_all_logits(model):
    before = model(TOKENS)
    mx.eval(before)
    with LogitRows.of(model).only(ROWS, 1), ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: mx.array_equal(model(TOKENS), before).item()).result()


def test_what_was_taken_before_the_projection_is_not_selected_again(model):
    selector = LogitRows.of(model)
    with selector.only(mx.array([2, 0]), 0):
        tokens = selector.take(TOKENS)
        assert tokens.tolist() == [TOKENS[2].tolist(), TOKENS[0].tolist()]
        assert_close(model(tokens), mx.take(model(TOKENS), mx.array([2, 0]), axis=0))


def test_token_embeddings_are_not_selected(model):
    before = model.model.embed_tokens(TOKENS)
    with LogitRows.of(model).only(ROWS, 1):
        assert mx.array_equal(model.model.embed_tokens(TOKENS), before)


def test_the_models_parameters_and_modules_stay_as_they_are(model):
    parameters = dict(tree_flatten(model.parameters()))
    modules = [(name, id(module)) for name, module in model.named_modules()]
    keys = sorted(model)
    LogitRows.of(model)
    after = dict(tree_flatten(model.parameters()))
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] for name in parameters)
    assert [(name, id(module)) for name, module in model.named_modules()] == modules
    assert sorted(model) == keys


def changed(model: nn.Module, kinds: Mapping[str, type[nn.Module]]) -> set[str]:
    """Names of the modules that are of a subclass of their class in `kinds`."""
    found = dict(model.named_modules())
    assert all(isinstance(module, kinds[name]) for name, module in found.items())
    paths = [name for name, module in found.items() if type(module) is not kinds[name]]
    return {path.rpartition(".")[2] for path in paths}


def test_modules_are_of_another_class_within_the_context_only(model):
    kinds = {name: type(module) for name, module in model.named_modules()}
    selector = LogitRows.of(model)
    of_other = selector.only(ROWS, 1)
    assert changed(model, kinds) == set()
    with ThreadPoolExecutor(1) as other:
        with selector.only(ROWS, 1):
            inside = changed(model, kinds)
            assert inside and inside <= {"embed_tokens", "lm_head"}
            other.submit(of_other.__enter__).result()
        assert changed(model, kinds) == inside
        other.submit(of_other.__exit__, None, None, None).result()
    assert changed(model, kinds) == set()


def test_a_class_that_was_made_of_the_contexts_own_stays(model):
    kinds, before = {name: type(m) for name, m in model.named_modules()}, model(TOKENS)
    for _ in range(2):
        with LogitRows.of(model).only(ROWS, 1):
            for name, module in model.named_modules():
                if type(module) is not kinds[name]:
                    override(module, "reset_parameters", lambda original: None)
            assert_close(model(TOKENS), mx.take(before, ROWS, axis=1))
        assert mx.array_equal(model(TOKENS), before)


def test_engines_of_one_model_share_the_selector(model, projected):
    first, second = LogitRows.of(model), LogitRows.of(model)
    assert first is second
    with second.only(ROWS, 1):
        model(TOKENS)
    assert len(projected) == 1  # the projection was wrapped once


def test_models_do_not_share_a_selector():
    first, second = tiny_model("llama"), tiny_model("llama")
    with LogitRows.of(first).only(ROWS, 1):
        LogitRows.of(second)
        assert first(TOKENS).shape[1] == 4
        assert second(TOKENS).shape[1] == 7
