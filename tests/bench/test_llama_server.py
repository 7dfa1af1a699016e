"""llama.cpp under the harness computes the same model, and says what it reserves."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from bench.models import llama_model
from bench.serving.engines import Limits, check_engines, make_server
from bench.serving.trace import Job
from tests.support.models.tiny_models import COMMON, VOCAB, solo_greedy, tiny_model

REASON = "llama-cpp-python and gguf are not installed"
pytest.importorskip("gguf", reason=REASON)
llama_cpp = pytest.importorskip("llama_cpp", reason=REASON)

from bench.serving.gguf_file import check_writable, interleave_halves  # noqa: E402
from bench.serving.llama_cpp import (  # noqa: E402
    MAX_SEQUENCES,
    LlamaContext,
    LlamaServer,
    Span,
    check_context,
)

TOKEN_BYTES = 100


def context_of(model, max_running=3, is_flash=False, context=100):
    return LlamaContext(
        model,
        num_sequences=max_running,
        context=context,
        max_tokens=80,
        is_flash=is_flash,
        is_half=is_flash,
    )


def served(model, jobs, max_running=3, prefill_chunk=16, is_flash=False):
    """What each job got, and the level after every step."""
    llama = context_of(model, max_running, is_flash)
    server = LlamaServer(llama, prefill_chunk, TOKEN_BYTES)
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("is_flash", [False, True])
def test_the_reference_model_gets_the_tokens_of_mlx_lm(is_flash):
    model = llama_model("reference")
    jobs = jobs_of([32, 70, 45], vocab_size=2048, max_tokens=8)
    outputs, *_ = served(model, jobs, prefill_chunk=64, is_flash=is_flash)
    assert outputs == [solo_greedy(model, list(job.prompt), job.max_tokens) for job in jobs]


@pytest.mark.slow
def test_logits_without_flash_attention_are_those_of_float32():
    model = llama_model("reference")
    [job] = jobs_of([50], vocab_size=2048)
    llama = context_of(model)
    llama.decode([Span(0, 0, job.prompt, True)])
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(llama._context), (2048,))
    expected = np.array(model(mx.array([job.prompt]))[0, -1])
    assert np.abs(logits - expected).max() <= 1e-5 * expected.std()


def test_a_sequence_goes_on_under_another_number():
    model = tiny_model("llama")
    tokens = list(jobs_of([20])[0].prompt)
    llama = context_of(model)
    llama.decode([Span(2, 0, tokens[:-1], False)])
    llama.move(2, 0)
    assert llama.decode([Span(0, 19, tokens[-1:], True)]) == {0: solo_greedy(model, tokens, 1)[0]}


@pytest.mark.parametrize(("is_half", "element_bytes"), [(False, 4), (True, 2)])
def test_cells_have_the_size_that_is_reported(is_half, element_bytes):
    llama = context_of(tiny_model("llama"), is_flash=is_half)
    sizes = []
    for start in (0, 40):
        llama.decode([Span(1, start, [1] * 40, False)])
        sizes.append(llama_cpp.llama_state_seq_get_size(llama._context, 1))
    kv_values = 2 * 3 * 2 * 16  # K and V, layers, heads, head_dim
    assert (sizes[1] - sizes[0]) // 40 // (kv_values * element_bytes) == 1


def test_numbers_of_running_sequences_follow_each_other_when_nothing_waits():
    class Numbers:
        num_sequences, cells, seen = 4, 256, []

        def decode(self, spans):
            self.seen.append(sorted(span.sequence for span in spans))
            return {span.sequence: 1 for span in spans if span.wants_next}

        def forget(self, sequence):
            pass

        def move(self, sequence, target):
            pass

    server = LlamaServer(Numbers(), 16, TOKEN_BYTES)
    for i, max_tokens in enumerate((2, 5, 3, 4)):
        server.submit(Job(0, (1, 2), max_tokens), [i])
    ends = []
    while server.has_work:
        ends += [token.stream for token in server.step() if token.is_last]
    assert Numbers.seen == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2], [0, 1], [0]]
    assert ends == [0, 2, 3, 1]


def test_every_running_sequence_holds_cells_for_the_longest():
    _, levels, server = served(tiny_model("llama"), jobs_of([5, 33, 20, 1, 40], max_tokens=3))
    cells = 256  # llama.cpp rounds 100 up
    assert server.pool_bytes == 3 * cells * TOKEN_BYTES
    for level in levels:
        assert level.held_bytes == level.running * cells * TOKEN_BYTES
    assert [level.running for level in levels] == [0, 2, 2, 2, 3, 2, 1, 1, 1, 1, 0]
    assert max(level.running + level.waiting for level in levels) == 5


def test_cells_in_float16_take_half(capfd):
    limits = Limits(3, prefill_chunk=16, context=100, block_size=16, num_blocks=1)
    whole, half = (
        make_server(name, tiny_model("llama"), limits).pool_bytes
        for name in ("llama_cpp", "llama_cpp_f16")
    )
    assert whole == 2 * half == 3 * 256 * 2 * 3 * 2 * 16 * 4  # tokens, K and V, layers, heads, dim
    assert capfd.readouterr() == ("", "")


def test_engines_that_cannot_run_are_refused_by_name():
    check_engines(["mlx_lm"], tiny_model("qwen2"), 999)
    with pytest.raises(ValueError, match=r"^--engines: llama_cpp: expected a model"):
        check_engines(["mlx_lm", "llama_cpp_f16_static"], tiny_model("qwen2"), 3)


def test_decodes_go_on_beside_a_prompt_that_takes_several_steps():
    _, levels, server = served(tiny_model("llama"), jobs_of([4, 40], max_tokens=5))
    assert [level.live_tokens for level in levels] == [0, 16, 33, 46, 48, 42, 43, 0]
    assert server.counters().prompt_tokens == 44


def test_a_request_beyond_the_cells_is_refused():
    server = LlamaServer(context_of(tiny_model("llama"), context=256), 16, TOKEN_BYTES)
    with pytest.raises(ValueError, match="expected a request of at most 256 tokens, got 257"):
        server.submit(Job(0, (1,) * 200, 58), [0])


def test_models_that_would_be_written_wrong_are_refused():
    with pytest.raises(ValueError, match="got qwen2"):
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
