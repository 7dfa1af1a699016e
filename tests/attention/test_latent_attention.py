"""Latent attention (MLA): a latent is paged once, decodes attend to it in place."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine, ops
from mlx_paged.attention.forward import path_counts
from mlx_paged.kv.blocks import BlockCopy
from mlx_paged.kv.pool import KVPool, as_int32
from mlx_paged.kv.shapes import KVShape
from mlx_paged.runner.model_probe import Batching, probe
from tests.support.models.architectures import VOCAB, build
from tests.support.models.tiny_models import solo_greedy
from tests.support.ops.paged_cases import (
    TOLERANCE,
    answer_by,
    as_numpy,
    assert_matches_float64,
    latent_case,
    memory_limit,
)

RANK, ROPE = 16, 8
NUM_LAYERS = {
    "bailing_hybrid": 1,
    "bailing_moe_v3": 1,
    "deepseek_v3": 2,
    "glm4_moe_lite": 2,
    "kimi_k25": 2,
    "kimi_k3": 1,
    "kimi_linear": 1,
    "kimi_vl": 2,
    "longcat_flash": 4,
    "longcat_flash_ngram": 4,
    "mistral4": 2,
}
"""Layers of latent attention in each architecture that decodes by it."""

SPARSE = ("deepseek_v32", "glm_moe_dsa")
"""The same in two layers, over what an indexer picks."""

NUM_TOKENS = 12
_rng = np.random.default_rng(3)
PROMPTS = [_rng.integers(0, VOCAB, length).tolist() for length in (3, 21, 9, 14)]


class TestOp:
    @pytest.fixture(autouse=True)
    def on_cpu(self):
        with mx.stream(mx.cpu):
            yield

    @pytest.fixture(params=["native", "reference"])
    def kernel(self, request, monkeypatch):
        answer_by(monkeypatch, lambda *_: request.param)
        return request.param

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize(("rank", "rope"), [(512, 64), (256, 64), (16, 8)], ids=str)
    @pytest.mark.parametrize("num_tokens", [1, 3], ids="L{}".format)
    def test_values_may_be_columns_of_the_keys(self, dtype, rank, rope, num_tokens, kernel):
        case = latent_case([1, 45, 16, 0], rank, rope, num_tokens=num_tokens, dtype=dtype)
        assert_matches_float64(case, kernel)

    @pytest.mark.slow
    def test_neither_keys_nor_values_are_copied(self):
        case = latent_case([45, 3000], 512, 64, num_blocks=1024)
        mx.eval(*case.arrays)
        assert case.k_cache.nbytes > 30 << 20
        with memory_limit(1 << 20):
            q, k, v, tables, lens = case.arrays
            mx.eval(ops.paged_attention(q, [k], [v], tables, lens))


def latent_pool(num_layers: int = 2, dtype: mx.Dtype = mx.float32) -> KVPool:
    shape = KVShape(1, RANK + ROPE, RANK, dtype, latent=True)
    return KVPool([shape] * num_layers, num_blocks=6, block_size=4)


def random_rows(count: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    return tuple(mx.random.normal((count, 1, dim)).astype(dtype) for dim in (RANK, ROPE))


class TestPool:
    @pytest.fixture(params=["native", "reference"])
    def kernel(self, request, monkeypatch):
        answer_by(monkeypatch, lambda *_: request.param)

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    def test_a_token_takes_one_latent_and_one_rotary_key(self, dtype):
        before = mx.get_active_memory()
        pool = latent_pool(dtype=dtype)
        assert pool.block_bytes == 2 * 4 * (RANK + ROPE) * dtype.size
        assert pool.nbytes == 6 * pool.block_bytes
        assert 0 <= mx.get_active_memory() - before - pool.nbytes < 1 << 14

    def test_rows_are_written_side_by_side_and_values_follow(self, kernel):
        pool = latent_pool()
        latents, rotary_keys = random_rows(3)
        pool.write(1, latents, rotary_keys, as_int32([9, 2, 23]))
        want = np.zeros((1, 6, 4, RANK + ROPE), np.float32)
        for row, (block, offset) in enumerate([(2, 1), (0, 2), (5, 3)]):
            want[0, block, offset] = np.concatenate([latents[row, 0], rotary_keys[row, 0]])
        np.testing.assert_array_equal(as_numpy(pool.k[1][:, :6]), want)
        np.testing.assert_array_equal(as_numpy(pool.v[1][:, :6]), want[..., :RANK])
        assert not mx.any(pool.k[0])

    def test_copied_blocks_bring_both(self, kernel):
        pool = latent_pool()
        pool.write(0, *random_rows(24), as_int32(range(24)))
        before = as_numpy(pool.k[0][:, :6])
        pool.copy_blocks([BlockCopy(1, 4), BlockCopy(4, 0)])
        want = before[:, [1, 1, 2, 3, 1, 5]]
        np.testing.assert_array_equal(as_numpy(pool.k[0][:, :6]), want)
        np.testing.assert_array_equal(as_numpy(pool.v[0][:, :6]), want[..., :RANK])

    def test_writes_copy_nothing(self):
        shape = KVShape(1, 576, 512, mx.float32, latent=True)
        pool = KVPool([shape], num_blocks=512, block_size=16)
        rows = [mx.zeros((1, 1, dim)) for dim in shape.row_dims]
        mx.eval(rows)
        with memory_limit(1 << 20):
            for slot in range(4):
                pool.write(0, *rows, as_int32([slot]))
                pool.copy_blocks([BlockCopy(0, 1)])
                mx.eval(pool.handles())

    def test_a_gather_has_keys_and_their_first_columns(self):
        pool = latent_pool()
        pool.write(0, *random_rows(24), as_int32(range(24)))
        k, v = pool.gather(0, as_int32([[3, 1]]), 7)
        flat = as_numpy(pool.k[0])[:, [3, 1]].reshape(1, 1, 8, RANK + ROPE)[:, :, :7]
        np.testing.assert_array_equal(as_numpy(k), flat)
        np.testing.assert_array_equal(as_numpy(v), flat[..., :RANK])

    @pytest.mark.parametrize("as_written", [False, True])
    def test_whole_rows_are_gathered_once(self, as_written):
        """MLX's gather on a GPU takes 32-bit offsets by the size of an array, not by its reach."""
        pool, gathered = latent_pool(), []
        pool.read(0, lambda array: gathered.append(array) or array, as_written=as_written)
        assert gathered == [pool.k[0]]


