"""Chunks are so short that no command buffer of a GPU takes too long, by estimate."""

from pathlib import Path

import mlx.nn as nn
import pytest

from mlx_paged import Engine
from mlx_paged.command_buffers import MOST_ELEMENTS
from mlx_paged.request import Request
from mlx_paged.runner.layer_work import command_bound
from mlx_paged.runner.model_probe import probe
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.budget import MIN_CHUNK, ChunkBudget
from mlx_paged.scheduler.command_bound import MOST_SECONDS, RATE, CommandBound
from mlx_paged.scheduler.progress import Planning
from mlx_paged.scheduler.step import StepWork
from scripts.command_seconds import MODELS, rows
from tests.support.models.tiny_models import solo_greedy, tiny_model

ROOT = Path(__file__).parents[2]


def ended_buffers(bound: CommandBound, tokens: int, context: int) -> float:
    """Seconds of the longest command buffer of equal layers, op by op: attention, then products of
    which none is larger than `bound.largest`; a buffer ends after the op that exceeds it."""
    count = max(1, round(bound.weights / bound.largest))
    product = 2 * bound.weights / count * tokens, (bound.stored + bound.widths * tokens) / count
    ops = [(bound.pair * context, 0.0), *[product] * count] * bound.layers
    longest = work = elements = 0.0
    for op, binds in ops:
        work, elements = work + op, elements + binds
        longest = max(longest, work)
        if elements > bound.buffer:
            work = elements = 0.0
    return longest / RATE


@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_no_less_than_the_longest_buffer(name):
    bound = MODELS[name]
    for tokens in (1, 16, 128, 512, 2048):
        for start in (0, 8192, 32_768, 131_072):
            work = StepWork.chunk(start, tokens)
            assert bound.seconds(work) >= 0.999 * ended_buffers(bound, tokens, work.chunk_context)


@pytest.mark.parametrize("name", MODELS)
def test_a_chunk_is_the_longest_within_the_bound(name):
    bound = MODELS[name]
    for start in (0, 8192, 32_768, 131_072):
        decodes = StepWork(8, 8 * start)
        for work in (StepWork(), decodes):
            tokens = bound.chunk_within(work, start, 2048, MIN_CHUNK)
            assert MIN_CHUNK <= tokens <= 2048
            if tokens > MIN_CHUNK:
                assert bound.seconds(work + StepWork.chunk(start, tokens)) <= MOST_SECONDS
            if tokens < 2048:
                assert bound.seconds(work + StepWork.chunk(start, tokens + 1)) > MOST_SECONDS


def test_a_budget_follows_the_bound():
    bound = MODELS["Llama 3.1 8B"]
    budget = ChunkBudget(2048, None, bound=bound)
    request = Request(0, [0] * 140_000, SamplingParams(max_tokens=1), seed=0)
    planning = Planning()
    assert budget.left(planning, request) == 2048
    request.num_computed = 131_072
    tokens = budget.left(planning, request)
    assert MIN_CHUNK < tokens < 1024
    assert bound.seconds(StepWork.chunk(131_072, tokens)) <= MOST_SECONDS


@pytest.mark.parametrize("bits", [None, 4])
def test_sizes_of_a_model_are_those_of_its_layers(bits):
    model = tiny_model("llama", num_hidden_layers=2, hidden_size=64, intermediate_size=128)
    profile = probe(model)
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
    bound, (kind, *_) = command_bound(model, profile), profile.attentions
    width = kind.num_heads * kind.shape.head_dim
    of_kv = kind.shape.n_kv_heads * kind.shape.head_dim
    weights = 2 * 64 * width + 2 * 64 * of_kv + 3 * 64 * 128
    assert (bound.layers, bound.weights, bound.largest) == (2, weights, 64 * 128)
    assert bound.stored == weights * (bits or 32) / 32
    assert bound.widths == width + 2 * of_kv + 2 * 64 + 2 * 128
    assert bound.pair == 4 * width
    assert bound.buffer == MOST_ELEMENTS << 20


def test_an_engine_on_a_mac_computes_short_chunks(monkeypatch):
    """On a Mac of one operation a second."""
    model, prompt = tiny_model("llama"), [*range(1, 97)]
    steps = []
    for size in (None, 1 << 34):
        monkeypatch.setattr("mlx_paged.runner.pooled_model.working_set", lambda size=size: size)
        monkeypatch.setattr("mlx_paged.scheduler.command_bound.RATE", 1.0)
        engine = Engine(model, num_blocks=64)
        (done,) = engine.generate([prompt], max_tokens=3)
        assert done.tokens == solo_greedy(model, prompt, 3)
        steps.append(engine.stats.steps)
    assert steps[1] - steps[0] == 96 // MIN_CHUNK - 1


def test_the_documented_table_is_the_scripts():
    text = (ROOT / "docs" / "on-a-mac.md").read_text()
    assert all(row in text for row in rows())
