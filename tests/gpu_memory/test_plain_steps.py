"""Steps of plain MLX on the model of MLX's Metal backend: what a scatter copies, what is held."""

from collections.abc import Iterator

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from mlx_paged.request import Request
from mlx_paged.runner.step_memory import step_bytes
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.progress import Planning
from mlx_paged.scheduler.step import Span, Step
from tests.gpu_memory.allocator import PAGE, Allocator
from tests.gpu_memory.engine_steps import Op
from tests.gpu_memory.plain_steps import PlainSteps, plain_ops
from tests.gpu_memory.replay import MOST_TASKS, Device
from tests.gpu_memory.report import made

NUM_STEPS = 4


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    with plain_ops():
        yield


def small() -> llama.Model:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = llama.Model(
        llama.ModelArgs("llama", vocab_size=1000, rms_norm_eps=1e-5, **sizes, **heads)
    )
    model.set_dtype(mx.float16)
    return model


def mixed(arrays: PlainSteps, num_decodes: int, context: int, chunk: int) -> Step:
    """A step of decodes, and of a chunk at the end of a prompt; each sees `context` tokens."""
    planning = Planning()
    for i in range(num_decodes + 1):
        start = context - (1 if i < num_decodes else chunk)
        if i not in arrays.blocks:
            arrays.blocks.admit(i, context)
            arrays.blocks.make_writable(i, start, context)
        request = Request(i, [0] * context, SamplingParams(max_tokens=2), seed=0)
        planning.add(Span(request, start, context, samples=True))
    return planning.step()


def copies_of(waits: bool, device: Device, kv_bits: int | None = None) -> list[int]:
    """How many arrays of the pool each step copies, if command buffers complete late. `waits`: the
    engine waits for the completion handlers of the step before."""
    device._random.randint = lambda *_: MOST_TASKS  # type: ignore[method-assign]
    arrays, found = PlainSteps(small(), 100, kv_bits), []
    for _ in range(NUM_STEPS):
        before = device.num_copied
        device.run(*arrays.ops(mixed(arrays, 3, 100, 20)))
        found.append(device.num_copied - before)
        if waits:
            device.settle()
    return found


@pytest.mark.parametrize("kv_bits", [None, 8, 4])
def test_no_array_of_the_pool_is_copied_once_the_handlers_have_run(kv_bits):
    assert copies_of(True, Device(Allocator()), kv_bits) == [0] * NUM_STEPS


@pytest.mark.parametrize("kv_bits", [None, 4])
def test_without_the_wait_each_array_is_copied_at_worst(kv_bits):
    """The gathers of a step are in its last command buffers, which still hold what they read. One
    array may be free: a command buffer more than may be late holds it."""
    num_arrays = 4 * (2 if kv_bits is None else 4)
    found = copies_of(False, Device(Allocator()), kv_bits)
    assert found[0] == 0 and num_arrays - 1 <= min(found[1:]) <= max(found) <= num_arrays


@pytest.mark.parametrize(("slack", "want"), [(0, 0), (PAGE, 0), (PAGE + 1, NUM_STEPS)])
def test_an_array_in_a_buffer_of_the_cache_may_be_copied_in_each_step(slack, want):
    """A copy takes such a buffer again. So the arrays of a pool are made while the cache is empty:
    their buffers are whole pages."""
    size = 8 * PAGE
    write = [
        Op("constants", [], [("rows", 1, 4)]),
        Op("Scatter", ["array", "rows"], [("written", size, size)]),
        Op("Gather", ["written"], [("found", size, PAGE)]),
    ]
    allocator = Allocator()
    device = Device(allocator)
    for _ in range(2):
        allocator.cache.recycle(size + slack)
    source = Op("constants", [], [("array", size, size)])
    for _ in range(NUM_STEPS):
        device.run([source, *write], {"written", "found"})
        device.settle()
        source = Op("Pool", ["written"], [("array", size, size)])
    assert device.num_copied == want


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_bits", [None, 8, 4])
@pytest.mark.parametrize("context", [2_000, 16_000])
@pytest.mark.parametrize("name", ["llama 8B", "qwen3 30B-A3B"])
def test_a_step_of_plain_mlx_holds_what_is_promised(name, context, kv_bits, monkeypatch):
    """32 sequences with long contexts, while all command buffers complete late."""
    model = made(name, layers=6)
    arrays = PlainSteps(model, 40_000, kv_bits)
    device = Device(Allocator())
    monkeypatch.setattr(device._random, "randint", lambda *_: MOST_TASKS)
    for _ in range(2):
        device.run(*arrays.ops(mixed(arrays, 31, context, 200)))
        device.settle()
    promised = step_bytes(model, arrays.profile, 512, 32, plain=True)
    assert device.allocator.peak_active <= promised
    if context == 16_000:
        assert device.allocator.peak_active > 0.2 * promised