class DecodeCounter:
    """Counts the forwards of single tokens: decodes, and a prompt's last token by itself."""

    def __init__(self, engine: Engine) -> None:
        self.forwards = 0
        forward = engine.runner._forward

        def counted(batch):
            self.forwards += batch.inputs.shape[1] == 1
            return forward(batch)

        engine.runner._forward = counted


@pytest.fixture(scope="module")
def models():
    """Built models by name."""
    built = {}
    return lambda name: built.setdefault(name, build(name))


@pytest.mark.parametrize("name", [*NUM_LAYERS, *SPARSE])
def test_only_layers_that_decode_over_a_latent_keep_it_once(name, models):
    profile = probe(models(name))
    latent = [shape for shape in profile.shapes if shape.latent]
    assert latent == [KVShape(1, RANK + ROPE, RANK, mx.float32, latent=True)] * len(latent)
    assert len(latent) == NUM_LAYERS.get(name, 2)
    assert len(profile.shapes) == len(latent) * (2 if name in SPARSE else 1)
    assert profile.batching is Batching.ALTERNATE


@pytest.mark.parametrize("name", ["deepseek_v2", "minicpm3", "youtu_llm", "llama", "gemma2"])
def test_layers_that_cache_keys_and_values_of_heads_keep_both(name, models):
    assert not any(shape.latent for shape in probe(models(name)).shapes)


