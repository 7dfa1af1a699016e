"""The quality of quantized K/V: limits on the demo model, and those of the real one on the page."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from mlx_paged import Engine, SamplingParams
from mlx_paged.loading import load_model
from scripts.batch_invariance import prompts_of
from scripts.kv_quantization import (
    BEGIN,
    END,
    LIMITS,
    MLX_LM,
    PAGE,
    TEXTS,
    RoundedCache,
    Text,
    exceeded,
    kinds_of,
    of_chats,
    of_text,
    sources,
    text_tokens,
)

DEMO_LIMITS = {
    "8": {"kld": 6e-5, "same": 0.985},
    "6": {"kld": 7e-4, "same": 0.965},
    "4": {"kld": 3e-3, "same": 0.945},
}
MLX_4 = "mlx-lm, 4 bits, groups of 32"


@pytest.fixture(scope="module")
def demo():
    return load_model(None)


@pytest.fixture(scope="module")
def measured(demo):
    """512 tokens of each text on the demo model."""
    model, tokenizer = demo
    kinds = kinds_of(model)
    tokens = {name: text_tokens(tokenizer, text, 512) for name, text in sources().items()}
    return {name: of_text(model, kinds, ids) for name, ids in tokens.items()}


def on_page() -> dict[str, dict[str, Text]]:
    """The page's figures by text and kind."""
    table = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    texts: dict[str, dict[str, Text]] = {name: {} for name in TEXTS}
    for name, _, *cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines):
        for text, (kld, *shares) in zip(TEXTS, (cells[:3], cells[3:6]), strict=True):
            parts = [float(share.rstrip("%")) / 100 for share in shares]
            texts[text][name] = Text(float(kld), *parts)
    return texts


@pytest.mark.sampled(2)
def test_nothing_exceeds_its_limit(measured):
    assert exceeded(measured, DEMO_LIMITS) == []


@pytest.mark.sampled(2)
def test_the_limits_notice_keys_of_4_bits(measured):
    assert len(exceeded(measured, {MLX_4: DEMO_LIMITS["4"]})) == 4


@pytest.mark.sampled(2)
def test_fewer_bits_change_more(measured):
    for rows in measured.values():
        assert 0 < rows["8"].kld < rows["6"].kld < rows["4"].kld < rows[MLX_4].kld
        assert rows["none"] == Text(0, 1, 0)


@pytest.mark.sampled(2)
def test_the_first_wrong_token_of_an_answer_is_found(demo):
    model, tokenizer = demo
    kinds = {"none": kinds_of(model)["none"]}
    prompts = prompts_of(tokenizer, 2)
    engine = Engine(model, tokenizer, kv_memory=1 << 26)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    answers = [list(c.tokens) for c in engine.generate(prompts, params)]
    assert of_chats(model, kinds, prompts, answers) == {"none": (2, 1.0)}
    answers[1][7] += 1
    assert of_chats(model, kinds, prompts, answers) == {"none": (1, 27 / 40)}


@pytest.mark.parametrize(("bits", "group_size"), MLX_LM)
def test_rounded_caches_are_those_of_mlx_lm(bits, group_size):
    k, v = mx.random.normal((2, 1, 3, 5, 64), dtype=mx.float16, key=mx.random.key(bits))
    rounded = RoundedCache(bits, group_size).update_and_fetch(k, v)
    stored = QuantizedKVCache(group_size=group_size, bits=bits).update_and_fetch(k, v)
    for own, parts in zip(rounded, stored, strict=True):
        theirs = mx.dequantize(*parts, bits=bits, group_size=group_size)
        np.testing.assert_array_equal(np.array(own), np.array(theirs))


def test_the_page_keeps_the_limits_of_the_real_model():
    texts = on_page()
    assert exceeded(texts) == []
    for text, rows in texts.items():
        assert len(rows) == 4 + len(MLX_LM), text
        assert exceeded({text: rows}, {MLX_4: LIMITS["4"]}), text
