"""A request gets the same tokens in every batch, bit for bit, in each dtype of a CPU."""

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest

from mlx_paged import demo_model_path
from scripts.batch_invariance import SETTINGS, cast, differing


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "4 bits"])
def test_answers_do_not_depend_on_the_batch(dtype):
    model, tokenizer = mlx_lm.load(str(demo_model_path()))[:2]
    if dtype == "4 bits":
        cast(model, mx.bfloat16)
        nn.quantize(model, group_size=32, bits=4)
    else:
        cast(model, getattr(mx, dtype))
    assert differing(model, tokenizer, 24, 24) == dict.fromkeys(SETTINGS, 0)
