"""Engines whose model can be silenced: only the host's work is left of a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from bench.models import random_llama
from bench.names import SIZES
from mlx_paged import Engine
from mlx_paged.kv.blocks import ceil_div
from mlx_paged.options import Policy
from mlx_paged.runner.model_runner import ModelRunner

BLOCK_SIZE = 16
VOCAB = 128
SPARE_BLOCKS = 64  # by how much each sequence can grow while it is watched


class SilentModel:
    """Returns the same logits ``[rows, 1, vocab]`` in every forward of `rows` tokens."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.vocab = vocab
        self._logits = mx.random.normal((rows, 1, vocab))
        mx.eval(self._logits)

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        if inputs.shape[0] == len(self._logits):
            return self._logits
        return mx.zeros((inputs.shape[0], 1, self.vocab))


def smallest_llama() -> nn.Module:
    """A llama with 32 bytes of K/V for a token."""
    size = SIZES["tiny"] | {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return random_llama(size | {"num_attention_heads": 4, "vocab_size": VOCAB})


@contextmanager
def silenced(engine: Engine, rows: int, vocab: int) -> Iterator[None]:
    """Within this context the engine's model computes nothing and writes no K/V."""
    assert isinstance(engine.runner, ModelRunner)
    model = engine.runner.model
    engine.runner.model = SilentModel(rows, vocab)
    try:
        yield
    finally:
        engine.runner.model = model


def decoding_engine(
    model: nn.Module,
    vocab: int,
    rows: int,
    context: int,
    *,
    lookahead: bool,
    policy: str = Policy.FCFS,
    clients: int = 1,
    waiting: int = 0,
    **options: Any,
) -> Engine:
    """An engine with `rows` requests that decode, each with about `context` tokens in its own
    blocks. Their last blocks are filled to different degrees. No prompt was computed. `waiting`
    more requests wait; all together are of `clients` clients. `options` are sampling parameters.
    """
    num_blocks = rows * (ceil_div(context, BLOCK_SIZE) + SPARE_BLOCKS + 1)
    engine = Engine(
        model,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks + ceil_div(num_blocks, 50),  # what an admission must leave
        max_running=rows,
        prefill_chunk=rows * context,
        lookahead=lookahead,
        policy=policy,
        compile=False,
    )
    rng = np.random.default_rng(0)
    for i in range(rows + waiting):
        num_tokens = max(1, context - int(rng.integers(BLOCK_SIZE)))
        prompt = rng.integers(vocab, size=num_tokens).tolist()
        share = (f"client {i % clients}",)
        engine.add_request(prompt, max_tokens=SPARE_BLOCKS * BLOCK_SIZE, share=share, **options)
    with silenced(engine, rows, vocab):
        for _ in range(3):
            engine.step()
    return engine
