"""The engine's tokens are mlx-lm's own, whatever the batch, the chunks, the blocks, the memory."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine, UnsupportedModelError
from mlx_paged.runner.model_probe import Batching
from tests.support.models.tiny_models import CONFIGS, VOCAB, solo_greedy, tiny_model

pytestmark = pytest.mark.mac

NUM_TOKENS = 24


def make_prompts(lengths, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


PROMPTS = make_prompts((5, 40, 1, 17, 16, 33, 70, 64))


def assert_drained(engine: Engine) -> None:
    engine.manager.check_integrity()
    assert engine.manager.blocks_in_use == 0


@pytest.fixture(scope="module")
def llama():
    model = tiny_model("llama")
    return model, [solo_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


BATCHING = {
    "gemma2": Batching.SINGLE,
    "afm7": Batching.SINGLE,
    "gpt_bigcode": Batching.SINGLE,
    "deepseek_v3": Batching.ALTERNATE,
}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_architecture_generates_what_mlx_lm_generates_alone(model_type):
    model = tiny_model(model_type)
    expected = [solo_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS), "the model ignores prompts"
    engine = Engine(model, block_size=4, num_blocks=200, prefill_chunk=16, max_running=5)
    assert engine.runner.batching is BATCHING.get(model_type, Batching.MIXED)
    done = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    assert [completion.tokens for completion in done] == expected
    assert_drained(engine)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("block_size", [1, 8, 16, 32], ids="block{}".format)
@pytest.mark.parametrize("prefill_chunk", [1, 7, 64, 512], ids="chunk{}".format)
def test_blocks_and_chunks_change_nothing(llama, block_size, prefill_chunk):
    model, expected = llama
    engine = Engine(
        model, block_size=block_size, num_blocks=1024 // block_size, prefill_chunk=prefill_chunk
    )
    done = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    assert [completion.tokens for completion in done] == expected
    assert_drained(engine)


def test_requests_that_arrive_at_different_times(llama):
    model, expected = llama
    engine = Engine(model, block_size=4, num_blocks=200, prefill_chunk=16, max_running=4)
    arrivals = {0: [0], 2: [1, 2], 4: [3], 6: [4, 5], 20: [6], 45: [7]}
    done, owner = {}, {}
    step = 0
    while arrivals or engine.has_work:
        for index in arrivals.pop(step, []):
            owner[engine.add_request(PROMPTS[index], max_tokens=NUM_TOKENS)] = index
        for output in engine.step():
            if output.completion is not None:
                done[owner[output.request_id]] = output.completion.tokens
        step += 1
    assert [done[i] for i in range(len(PROMPTS))] == expected
    assert_drained(engine)


@pytest.mark.slow
def test_64_prompts_through_a_pool_that_holds_a_quarter_of_their_kv(llama):
    model, _ = llama
    prompts = make_prompts(np.random.default_rng(1).integers(1, 60, 64), seed=2)
    expected = [solo_greedy(model, prompt, 20) for prompt in prompts]
    block_size = 4
    blocks = sum(-(-(len(prompt) + 19) // block_size) for prompt in prompts)
    engine = Engine(
        model, block_size=block_size, num_blocks=blocks // 4, prefill_chunk=32, max_running=64
    )
    done = engine.generate(prompts, max_tokens=20)
    assert [completion.tokens for completion in done] == expected
    assert engine.stats.peak_blocks_in_use > 0.9 * (blocks // 4), "the pool was never full"
    assert_drained(engine)


def test_preemption_changes_no_token(llama):
    model, expected = llama
    engine = Engine(model, block_size=4, num_blocks=40, prefill_chunk=16, max_running=8)
    done = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    assert engine.stats.preemptions > 0 and sum(c.preemptions for c in done) > 0
    assert [completion.tokens for completion in done] == expected
    assert_drained(engine)


def test_preemption_of_recurrent_models_starts_their_state_over():
    model = tiny_model("jamba")
    expected = [solo_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    engine = Engine(model, block_size=4, num_blocks=40, prefill_chunk=16, max_running=8)
    done = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    assert engine.stats.preemptions > 0
    assert [completion.tokens for completion in done] == expected


def test_a_prefix_hit_changes_no_token_and_saves_its_prefill(llama):
    model, _ = llama
    system = PROMPTS[6][:50]
    prompts = [system + tail for tail in ([1, 2, 3], [4, 5], [1, 2, 9])]
    expected = [solo_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    engine = Engine(model, block_size=8, num_blocks=100, prefill_chunk=64)
    for prompt, tokens in zip(prompts, expected, strict=True):
        (completion,) = engine.generate([prompt], max_tokens=NUM_TOKENS)
        assert completion.tokens == tokens
    assert completion.cached_prompt_tokens == 52  # the system prompt and [1, 2]
    assert engine.stats.prompt_tokens == sum(map(len, prompts)) - 50 - 52

    engine.reset_prefix_cache()
    (completion,) = engine.generate([prompts[0]], max_tokens=1)
    assert completion.cached_prompt_tokens == 0


def test_a_second_turn_reuses_prompt_and_answer(llama):
    model, _ = llama
    engine = Engine(model, block_size=4, num_blocks=100)
    (first,) = engine.generate([PROMPTS[1]], max_tokens=NUM_TOKENS)
    second_prompt = PROMPTS[1] + first.tokens + [3, 1, 4]
    (second,) = engine.generate([second_prompt], max_tokens=NUM_TOKENS)
    assert second.cached_prompt_tokens >= len(PROMPTS[1]) + NUM_TOKENS - 4
    assert second.tokens == solo_greedy(model, second_prompt, NUM_TOKENS)


def test_half_precision_models_page_their_own_dtype(llama):
    model = tiny_model("llama")
    model.set_dtype(mx.bfloat16)
    engine = Engine(model, block_size=8, num_blocks=64)
    engine.generate(PROMPTS[:3], max_tokens=4)
    assert {cache.dtype for cache in engine.manager.pool.k + engine.manager.pool.v} == {mx.bfloat16}
    assert_drained(engine)


def test_two_engines_share_a_model_and_a_process(llama):
    model, expected = llama
    first = Engine(model, block_size=4, num_blocks=100)
    second = Engine(model, block_size=16, num_blocks=30)
    a = first.add_request(PROMPTS[1], max_tokens=NUM_TOKENS)
    b = second.add_request(PROMPTS[3], max_tokens=NUM_TOKENS)
    done = {}
    while first.has_work or second.has_work:
        for name, engine in (("a", first), ("b", second)):
            for output in engine.step():
                if output.completion is not None:
                    done[name, output.request_id] = output.completion.tokens
    assert done == {("a", a): expected[1], ("b", b): expected[3]}


def test_mlx_lm_is_untouched_after_and_between_steps(llama):
    model, expected = llama
    attention = mx.fast.scaled_dot_product_attention
    engine = Engine(model, block_size=4, num_blocks=100)
    engine.add_request(PROMPTS[0], max_tokens=NUM_TOKENS)
    engine.step()
    assert mx.fast.scaled_dot_product_attention is attention
    assert solo_greedy(model, PROMPTS[3], NUM_TOKENS) == expected[3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "plamo3"}, "plamo3 is refused: in mlx-lm its decode"),
        ({"make_cache": "quantized"}, "cache class QuantizedKVCache cannot be paged"),
        ({"make_cache": "keep"}, r"cache class RotatingKVCache\(keep=4\) cannot be paged"),
    ],
    ids=["refused by type", "unknown cache", "rotating with sinks"],
)
def test_models_that_cannot_be_served_right_are_refused_by_name(changes, message):
    from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

    caches = {
        "quantized": lambda: [QuantizedKVCache() for _ in range(3)],
        "keep": lambda: [RotatingKVCache(8, keep=4) for _ in range(3)],
    }
    model = tiny_model("llama")
    if "model_type" in changes:
        model.model_type = changes["model_type"]
    else:
        model.make_cache = caches[changes["make_cache"]]
    with pytest.raises(UnsupportedModelError, match=message):
        Engine(model, num_blocks=8)
