"""Log-probabilities of prompts, and the tokens after them, are mlx-lm's for every output head, also
for those whose rows nobody can choose before the projection."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear

from mlx_paged import Engine
from mlx_paged.runner.model_probe import probe
from tests.runner.test_architectures import IS_SERVED
from tests.support.models.architectures import VOCAB, build
from tests.support.models.tiny_models import tiny_model

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, VOCAB, length).tolist() for length in (10, 3, 14)]
TOLERANCE = 1e-4
"""Largest difference of log-probabilities, relative to the largest of them."""


def logprobs_of(model, prompt) -> np.ndarray:
    logits = model(mx.array([prompt]), cache=make_prompt_cache(model))[0]
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True), np.float64)


def assert_as_mlx_lm(model, engine) -> None:
    """Of each prompt alone, which one step computes whole, and of all together."""
    expected = [logprobs_of(model, prompt) for prompt in PROMPTS]
    alone = [([prompt], [each]) for prompt, each in zip(PROMPTS, expected, strict=True)]
    for prompts, of_each in [*alone, (PROMPTS, expected)]:
        engine.reset_prefix_cache()
        for wanted in (0, None):
            done = engine.generate(prompts, max_tokens=1, prompt_logprobs=wanted)
            for prompt, completion, full in zip(prompts, done, of_each, strict=True):
                assert completion.error is None
                assert completion.logprobs[0] == pytest.approx(full[-1].max(), rel=TOLERANCE)
                found = [each.logprob for each in completion.prompt_logprobs[1:]]
                right = [full[i, token] for i, token in enumerate(prompt[1:])][: len(found)]
                scale = np.abs(full).max()
                np.testing.assert_allclose(found, right, atol=TOLERANCE * scale)
    assert engine.stats.faults == 0


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", IS_SERVED)
def test_every_architecture_scores_its_prompts(name):
    model = build(name, seed=3)
    assert_as_mlx_lm(model, Engine(model, block_size=4, num_blocks=64, prewarm=False))


class Wrapper(nn.Module):
    """A head within another module, under any name."""

    def __init__(self, inner: nn.Module, name: str = "inner") -> None:
        super().__init__()
        self[name], self._name = inner, name

    def __call__(self, x: mx.array) -> mx.array:
        return self[self._name](x)


class Beside(Wrapper):
    """What belongs to all rows is added to the projection."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) + 2 * mx.sin(x[..., :1] + mx.arange(VOCAB))


class Capped(Wrapper):
    def __call__(self, x: mx.array) -> mx.array:
        return mx.tanh(super().__call__(x) / 3) * 3


class Twice(nn.Module):
    """Two heads, of which one has a known name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.head, self.other = inner, nn.Linear(inner.weight.shape[1], VOCAB)

    def __call__(self, x: mx.array) -> mx.array:
        return self.head(x) + self.other(x)


def lora(kind):
    def wrapped(inner: nn.Module) -> nn.Module:
        made = kind.from_base(inner, r=4, scale=20.0)
        made.lora_b = mx.random.normal(made.lora_b.shape, key=mx.random.key(1))
        made.eval()
        return made

    return wrapped


def function(inner: nn.Module):
    return lambda x: inner(x) * 0.5


HEADS = {
    "LoRA": lora(LoRALinear),
    "DoRA": lora(DoRALinear),
    "within a module": Wrapper,
    "within a module, as head": lambda inner: Wrapper(inner, "head"),
    "within modules": lambda inner: Wrapper(Wrapper(inner, "output"), "lm_head"),
    "softcap": lambda inner: Capped(inner, "output"),
    "a term of all rows": lambda inner: Beside(inner, "head"),
    "a term of all rows, not found": Beside,
    "two heads": Twice,
    "a function": function,
}


@pytest.fixture(params=[1, 0], ids=["made wrapped", "wrapped after an engine"])
def is_first(request) -> bool:
    return bool(request.param)


@pytest.fixture(params=["same engine", "new engine"])
def is_kept(request, is_first) -> bool:
    if is_first and request.param == "same engine":
        pytest.skip("there is no engine before")
    return request.param == "same engine"


def checked(model, change, is_first, is_kept) -> None:
    """Change the model before or after an engine has been made and used."""
    make = lambda: Engine(model, block_size=4, num_blocks=64)  # noqa: E731
    engine = None
    if not is_first:
        engine = make()
        assert_as_mlx_lm(model, engine)
    change()
    mx.eval(model.parameters())
    assert_as_mlx_lm(model, engine if engine is not None and is_kept else make())


@pytest.mark.parametrize("wrap", HEADS.values(), ids=HEADS)
def test_wrapped_heads_score_their_prompts(wrap, is_first, is_kept):
    model = tiny_model("llama", tie_word_embeddings=False, vocab_size=VOCAB)
    checked(model, lambda: setattr(model, "lm_head", wrap(model.lm_head)), is_first, is_kept)


EMBEDDINGS = {"LoRA": lora(LoRAEmbedding)}


@pytest.mark.parametrize("wrap", EMBEDDINGS.values(), ids=EMBEDDINGS)
def test_wrapped_tied_embeddings_score_their_prompts(wrap, is_first, is_kept):
    model = tiny_model("llama", tie_word_embeddings=True, vocab_size=VOCAB)
    inner = model.model
    change = lambda: setattr(inner, "embed_tokens", wrap(inner.embed_tokens))  # noqa: E731
    checked(model, change, is_first, is_kept)


def test_a_wrapped_head_that_is_plain_again_takes_rows_again():
    model = tiny_model("llama", tie_word_embeddings=False, vocab_size=VOCAB)
    plain = model.lm_head
    assert probe(model).heads_take_rows
    model.lm_head = Beside(plain, "head")
    assert not probe(model).heads_take_rows
    model.lm_head = plain
    assert probe(model).heads_take_rows


def test_few_architectures_compute_all_logits_of_a_chunk():
    """The others' heads are found, so that a chunk computes the logits of one row."""
    slow = {name for name in ("llama", "qwen3", "gpt2", "gemma3", "mamba2", "phixtral", "talkie")
            if not probe(build(name)).heads_take_rows}  # fmt: skip
    assert slow == {"phixtral", "talkie"}
