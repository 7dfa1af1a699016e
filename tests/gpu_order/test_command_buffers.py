"""How many command buffers a decode step takes, with and without counting the pool's elements."""

from collections.abc import Sequence
from functools import cache

import pytest

from mlx_paged import Engine
from mlx_paged.command_buffers import MANY
from tests.gpu_order.model.backend import Report, judge
from tests.gpu_order.model.knockouts import unregistered
from tests.gpu_order.model.pool_ops import ROLES
from tests.gpu_order.model.trace import Event
from tests.gpu_order.model.tracer import Tracer
from tests.support.models.tiny_models import tiny_model

NUM_LAYERS = 32
POOL = 200_000 * 8 * 128
"""Elements of the keys of a layer: 200,000 tokens of 8 heads of 128."""


@cache
def trace(pool_elements: int) -> Sequence[Event]:
    """A run of a model of 32 layers, which ends with a decode."""
    events: list[Event] = []
    with Tracer(events.append, pool_elements).installed():
        model = tiny_model("llama", num_hidden_layers=NUM_LAYERS)
        Engine(model, num_blocks=8, prewarm=False).generate([[1, 2, 3]], max_tokens=2)
    return events


def judged(before_the_fix: bool, pool_elements: int = POOL) -> Report:
    change = unregistered(*ROLES) if before_the_fix else unregistered()
    return judge([change(event) for event in trace(pool_elements)])


MODELS = {
    "Llama 3.2 1B": ("llama", 16),
    "Llama 3.1 8B": ("llama", 32),
    "Qwen2.5 0.5B": ("qwen2", 24),
    "Qwen2.5 7B": ("qwen2", 28),
    "Qwen3 0.6B": ("qwen3", 28),
    "gpt-oss 20B": ("gpt_oss", 24),
    "Gemma 3 4B": ("gemma3_text", 34),
    "Mixtral 8x7B": ("mixtral", 32),
}
"""Architectures and layers of eight models. Their tensors here are small."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_with_many_operations_a_decode_is_one_command_buffer(name):
    """But for buffers that elements end, which depend on the sizes of a model's tensors. A chunk
    has few more."""
    model_type, layers = MODELS[name]
    events: list[Event] = []
    with Tracer(events.append, 0).installed():
        model = tiny_model(model_type, num_hidden_layers=layers)
        Engine(model, num_blocks=16, prewarm=False).generate([[*range(1, 33)]], max_tokens=2)
    (chunk, *_, decode), (long_chunk, *_, long_decode) = (
        judge(events, max_ops=operations).commits for operations in (40, MANY)
    )
    print(f"{name}: a decode {decode.total()} and {long_decode.total()} command buffers,")
    print(f"a chunk {chunk.total()} and {long_chunk.total()}")
    assert long_decode == {"eval": 1} and decode["operations"] >= 2
    assert long_chunk.total() <= 4 < chunk.total()


@pytest.mark.slow
def test_the_pool_ends_no_command_buffer():
    report, of_no_pool = judged(False), judged(False, pool_elements=0)
    assert not report.full
    assert report.commits[-1] == of_no_pool.commits[-1] == {"operations": 12, "eval": 1}


def test_before_the_fix_each_op_ended_one():
    report = judged(True)
    assert {op.name for op in report.full} == {"WriteKV", "PagedAttention"}
    assert report.commits[-1] == {"elements": 2 * NUM_LAYERS, "eval": 1}
