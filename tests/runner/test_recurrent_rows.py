"""Modules of recurrent layers that compute rows: only where that is needed and possible."""

import gc

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_paged import Engine
from mlx_paged.runner.model_probe import probe
from mlx_paged.runner.recurrent_rows import RecurrentRows, WatchedStates
from mlx_paged.runner.recurrent_states import RecurrentStates
from tests.support.models.architectures import VOCAB, build
from tests.support.models.tiny_models import solo_greedy

PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, 3 + 4 * i).tolist() for i in range(4)]


def assert_as_alone(model: nn.Module, **options) -> None:
    engine = Engine(model, block_size=4, num_blocks=64, compile=False, prewarm=False, **options)
    found = [completion.tokens for completion in engine.generate(PROMPTS, max_tokens=6)]
    assert found == [solo_greedy(model, prompt, 6) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["lfm2", "jamba"])
def test_steps_that_only_decode_divide_nothing(name, monkeypatch):
    divided, runs = [], RecurrentStates.runs

    def count(self, spans, padding):
        divided.append([len(span) for span in spans])
        return runs(self, spans, padding)

    monkeypatch.setattr(RecurrentStates, "runs", count)
    assert_as_alone(build(name))
    assert divided and all(max(lengths) > 1 for lengths in divided)


class Sums(nn.Module):
    """A recurrent layer that takes several sequences, or several tokens of one."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def __call__(self, x: mx.array, states: ArraysCache) -> mx.array:
        if min(x.shape[:2]) > 1:
            raise self.error("several tokens of several sequences")
        old = 0 if states[0] is None else states[0]
        sums = old + mx.cumsum(x, axis=1)
        states[0] = sums[:, -1:]
        return mx.sin(sums)


class Picky(nn.Module):
    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.embed.weight *= 40  # so that tokens differ
        self.layers = [Sums(error)]
        self.lm_head = nn.Linear(16, VOCAB)

    def make_cache(self) -> list[ArraysCache]:
        return [ArraysCache(1)]

    def __call__(self, inputs: mx.array, cache: list[ArraysCache]) -> mx.array:
        return self.lm_head(self.layers[0](self.embed(inputs), cache[0]))


@pytest.mark.parametrize("error", [ValueError, RuntimeError, IndexError, AssertionError])
def test_a_model_that_raises_for_divided_rows_is_served_without(error):
    model = Picky(error)
    assert not probe(model).states.are_diverted
    assert_as_alone(model)


def test_states_may_be_used_outside_of_all_modules():
    states = WatchedStates.of(ArraysCache(1))
    states[0] = mx.zeros(1)
    assert states.users == [None]


def test_a_new_module_is_diverted_even_at_the_place_of_one_that_is_gone():
    rows = RecurrentRows(nn.Module())
    ids = set()
    for _ in range(10):
        module = nn.Linear(2, 2)
        rows.divert([module])
        rows.divert([module])
        assert type(module) is not nn.Linear and type(module).__mro__[1] is nn.Linear
        ids.add(id(module))
        del module
        gc.collect()
    assert len(ids) < 10, "no id was used again"
