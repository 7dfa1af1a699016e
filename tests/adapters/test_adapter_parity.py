"""Each row of a mixed batch has the tokens of mlx-lm's model with that row's adapter alone."""

import numpy as np
import pytest

from mlx_paged import Engine
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
