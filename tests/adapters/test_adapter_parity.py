"""Each row of a mixed batch has the tokens of mlx-lm's model with that row's adapter alone."""

import io
import re
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_paged import Engine, SamplingParams
from mlx_paged.ops.low_rank_terms import RowSlots
from mlx_paged.runner.low_rank_layers import AdaptedLayers, Group, LowRankTerms
from mlx_paged.runner.row_terms import using
from tests.support.models.adapters import greedy, random_arrays, with_adapter, write_adapter
from tests.support.models.architectures import VOCAB, build

NAMES = [
    *("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "cohere2", "starcoder2"),
    *("gpt_neox", "glm4", "minicpm3", "smollm3"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "granitemoe"),
    *("mamba", "mamba2", "jamba", "qwen3_next", "lfm2", "falcon_h1", "granitemoehybrid"),
    *("recurrent_gemma", "rwkv7", "nemotron_h", "kimi_linear", "bailing_hybrid"),
]
"""Dense architectures, those with experts, those with recurrent layers."""

MAX_TOKENS = 6
RANKS = 3, 12, 8


def prompts_of(seed: int, count: int) -> list[list[int]]:
    """Random prompts; every third one begins like the one before."""
    rng, prompts = np.random.default_rng(seed), list[list[int]]()
    for index in range(count):
        prompt = rng.integers(0, VOCAB, int(rng.integers(3, 40))).tolist()
        prompts.append(prompts[-1][:9] + prompt if index % 3 == 2 else prompt)
    return prompts


def run(engine: Engine, prompts, adapters):
    ids = [
        engine.add_request(prompt, max_tokens=MAX_TOKENS, adapter=adapter)
        for prompt, adapter in zip(prompts, adapters, strict=True)
    ]
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    assert all(done[each].error is None for each in ids), [done[each].error for each in ids]
    return [done[each] for each in ids]


def assert_as_alone(build_one, folders, **options) -> None:
    prompts = prompts_of(1, 6) * 2
    adapters = [None, *folders] * 3
    engine = Engine(build_one(), adapters=folders, block_size=4, num_blocks=128, **options)
    found = run(engine, prompts, adapters)
    differing = 0
    for prompt, adapter, completion in zip(prompts, adapters, found, strict=True):
        alone = with_adapter(build_one(), folders.get(adapter))
        expected = greedy(alone, prompt, MAX_TOKENS)
        assert completion.tokens == expected, (adapter, prompt)
        assert completion.adapter == adapter
        differing += expected != greedy(build_one(), prompt, MAX_TOKENS)
    assert differing > 4, "the adapters change nothing"
    engine.manager.check_integrity()


@pytest.fixture
def folders(request, tmp_path):
    """Three adapters of the architecture."""
    name = request.node.callspec.params["name"]
    made = {}
    for index, rank in enumerate(RANKS):
        arrays = random_arrays(build(name), index, rank=rank)
        made[f"a{index}"] = write_adapter(tmp_path / f"a{index}", arrays, rank=rank)
    return made


@pytest.mark.sampled(16)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_rows_have_the_tokens_of_their_adapters(name, is_compiled, folders):
    assert_as_alone(lambda: build(name), folders, compile=is_compiled, prefill_chunk=16)


def of_few_bits(base: str) -> nn.Module:
    model = build("llama")
    model.set_dtype(mx.bfloat16 if base == "bfloat16" else mx.float16)
    if base == "4bit":
        nn.quantize(
            model,
            32,
            4,
            class_predicate=lambda _, m: (
                hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0
            ),
        )
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("base", ["bfloat16", "4bit"])
def test_rows_of_few_bits_have_the_bits_of_their_adapters_alone(base, is_compiled, tmp_path):
    folders = {
        f"a{i}": write_adapter(
            tmp_path / f"a{i}", random_arrays(of_few_bits(base), i, rank=rank), rank=rank
        )
        for i, rank in enumerate(RANKS)
    }
    engine = Engine(
        of_few_bits(base), adapters=folders, block_size=4, num_blocks=128, prefix_cache=False,
        compile=is_compiled,
    )  # fmt: skip
    prompts, names = prompts_of(2, 4) * 2, [None, *folders] * 2

    def done(prompts, names):
        params = [SamplingParams(max_tokens=MAX_TOKENS, logprobs=VOCAB, adapter=n) for n in names]
        return engine.generate(prompts, params)

    theirs = {name: with_adapter(of_few_bits(base), folders.get(name)) for name in names}
    together = done(prompts, names)
    for prompt, name, ours in zip(prompts, names, together, strict=True):
        (alone,) = done([prompt], [name])
        assert ours.tokens == alone.tokens and ours.top_logprobs == alone.top_logprobs, name
        first = dict(ours.top_logprobs[0])
        found = np.array([first[token] for token in range(VOCAB)])
        distances = {
            other: np.abs(found - log_probabilities(model, prompt)).max()
            for other, model in theirs.items()
        }
        own = distances.pop(name)  # roundings
        assert 5 * own < min(distances.values()), (name, own, distances)


def log_probabilities(model: nn.Module, prompt: list[int]) -> np.ndarray:
    """mlx-lm's, of the token after a prompt."""
    logits = model(mx.array([prompt]), cache=make_prompt_cache(model))[0, -1]
    return np.array(nn.log_softmax(logits.astype(mx.float32)))


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("count", [4, 40])
def test_layers_of_a_router_share_the_slots_of_its_pairs(count, is_gpu, monkeypatch):
    """mlx-lm sorts 64 pairs of a row and an expert or more; the terms need that order once."""
    if is_gpu:
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    router, model = SwitchGLU(32, 16, 4), nn.Module()
    model.layers = [router]
    rows = RowSlots.known(np.arange(count, dtype=np.int32) % 3 - 1)
    places = AdaptedLayers.of(model).places
    pairs = {path: tuple(map(mx.ones, ((2, *each) for each in place.shapes(8))))
             for path, place in places.items()}  # fmt: skip
    assert len(pairs) == 3
    x = mx.random.normal((count, 32))
    experts = mx.array(np.arange(2 * count, dtype=np.uint32).reshape(count, 2) % 4)
    text = io.StringIO()
    with using(LowRankTerms([Group(rows, pairs)])):
        mx.export_to_dot(text, router(x, experts))
    nodes = Counter(re.findall(r'label ="(\w+)"', text.getvalue()))
    own_sorts = 2 if 2 * count >= 64 else 0  # and back
    assert nodes["ArgSort"] == own_sorts + (own_sorts > 0)
    on_gpu = mx.default_device() != mx.cpu
    assert (nodes["GreaterEqual"], nodes["Select"]) == (1 + on_gpu, 1 + 3 * on_gpu)
