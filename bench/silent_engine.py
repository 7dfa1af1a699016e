"""An engine whose model computes nothing: what is left of a step is the host's work."""

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama

from mlx_paged import Engine
from mlx_paged.allocation import ceil_div
from mlx_paged.model_runner import ModelRunner

BLOCK_SIZE = 16
VOCAB = 128
SPARE_BLOCKS = 64
"""What each sequence may grow by while it is watched."""


class SilentModel:
    """Answers with the same logits ``[rows, 1, VOCAB]`` in every forward of `rows` tokens."""

    def __init__(self, rows: int) -> None:
        self._logits = mx.random.normal((rows, 1, VOCAB))
        mx.eval(self._logits)

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        if inputs.shape[0] == len(self._logits):
            return self._logits
        return mx.zeros((inputs.shape[0], 1, VOCAB))


def silent_engine(rows: int, blocks: int, *, lookahead: bool, **options: Any) -> Engine:
    """An engine with `rows` requests that decode, each holding `blocks` blocks of 16 tokens of its
    own, filled to different degrees; `options` are their sampling parameters."""
    config = {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    num_blocks = ceil_div(rows * (blocks + SPARE_BLOCKS) * 101, 100) + rows
    engine = Engine(
        model,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_running=rows,
        prefill_chunk=rows * blocks * BLOCK_SIZE,
        lookahead=lookahead,
    )
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.model = SilentModel(rows)
    rng = np.random.default_rng(0)
    for _ in range(rows):
        num_tokens = blocks * BLOCK_SIZE - int(rng.integers(BLOCK_SIZE))
        prompt = rng.integers(VOCAB, size=num_tokens).tolist()
        engine.add_request(prompt, max_tokens=SPARE_BLOCKS * BLOCK_SIZE, **options)
    for _ in range(3):
        engine.step()
    return engine
