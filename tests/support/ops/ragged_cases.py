"""Random cases of sequences with different numbers of tokens."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from tests.support.ops.numpy_reference import paged_attention_numpy
from tests.support.ops.paged_cases import as_numpy, latent_case, random_case

LENGTHS = {
    "one_decode": [1],
    "decodes": [1, 1, 1],
    "a_chunk": [9],
    "mixed": [1, 1, 5, 0, 70],
    "no_tokens": [0, 0],
    "empty_first": [0, 3, 1, 16],
    "all_new": [7, 30],
}
"""Tokens of each sequence."""


@dataclass
class Ragged:
    """Arguments of one call on one layer's pool."""

    q: mx.array
    pool: tuple[mx.array, mx.array]
    tables: mx.array
    lens: mx.array
    cu_seqlens: mx.array
    options: dict[str, Any]

    def attend(self, **overrides: Any) -> mx.array:
        arrays = self.q, *([cache] for cache in self.pool), self.tables, self.lens
        return ops.paged_attention_varlen(*arrays, self.cu_seqlens, **self.options, **overrides)

    def expected(self) -> np.ndarray:
        """In float64: each sequence alone."""
        options = {"scale": self.q.shape[-1] ** -0.5} | {
            name: as_numpy(value) if isinstance(value, mx.array) else value
            for name, value in self.options.items()
        }
        q, k, v, tables, lens, begins = (
            as_numpy(a) for a in (self.q, *self.pool, self.tables, self.lens, self.cu_seqlens)
        )
        rows = [np.zeros((0, q.shape[1], v.shape[3]))]
        for s, (begin, end) in enumerate(pairwise(begins)):
            own = q[begin:end].transpose(1, 0, 2)[None]
            out = paged_attention_numpy(own, k, v, tables[s : s + 1], lens[s : s + 1], **options)
            rows.append(out[0].transpose(1, 0, 2))
        return np.concatenate(rows)


def ragged_case(lengths, *, befores=(40, 3, 0, 11, 64), options=(), latent=None, **sizes) -> Ragged:
    """Sequences with so many tokens, after `befores` ones that are stored; what is not theirs is
    NaN, in the pool as well as in the tables."""
    contexts = [before + n for before, n in zip(befores, lengths, strict=False)]
    if latent:
        case = latent_case(contexts, *latent, **sizes, options=options)
    else:
        case = random_case(contexts, **sizes, options=options)
    rng = np.random.default_rng(len(lengths))
    shape = sum(lengths), case.q.shape[1], case.q.shape[3]
    q = mx.array(rng.standard_normal(shape)).astype(case.q.dtype)
    begins = mx.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    pool = case.k_cache, case.v_cache
    return Ragged(q, pool, case.block_tables, case.context_lens, begins, case.options)
