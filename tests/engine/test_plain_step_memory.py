"""What a step of plain MLX holds, measured on MLX's CPU backend, beside what the budget says."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine
from mlx_paged.attention import forward
from mlx_paged.attention.forward import even_length
from mlx_paged.runner.step_memory import step_bytes
from tests.support.engine.plain_mlx import compute_plainly
from tests.support.models.tiny_models import VOCAB, solo_greedy, tiny_model

CHUNK = 256
NUM_TOKENS = 6
WIDE = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Attention has most of the arrays of a step."""


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    compute_plainly(monkeypatch)
    yield
    mx.clear_cache()


class Held(NamedTuple):
    """The most bytes of steps that only decode, of other steps, and what the budget says of both;
    the tokens of each request."""

    decode: int
    chunk: int
    of_decode: int
    of_chunk: int
    tokens: list[list[int]]


def held(
    model: Any,
    num_rows: int,
    context: int,
    kv_bits: Any = None,
    block_size: int = 16,
    num_tokens: int = NUM_TOKENS,
) -> Held:
    """What the steps of prompts of about `context` tokens hold beside what was there before."""
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    engine = Engine(
        model,
        num_blocks=2 * num_rows * (context // block_size + 4),
        block_size=block_size,
        prefill_chunk=CHUNK,
        kv_bits=kv_bits,
        max_running=num_rows,
        compile=False,
    )
    more = num_rows * (context // CHUNK + 2)
    ids = [
        engine.add_request(prompt, max_tokens=num_tokens + more)
        for prompt in prompts(num_rows, context)
    ]
    tokens: dict[int, list[int]] = {each: [] for each in ids}
    decodes, chunks, were_all = [0], [0], False
    while engine.has_work:
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        outputs = engine.step()
        peak = mx.get_peak_memory() - before
        are_all = {each.request_id for each in outputs} == {*ids}
        (decodes if are_all and were_all else chunks).append(peak)
        were_all = are_all
        for output in outputs:
            tokens[output.request_id].append(output.token)
    longest = -(-(context + num_tokens + more) // block_size)
    sizes = {"plain": True, "context": block_size * even_length(longest)}
    profile = engine._models.pooled.profile
    of_steps = (step_bytes(model, profile, chunk, num_rows, **sizes) for chunk in (0, CHUNK))
    return Held(max(decodes), max(chunks), *of_steps, [*tokens.values()])


def prompts(num_rows: int, context: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB, context - 7 * i % 31).tolist() for i in range(num_rows)]


@pytest.mark.parametrize("kv_bits", [None, 8, 6, 4])
@pytest.mark.parametrize(("num_rows", "context", "block_size"), [(4, 440, 16), (2, 900, 8)])
def test_a_decode_of_one_layer_holds_what_the_budget_says(kv_bits, num_rows, context, block_size):
    """Each array counts: the gathered bytes, integers, float32, K/V in the model's type, masks and
    scores."""
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=4096, **WIDE)
    found = held(model, num_rows, context, kv_bits, block_size)
    assert 0.75 * found.of_decode < found.decode <= found.of_decode
    assert 0.1 * found.of_chunk < found.chunk <= found.of_chunk


@pytest.mark.heavy
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kv_bits", [None, 8, 6, 4])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("num_layers", [2, 4])
def test_layers_hold_at_most_the_sum(kv_bits, groups, num_layers):
    """MLX's CPU backend lets about two layers be under way: a part of the sum."""
    model = tiny_model(
        "llama", num_hidden_layers=num_layers, **WIDE | {"num_key_value_heads": 8 // groups}
    )
    found = held(model, 4, 440, kv_bits)
    assert 0.1 * found.of_decode < found.decode <= found.of_decode
    assert 0.05 * found.of_chunk < found.chunk <= found.of_chunk


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["gemma3_text", "deepseek_v3", "jamba", "gpt_oss", "gemma2"])
def test_windows_latents_sinks_and_recurrent_layers_hold_no_more(name):
    found = held(tiny_model(name), 4, 440)
    assert 0.05 * found.of_decode < found.decode <= found.of_decode
    assert 0.05 * found.of_chunk < found.chunk <= found.of_chunk


@pytest.mark.heavy
@pytest.mark.parametrize("kv_bits", [None, 4])
def test_many_rows_are_gathered_some_after_the_others(monkeypatch, kv_bits):
    """The number of rows does not bound what is held then."""
    model = tiny_model("llama", num_hidden_layers=1, **WIDE)
    whole = held(model, 24, 200, kv_bits)
    monkeypatch.setattr(forward, "GATHERED", 2 * 200 * 512)
    found = held(model, 24, 200, kv_bits)
    assert found.decode < whole.decode / 2


def test_rows_that_are_gathered_apart_give_mlx_lms_tokens(monkeypatch):
    """In float32: `held` makes the models' weights bfloat16."""
    monkeypatch.setattr(forward, "GATHERED", 1)
    model = tiny_model("gemma3_text")
    engine = Engine(model, num_blocks=256, block_size=8)
    found = engine.generate(prompts(5, 60), max_tokens=NUM_TOKENS)
    want = [solo_greedy(model, prompt, NUM_TOKENS) for prompt in prompts(5, 60)]
    assert [each.tokens for each in found] == want
