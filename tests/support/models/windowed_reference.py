"""What mlx-lm computes with a windowed model for one sequence, perhaps with quantized K/V."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache, make_prompt_cache

from mlx_paged.attention.causal import limits
from mlx_paged.options import KVBits
from mlx_paged.runner.model_probe import leaves, probe
from tests.support.models.architectures import VOCAB, build
from tests.support.ops.numpy_quantization import quantized_mlx_lm

Tokens = Sequence[int]
Key = tuple[tuple[int, ...], ...]
Rows = npt.NDArray[np.float32]

NOISE = 3e-7, 1e-6
"""Relative errors of float32 sums. If K/V that mlx-lm quantizes has such errors, some elements are
rounded as the engine rounds them."""

NOISY_RUNS = 24
"""Runs of mlx-lm with each of these errors, for a completion that is further from the first."""

WINDOW_FIELDS = (
    "sliding_window", "sliding_window_size", "attention_window_size", "loop_window_size",
    "attention_chunk_size",
)  # fmt: skip
"""Each architecture reads one of these."""


def limits_of(model: Any) -> set[int]:
    """The numbers of tokens that layers of mlx-lm's own caches or of the engine are limited to."""
    caches = list(leaves(make_prompt_cache(model)))
    rotating = {cache.max_size for cache in caches if isinstance(cache, RotatingKVCache)}
    chunked = {cache.chunk_size for cache in caches if isinstance(cache, ChunkedKVCache)}
    return rotating | chunked | {w for w in limits(probe(model).sees) if w}


class Reference:
    """A model with this window, and what mlx-lm computes with it for one sequence alone."""

    def __init__(self, name: str, window: int, kv_bits: KVBits = None) -> None:
        sizes = dict.fromkeys(WINDOW_FIELDS, window)
        self.kv_bits = kv_bits
        self.model = build(name, max_position_embeddings=1024, **sizes)
        self.name = name
        self.window = window
        assert limits_of(self.model) == {window}, f"{name} does not read its window"
        self.recurrent = probe(self.model).states.exist
        self._runs: dict[Key, tuple[list[int], Rows]] = {}

    def greedy(self, prompt: Tokens, num_tokens: int) -> list[int]:
        """The tokens that mlx-lm generates."""
        return self._run((tuple(prompt),), num_tokens)[0][:num_tokens] if num_tokens else []

    def logprobs(self, prompt: Tokens, tokens: Tokens) -> Rows:
        """``[len(tokens), vocab]``: mlx-lm's log-probabilities where `tokens` follow the prompt."""
        if self.greedy(prompt, len(tokens)) == list(tokens):
            return self._run((tuple(prompt),), len(tokens))[1][: len(tokens)]
        return self._run((tuple(prompt), tuple(tokens)), len(tokens))[1]

    def noisy_logprobs(self, prompt: Tokens, tokens: Tokens) -> Iterator[Rows]:
        """As `logprobs`, of runs in which mlx-lm quantizes K/V with rounding errors of its own."""
        for seed, noise in product(range(NOISY_RUNS), NOISE):
            yield self._run((tuple(prompt), tuple(tokens)), len(tokens), noise, seed)[1]

    def _run(
        self, key: Key, num_tokens: int, noise: float = 0.0, seed: int = 0
    ) -> tuple[list[int], Rows]:
        """A run of `generate_step`; the key is the prompt and, if they are given, the tokens."""
        known = None if noise else self._runs.get(key)
        if known is None or len(known[0]) < num_tokens:
            prompt, *given = key
            tokens = iter((*given[0], given[0][-1]) if given else ())

            def sampler(logprobs: mx.array) -> mx.array:
                return mx.array([next(tokens)]) if given else mx.argmax(logprobs, axis=-1)

            ids = mx.array(prompt)
            with quantized_mlx_lm(self.kv_bits, noise, seed):
                steps = generate_step(ids, self.model, max_tokens=num_tokens, sampler=sampler)
                pairs = [(int(token), np.array(logprobs)) for token, logprobs in steps]
            known = [token for token, _ in pairs], np.stack([row[:VOCAB] for _, row in pairs])
            if not noise:
                self._runs[key] = known
        return known
