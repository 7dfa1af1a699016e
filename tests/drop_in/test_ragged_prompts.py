"""Batches of recurrent models in mlx-lm's own generator: prompts of several lengths."""

import re
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, PromptProcessingBatch, generate_step
from mlx_lm.models.cache import ArraysCache

from mlx_paged.drop_in.caches import make_prompt_cache
from mlx_paged.drop_in.patch import STATES_OVER_PADDING, patched_mlx_lm, stock_prompt
from mlx_paged.runner.model_probe import leaves
from tests.support.drop_in.prompt_cache_cases import stock_make_prompt_cache
from tests.support.models.architectures import ARCHITECTURES, NOT_ON_A_CPU, VOCAB, build

pytestmark = pytest.mark.mac

TOLERANCE = 1e-4
"""Largest difference of log-probabilities, relative to the largest of them."""

NUM_TOKENS = 5
PROMPTS = [
    np.random.default_rng(n).integers(0, VOCAB, length).tolist()
    for n, length in enumerate((3, 9, 14, 6))
]
RIGHT_IN_MLX_LM = (
    "bailing_hybrid",
    "bailing_moe_v3",
    "falcon_h1",
    "gear",
    "granitemoehybrid",
    "kimi_k3",
    "kimi_linear",
    "lfm2",
    "lfm2-vl",
    "lfm2_moe",
    "mamba2",
    "plamo2",
    "prism_hadamard_qwen35",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
)
WRONG = ("longcat_flash_ngram",)
"""Rows of its states have several widths: mlx-lm joins them wrongly, by itself and patched."""


def logprobs_of(rows) -> np.ndarray:
    return np.stack([np.array(row).reshape(-1) for row in rows])


def alone(model, prompt) -> tuple[list[int], np.ndarray]:
    cache = stock_make_prompt_cache(model)
    steps = generate_step(
        mx.array(prompt), model, max_tokens=NUM_TOKENS, prompt_cache=cache, prefill_step_size=5
    )
    tokens, logprobs = zip(*steps, strict=True)
    return list(tokens), logprobs_of(logprobs)


def errors(model) -> list[float]:
    """Of each row of a batch, how far its log-probabilities are from those of its prompt alone."""
    generator = BatchGenerator(model, max_tokens=NUM_TOKENS, prefill_step_size=5)
    rows = {uid: ([], []) for uid in generator.insert(PROMPTS)}
    while any(responses := generator.next()):
        for response in responses[1]:
            tokens, logprobs = rows[response.uid]
            tokens.append(response.token)
            logprobs.append(response.logprobs)
    return [
        _error(alone(model, prompt), tokens, logprobs_of(logprobs))
        for prompt, (tokens, logprobs) in zip(PROMPTS, rows.values(), strict=True)
    ]


def _error(expected, tokens, logprobs) -> float:
    """Up to the first token that differs, at which the texts part."""
    same = [*np.equal(expected[0], tokens), False].index(False)
    known = expected[1][: same + 1]
    return float(np.abs(known - logprobs[: same + 1]).max() / np.abs(known).max())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", sorted(STATES_OVER_PADDING))
def test_rows_have_the_states_of_their_own_tokens(name):
    model = build(name)
    assert max(errors(model)) > 100 * TOLERANCE, "mlx-lm itself pads no more states of this model"
    with patched_mlx_lm(block_size=4):
        assert max(errors(model)) < TOLERANCE


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", RIGHT_IN_MLX_LM)
def test_others_are_batched_as_mlx_lm_does_it(name):
    with patched_mlx_lm(block_size=4):
        assert max(errors(build(name))) < TOLERANCE


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("scope", [nullcontext, patched_mlx_lm])
def test_what_stays_wrong_is_wrong_in_mlx_lm(name, scope):
    with scope():
        assert max(errors(build(name))) > 100 * TOLERANCE


@pytest.mark.slow
def test_every_recurrent_architecture_is_known():
    known = {*STATES_OVER_PADDING, *RIGHT_IN_MLX_LM, *WRONG}
    for name in sorted(ARCHITECTURES.keys() - NOT_ON_A_CPU.keys() - {"phi3small"}):
        caches = leaves(stock_make_prompt_cache(build(name)))
        assert any(type(c) is ArraysCache for c in caches) == (name in known), name


def test_the_document_names_them():
    text = (Path(__file__).parents[2] / "docs/drop-in.md").read_text()
    named = re.search(r"recurrent\s+states: (.+?)\. ", text, re.DOTALL)
    assert set(re.findall(r"\w+", named[1])) - {"and"} == STATES_OVER_PADDING
    assert all(name in text for name in WRONG)


def test_a_failing_row_leaves_the_batch_whole(monkeypatch):
    model = build("mamba")
    caches = [make_prompt_cache(model) for _ in range(3)]
    batch = PromptProcessingBatch(model, [0, 1, 2], caches, max_tokens=[5] * 3)
    batch.samplers = batch.logits_processors = [None] * 3
    calls = iter([stock_prompt, None])
    monkeypatch.setattr("mlx_paged.drop_in.patch.stock_prompt", lambda *a: next(calls)(*a))
    with patched_mlx_lm(), pytest.raises(TypeError):
        batch.prompt([[1, 2], [3], [4, 5, 6]])
    assert batch.uids == [0, 1, 2] and batch.tokens[0] == [1, 2]
    assert batch.prompt_cache[0].batch_size == 3
