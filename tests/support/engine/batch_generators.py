"""Batch generators under test, and what comes out of them."""

from functools import lru_cache

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

from mlx_paged.batch_generator.generator import BatchGenerator
from tests.support.models.tiny_models import VOCAB, tiny_model

PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (5, 40, 1, 17, 33)]


@lru_cache
def model(model_type="llama"):
    return tiny_model(model_type)


def paged(model_type="llama", **options):
    options = {"block_size": 4, "num_blocks": 120, "prefill_step_size": 16} | options
    options.setdefault("lookahead", True)  # as on a GPU
    return BatchGenerator(model(model_type), **options)


def run(generator, calls=1000):
    """Prompt and generation responses by uid, of everything that is left or of some calls."""
    prompts, tokens = {}, {}
    for _ in range(calls):
        told, given = generator.next()
        if not told and not given:
            break
        for responses, found in ((told, prompts), (given, tokens)):
            assert len({response.uid for response in responses}) == len(responses)
            for response in responses:
                found.setdefault(response.uid, []).append(response)
    return prompts, tokens


def tokens_of(responses):
    return {uid: [response.token for response in found] for uid, found in responses.items()}


def assert_drained(generator):
    generator.next()
    manager = generator._engine.manager
    manager.check_integrity()
    assert manager.blocks_in_use == generator.prompt_cache_nbytes == 0
    assert not generator._engine._kept and not generator._sequences and not generator._by_request


def continued(cache, prompt, num_tokens, model_type="llama"):
    steps = generate_step(
        mx.array(prompt), model(model_type), max_tokens=num_tokens, prompt_cache=cache
    )
    return [token for token, _ in steps]


def assert_drained_after(responses, generator):
    """Once nobody holds the responses, nobody holds blocks."""
    responses.clear()
    assert_drained(generator)
