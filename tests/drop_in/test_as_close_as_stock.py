"""Under the patch a batch is as close to single prompts as with mlx-lm's own caches."""

import sys
from contextlib import nullcontext

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from mlx_paged.cli import demo_model_path
from mlx_paged.drop_in.patch import patched_mlx_lm

TEXTS = (
    "def read(path):\n    with open(path) as file:\n        return file",
    "class",
    "import os, sys\n\n\ndef main():\n    ",
    "for i in range(10):\n    print(i)\n",
    "x = [",
    "def f(a, b=2):\n    return a +",
    "    try:\n        pass\n    except ValueError",
)


def root_mean_square_error(model, tokenizer, **options):
    """Of the log-probabilities of a batch's first tokens from those of each prompt alone."""
    prompts = [tokenizer.encode(text) for text in TEXTS]
    batch = sys.modules["mlx_lm.generate"].BatchGenerator(
        model, stop_tokens=[], max_tokens=1, **options
    )
    uids, found = batch.insert(prompts), {}
    while responses := batch.next_generated():
        found |= {response.uid: np.array(response.logprobs) for response in responses}
    alone = []
    for prompt in prompts:
        response = next(iter(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=1)))
        alone.append(np.array(response.logprobs))
    return np.sqrt(np.square(np.stack([found[uid] for uid in uids]) - np.stack(alone)).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_batch_size": 2, "prefill_step_size": 8, "completion_batch_size": 3}],
    ids=["one batch", "many batches"],
)
def test_batches_match_single_prompts_as_closely_as_stock(options):
    model, tokenizer = mlx_lm.load(str(demo_model_path()))[:2]
    model.set_dtype(mx.float32)
    errors = []
    for context in (nullcontext, patched_mlx_lm):
        with context():
            errors.append(root_mean_square_error(model, tokenizer, **options))
    stock, ours = errors
    assert ours <= 1.25 * stock  # a BLAS may round products of few rows in another way
