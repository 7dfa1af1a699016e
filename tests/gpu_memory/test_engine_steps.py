"""The steps of an engine on the model of MLX's allocator: what they take is bounded."""

from dataclasses import replace
from random import Random

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from mlx_paged.attention.causal import FULL
from mlx_paged.attention.prewarm import AttentionKind
from mlx_paged.kv.memory import LONG_PROMPT, default_cache_limit
from mlx_paged.kv.shapes import KVShape
from mlx_paged.request import Request
from mlx_paged.runner.model_probe import probe
from mlx_paged.runner.step_memory import PARTIALS, partial_bytes
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.progress import Planning
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import Span
from tests.gpu_memory.allocator import NO_LIMIT, Allocator
from tests.gpu_memory.engine_steps import Op, StepArrays, metals_ops, scratch_bytes
from tests.gpu_memory.replay import MOST_TASKS, Device
from tests.gpu_memory.report import MODELS, made, promised, replayed
from tests.support.models.tiny_models import tiny_model

NUM_STEPS = 250
MIB = 2**20


def small() -> llama.Model:
    """The widths of a 1B model, in two layers."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
    args = llama.ModelArgs("llama", vocab_size=32_000, rms_norm_eps=1e-5, **sizes, **heads)
    model = llama.Model(args)
    model.set_dtype(mx.float16)
    return model


@pytest.fixture(scope="module")
def model() -> llama.Model:
    return small()


def test_an_array_lives_until_the_command_buffer_that_reads_it_is_complete():
    """`b` takes nobody's memory, `c` takes b's, and the result outlives the step by one step."""
    size = 4 * MIB
    step = [
        Op("constants", [], [("a", size, size)]),
        Op("Matmul", ["a"], [("b", size, size)]),
        Op("Reshape", ["b"], [("view", size, size)]),
        Op("Negative", ["view"], [("c", size, size)]),
    ]
    allocator = Allocator()
    device = Device(allocator)
    device.run(step, {"c"})
    assert (allocator.num_new, allocator.active) == (2, 2 * size)
    for _ in range(20):
        device.run(step, {"c"})
    assert allocator.active <= 13 * size


def test_a_step_of_a_model_allocates_each_layers_output_once(model):
    """Among the arrays of a step are the outputs of all linear layers, at their widths."""
    with metals_ops():
        arrays = StepArrays(model, 100)
        scheduler = Scheduler(arrays.blocks, 4, 512)
        scheduler.add(Request(0, [1] * 500, SamplingParams(max_tokens=5), seed=0))
        ops, results = arrays.ops(scheduler.schedule())
    made = [op.outputs[0][1] for op in ops if op.name == "Matmul"]
    kv, others = [512, 512], [2048, 2048, 8192, 8192, 2048]
    of_all = [500 * width for width in kv + others + kv]  # of the last layer only K and V
    assert sorted(made) == sorted([*of_all, *others, 32_000])
    assert results <= {name for op in ops for name, *_ in op.outputs}


def test_memory_is_bounded_for_many_steps_of_arbitrary_arrivals(model):
    """The limit is that of a small pool that was asked for. Without a limit, with rows and lengths
    of any size, the cache grows far beyond it; few sizes alone help less."""
    step = promised(model)
    held, unbounded = replayed(model, "long prompts", NUM_STEPS, [step, NO_LIMIT])
    exact = {"few_sizes": False, "even_lengths": False}
    [before] = replayed(model, "long prompts", NUM_STEPS, [NO_LIMIT], **exact)
    assert held.peak_active <= step
    assert held.peak <= 2 * step < before.peak
    assert 2 * unbounded.peak < before.peak


def test_a_recurrent_state_is_held_once_until_its_sequence_ends():
    model = made("qwen3.5 9B", layers=4)
    requests = [Request(i, [1] * 20, SamplingParams(max_tokens=50), seed=0) for i in range(3)]
    held = []
    with metals_ops():
        arrays, device = StepArrays(model, 100), Device(Allocator())
        scheduler = Scheduler(arrays.blocks, 4, 512)
        for request in requests:
            scheduler.add(request)
        for number in range(8):
            step = scheduler.schedule()
            device.run(*arrays.ops(step))
            device._commit(most=0)
            held.append(device.allocator.active / arrays.profile.states.num_bytes)
            scheduler.commit(step)
            for span in step.spans:
                span.request.tokens += [1] * span.samples
            if number == 5:
                scheduler.complete(requests[0])
    assert 3 <= min(held[:6]) <= max(held[:6]) < 3.3
    assert 2 <= min(held[6:]) <= max(held[6:]) < 2.3


@pytest.mark.parametrize("name", MODELS)
def test_what_a_step_takes_is_promised_for_models_of_each_kind(name, monkeypatch):
    """The widths are those of the real models, in eight layers. The default limit of the cache is
    at least as large, so that no step maps a buffer that it would not map without a limit."""
    model = made(name, layers=8)
    step = promised(model)
    monkeypatch.setattr("mlx_paged.kv.memory.gpu_memory", lambda: 2 * step)
    limits = [NO_LIMIT, default_cache_limit(None, step), default_cache_limit(1, step)]
    found, *limited = replayed(model, "long prompts", 15, limits)
    assert 0.1 * step < found.peak_active <= step
    assert [each.num_new for each in limited] == [found.num_new] * 2


def test_a_step_with_large_partial_results_takes_no_more_than_is_promised(monkeypatch):
    """Decodes and two chunks with long contexts, while all command buffers complete late."""
    model = made("llama 8B", layers=4)
    with metals_ops():
        arrays, planning = StepArrays(model, 36_000), Planning()
        for i in range(34):
            start, stop = (16_000, 16_001) if i < 32 else (15_900, 16_130)
            arrays.blocks.admit(i, stop)
            arrays.blocks.make_writable(i, start, stop)
            request = Request(i, [0] * stop, SamplingParams(max_tokens=2), seed=0)
            planning.add(Span(request, start, stop, samples=True))
        computed = arrays.ops(planning.step())
    largest = max(op.outputs[0][2] for op in computed[0] if op.name == "Sin")
    assert 0.9 * PARTIALS < largest <= PARTIALS
    device = Device(Allocator())
    monkeypatch.setattr(device._random, "randint", lambda *_: MOST_TASKS)
    for _ in range(3):
        device.run(*computed)
    assert 20 * PARTIALS < device.allocator.peak_active < promised(model)


@pytest.mark.parametrize("dims", [16, 64, 128, 256])
def test_partial_results_of_split_contexts_are_counted(dims):
    """Decodes, chunks and both together, whose contexts have up to 16,384 tokens."""
    random, of_llama, largest = Random(dims), probe(tiny_model("llama")), 0.0
    for _ in range(400):
        shape = KVShape(random.choice([1, 2, 8]), dims, dims, mx.float16)
        heads, decodes = shape.n_kv_heads * random.choice([1, 4, 8]), random.choice([0, 1, 8, 32])
        num_tokens = decodes + (chunk := int(2 ** random.uniform(0, 9)))
        kinds = (AttentionKind(shape, heads, mx.float16, FULL, False),)
        profile = replace(of_llama, attentions=kinds)
        tables = decodes + random.randint(1, min(chunk, 4)), random.randint(1, LONG_PROMPT // 16)
        size = scratch_bytes((num_tokens, heads, 1, dims), shape, tables, decodes)
        most = partial_bytes(profile, chunk, decodes)
        assert size <= most
        largest = max(largest, size / most)
    assert largest > 0.5
