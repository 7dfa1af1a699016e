"""Under the patch, token ids of callers never index memory that is not there."""

import sys

import mlx.core as mx
import mlx_lm
import mlx_lm.server
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_logits_processors

from mlx_paged import patched_mlx_lm

STOCK = {"make": make_logits_processors}
"""The patch rebinds names of modules, but not this value."""

OUTSIDE = (1792, 5_000_000, 2**31 - 1, -1)


@pytest.mark.parametrize("token", OUTSIDE)
def test_prompts_have_rows_of_the_embedding(demo, token):
    model, tokenizer = demo
    with patched_mlx_lm():
        for call in (mlx_lm.generate, lambda *a, **o: list(mlx_lm.stream_generate(*a, **o))):
            with pytest.raises(ValueError, match=rf"token {token}: expected ids in \[0, 1792\)"):
                call(model, tokenizer, [1, token], max_tokens=2)
        with pytest.raises(ValueError, match=f"token {token}"):
            mlx_lm.batch_generate(model, tokenizer, [[1], [2, token]], max_tokens=2)
        generator = BatchGenerator(model)
        with pytest.raises(ValueError, match=f"token {token}"):
            generator.insert([[token]], [2])
        options = {"draft_model": model, "max_tokens": 2}
        with pytest.raises(ValueError, match=f"token {token}"):
            list(mlx_lm.stream_generate(model, tokenizer, [1, token], **options))


def test_biases_have_columns_of_the_logits():
    logits = mx.random.normal((2, 8))
    biases = {3: 2.0, 7: -1.0}
    with patched_mlx_lm():
        make = sys.modules["mlx_lm.sample_utils"].make_logits_processors
        assert sys.modules["mlx_lm.server"].make_logits_processors is make is not STOCK["make"]
        (ours,) = make(biases | dict.fromkeys(OUTSIDE, 100.0))
        (theirs,) = STOCK["make"](biases)
        assert mx.array_equal(ours(mx.array([1]), logits), theirs(mx.array([1]), logits))
        (none,) = make({8: 5.0})
        assert mx.array_equal(none(mx.array([1]), logits), logits)
        assert len(make(None, repetition_penalty=1.1)) == len(
            STOCK["make"](None, repetition_penalty=1.1)
        )
    assert sys.modules["mlx_lm.sample_utils"].make_logits_processors is STOCK["make"]


def test_a_biased_answer_is_mlx_lms(demo):
    model, tokenizer = demo
    biases = {5: 3.0, 40: -2.0}
    expected = mlx_lm.generate(
        model, tokenizer, "def f(x):", max_tokens=12, logits_processors=STOCK["make"](biases)
    )
    with patched_mlx_lm():
        make = sys.modules["mlx_lm.sample_utils"].make_logits_processors
        processors = make(biases | {9_999_999: 50.0})
        options = {"max_tokens": 12, "logits_processors": processors}
        assert mlx_lm.generate(model, tokenizer, "def f(x):", **options) == expected
