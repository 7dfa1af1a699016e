"""llama.cpp under the harness computes the same model, and says what it reserves."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from tiny_models import COMMON, VOCAB, solo_greedy, tiny_model

from bench.models import llama_model
from bench.serving_parts.trace import Job

REASON = "llama-cpp-python and gguf are not installed"
pytest.importorskip("gguf", reason=REASON)
pytest.importorskip("llama_cpp", reason=REASON)

from bench.serving_parts.gguf_file import check_writable, interleave_halves  # noqa: E402
from bench.serving_parts.llama_context import MAX_SEQUENCES, check_context  # noqa: E402
from bench.serving_parts.llama_server import LlamaServer  # noqa: E402

TOKEN_BYTES = 100


def served(model, jobs, max_running=3, prefill_chunk=16, context=100):
    """What each job got, and the level after every step."""
    server = LlamaServer(model, max_running, prefill_chunk, context, TOKEN_BYTES)
    for i, job in enumerate(jobs):
        server.submit(job, [i])
    outputs, levels = [[] for _ in jobs], [server.level()]
    while server.has_work:
        for token in server.step():
            outputs[token.stream].append(token.token)
        levels.append(server.level())
    return outputs, levels, server


def jobs_of(lengths, vocab_size=VOCAB, max_tokens=6):
    draw = np.random.default_rng(0).integers
    return [Job(0, tuple(draw(vocab_size, size=n).tolist()), max_tokens) for n in lengths]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_traditional": True}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 32, "rope_theta": 500.0}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
        ("qwen3", {}),
    ],
)
def test_greedy_tokens_are_those_of_mlx_lm(model_type, changes):
    model = tiny_model(model_type, **changes)
    jobs = jobs_of([5, 33, 20, 1, 40])
    outputs, *_ = served(model, jobs)
    assert outputs == [solo_greedy(model, list(job.prompt), job.max_tokens) for job in jobs]


def test_the_reference_model_gets_the_tokens_of_mlx_lm():
    model = llama_model("reference")
    jobs = jobs_of([32, 70, 45], vocab_size=2048, max_tokens=8)
    outputs, *_ = served(model, jobs, prefill_chunk=64)
    assert outputs == [solo_greedy(model, list(job.prompt), job.max_tokens) for job in jobs]


def test_every_running_sequence_holds_cells_for_the_longest():
    _, levels, server = served(tiny_model("llama"), jobs_of([5, 33, 20, 1, 40], max_tokens=3))
    cells = 256  # llama.cpp rounds 100 up
    assert server.pool_bytes == 3 * cells * TOKEN_BYTES
    for level in levels:
        assert level.held_bytes == level.running * cells * TOKEN_BYTES
    assert [level.running for level in levels] == [0, 2, 2, 2, 3, 2, 1, 1, 1, 1, 0]
    assert max(level.running + level.waiting for level in levels) == 5


def test_decodes_go_on_beside_a_prompt_that_takes_several_steps():
    _, levels, server = served(tiny_model("llama"), jobs_of([4, 40], max_tokens=5))
    assert [level.live_tokens for level in levels] == [0, 16, 33, 46, 48, 42, 43, 0]
    assert server.counters().prompt_tokens == 44


def test_a_request_beyond_the_cells_is_refused():
    server = LlamaServer(tiny_model("llama"), 1, 16, 256, TOKEN_BYTES)
    with pytest.raises(ValueError, match="expected a request of at most 256 tokens, got 257"):
        server.submit(Job(0, (1,) * 200, 58), [0])


def test_models_that_would_be_written_wrong_are_refused():
    with pytest.raises(ValueError, match="expected a model of type llama or qwen3, got qwen2"):
        check_writable(tiny_model("qwen2"))
    scaled = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ValueError, match="expected a model without rope_scaling, got"):
        check_writable(tiny_model("llama", rope_scaling=scaled))
    half = tiny_model("llama")
    half.update(tree_map(lambda weight: weight.astype(mx.float16), half.parameters()))
    with pytest.raises(ValueError, match=r"expected float32 weights, got mlx.core.float16 in"):
        check_writable(half)
    with pytest.raises(ValueError, match=f"expected at most {MAX_SEQUENCES} sequences side by"):
        check_context(tiny_model("llama"), MAX_SEQUENCES + 1)


def test_rows_that_rotate_together_become_neighbours():
    rows = np.arange(2 * 6)[:, None] * np.ones((1, COMMON["hidden_size"]))
    heads = interleave_halves(rows, head_dim=6)[:, 0].reshape(2, 6)
    assert heads.tolist() == [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]
