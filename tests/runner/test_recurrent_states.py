"""States that grow with a text's first tokens: sequences that do not fit together yet."""

import numpy as np
import pytest

from mlx_paged import Engine
from tests.support.models.architectures import build
from tests.support.models.tiny_models import solo_greedy

LENGTHS = (1, 2, 9, 3, 1, 21)


@pytest.mark.slow
def test_texts_shorter_than_the_model_looks_back_fail_no_step():
    model = build("longcat_flash_ngram")
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 50, length).tolist() for length in LENGTHS]
    engine = Engine(model, block_size=4, num_blocks=96, prefill_chunk=6)
    done = engine.generate(prompts, max_tokens=8)
    assert [completion.tokens for completion in done] == [solo_greedy(model, p, 8) for p in prompts]
    assert engine.stats.faults == 0