def assert_tokens(model, prompt, completion) -> None:
    assert completion.tokens == solo_greedy(model, prompt, NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", NUM_LAYERS)
def test_prompts_that_arrive_beside_decodes_have_mlx_lms_tokens(name, models):
    model = models(name)
    engine = Engine(model, block_size=4, num_blocks=96, prefill_chunk=6)
    decodes = DecodeCounter(engine)
    path_counts.clear()
    arrivals, ids, done, step = {0: [0, 1], 3: [2], 6: [3]}, {}, {}, 0
    while arrivals or engine.has_work:
        for i in arrivals.pop(step, ()):
            ids[engine.add_request(PROMPTS[i], max_tokens=NUM_TOKENS)] = i
        done |= {ids[o.request_id]: o.completion for o in engine.step() if o.completion}
        step += 1
    for i, completion in done.items():
        assert_tokens(model, PROMPTS[i], completion)
    assert NUM_TOKENS < decodes.forwards < 2 * NUM_TOKENS
    assert path_counts == {"paged": NUM_LAYERS[name] * decodes.forwards}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", NUM_LAYERS)
def test_prefixes_and_samples_share_latents(name, models):
    model = models(name)
    engine = Engine(model, block_size=4, num_blocks=96, prefill_chunk=6)
    decodes = DecodeCounter(engine)
    path_counts.clear()
    engine.generate([PROMPTS[1]], max_tokens=1)
    prompt = [*PROMPTS[1][:18], 5, 7, 9]
    (samples,) = engine.sample([prompt], 3, max_tokens=NUM_TOKENS)
    for completion in samples:
        assert_tokens(model, prompt, completion)
    whole_blocks = 16  # further on no state is known
    assert samples[0].cached_prompt_tokens == (whole_blocks if probe(model).states.exist else 18)
    assert engine.stats.cow_clones > 0
    assert path_counts == {"paged": NUM_LAYERS[name] * decodes.forwards}


@pytest.mark.slow
def test_decodes_gather_no_context():
    """One gathered latent of the batch would take twice what a step may."""
    model = build("deepseek_v3", max_position_embeddings=4096)
    engine = Engine(model, block_size=16, num_blocks=512, prefill_chunk=1024, prefix_cache=False)
    prompts = [_rng.integers(0, VOCAB, 1000).tolist() for _ in range(6)]
    for prompt in prompts:
        engine.add_request(prompt, max_tokens=30)
    started: set[int] = set()
    while len(started) < len(prompts):
        started |= {output.request_id for output in engine.step()}
    gathered = len(prompts) * 1000 * RANK * 4
    for _ in range(3):
        with memory_limit(gathered // 2):
            engine.step()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("block_size", [1, 8, 32], ids="block{}".format)
def test_blocks_and_kernels_change_nothing(block_size, models, monkeypatch):
    model = models("deepseek_v3")
    expected = [solo_greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    for kernel in ("native", "reference"):
        answer_by(monkeypatch, lambda *_: kernel)  # noqa: B023
        engine = Engine(model, block_size=block_size, num_blocks=128, prefill_chunk=5)
        done = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
        assert [completion.tokens for completion in done] == expected


def test_half_precision_latents_are_paged_in_their_own_dtype():
    model = build("deepseek_v3", n_routed_experts=None)
    model.set_dtype(mx.bfloat16)
    engine = Engine(model, block_size=4, num_blocks=64)
    path_counts.clear()
    done = engine.generate(PROMPTS, max_tokens=4)
    assert {cache.dtype for cache in engine.manager.pool.k + engine.manager.pool.v} == {mx.bfloat16}
    assert path_counts["paged"] > 0 and all(len(completion.tokens) == 4 for completion in done)


def test_preemption_changes_no_token(models):
    model = models("deepseek_v3")
    engine = Engine(model, block_size=4, num_blocks=14, prefill_chunk=16)
    done = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    assert engine.stats.preemptions > 0
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert_tokens(model, prompt, completion)


def test_a_float_bias_on_the_rotary_scores_is_not_lost(models, monkeypatch):
    """A model that does more with the scores than mask them gets the gathered latents."""
    from mlx_lm.models import deepseek_v3

    attention = deepseek_v3.scaled_dot_product_attention

    def biased(q, k, v, *, cache, scale, mask):
        bias = 0.3 * mx.arange(mask.shape[-1])
        return attention(q, k, v, cache=cache, scale=scale, mask=mask + bias)

    monkeypatch.setattr(deepseek_v3, "scaled_dot_product_attention", biased)
    model = build("deepseek_v3")
    assert not any(shape.latent for shape in probe(model).shapes)
    engine = Engine(model, block_size=4, num_blocks=96, prefill_chunk=6)
    done = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert_tokens(model, prompt, completion)


def test_latents_that_were_probed_may_still_be_gathered(models, monkeypatch):
    model = models("deepseek_v3")
    engine = Engine(model, block_size=4, num_blocks=96, prefill_chunk=6)
    for layer in engine.runner.layers:
        monkeypatch.setattr(layer, "attend", lambda _: None)
    path_counts.clear()
    done = engine.generate(PROMPTS, max_tokens=NUM_TOKENS)
    assert not path_counts
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert_tokens(model, prompt, completion)
