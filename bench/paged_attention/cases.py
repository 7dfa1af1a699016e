"""Cases of attention over a pool, and the ways to compute each case."""

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np

from bench.flags.head_counts import HeadCounts
from bench.paged_attention.ggml import GgmlAttention
from mlx_paged import ops
from mlx_paged.attention.backend import Way
from mlx_paged.attention.causal import FULL
from mlx_paged.attention.forward import Chunk, LayerView
from mlx_paged.attention.paths import ANY_NUMBER
from mlx_paged.attention.sdpa_hook import Query, mlx_attention
from mlx_paged.kv.blocks import ceil_div
from mlx_paged.kv.pool import KVPool, as_int32
from mlx_paged.kv.shapes import KVShape

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
BEYOND_CACHE = 128 * 2**20
"""Bytes of K/V of all layers together. Layers take turns, so that no cache holds a layer's K/V."""

MAX_LAYERS = 32

KERNEL = Way(ANY_NUMBER, is_compiled=True, shares=False)

Contender = Callable[[int], Any]
"""Computes the attention of one layer; MLX's arrays are still to be evaluated."""


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences with `context` tokens each, of which the last `length` are computed."""

    heads: HeadCounts
    dtype: str
    length: int
    batch: int
    context: int
    block_size: int
    kv_bits: int | None = None

    @property
    def shape(self) -> KVShape:
        dims = self.heads.num_kv_heads, self.heads.head_dim, self.heads.head_dim
        return KVShape(*dims, DTYPES[self.dtype], kv_bits=self.kv_bits)

    @property
    def kv_bytes(self) -> int:
        """Live K and V of one layer, scales included."""
        return self.batch * self.context * self.shape.token_bytes

    @property
    def flops(self) -> int:
        """Multiplications and additions with the keys and values that the queries see."""
        seen = self.length * self.context - self.length * (self.length - 1) // 2
        return 4 * self.batch * self.heads.num_heads * self.heads.head_dim * seen

    @property
    def num_layers(self) -> int:
        """Layers that take turns: several for single tokens; one for a chunk, which reads its K/V
        many times."""
        if self.length > 1:
            return 1
        return min(MAX_LAYERS, ceil_div(BEYOND_CACHE, self.kv_bytes))

    @property
    def memory_bytes(self) -> int:
        """Estimate: pool, contiguous copies, float32 copies and scores of one call."""
        scores = 4 * self.batch * self.heads.num_heads * self.length * self.context
        plain = self.batch * self.context * replace(self.shape, kv_bits=None).token_bytes
        single = plain * 4 // DTYPES[self.dtype].size
        return 3 * self.num_layers * plain + 3 * single + 4 * scores

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"heads": str(self.heads)}

    def __str__(self) -> str:
        return (
            f"{self.heads!s:>9} {self.dtype:8} L {self.length:<3} B {self.batch:<2}"
            f" S {self.context:<5} block {self.block_size:<2}"
            + (f" kv-bits {self.kv_bits:<3}" if self.kv_bits else "")
        )


def decode_cases(args: argparse.Namespace) -> Iterator[Case]:
    """One token for each of a batch of sequences."""
    for h, dtype, context, batch, block_size, kv_bits in product(
        args.heads, args.dtypes, args.contexts, args.batches, args.block_sizes, args.kv_bits
    ):
        yield Case(h, dtype, 1, batch, context, block_size, kv_bits)


def chunk_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Chunks of one prompt: the first chunk, and later ones that end at these contexts."""
    block_size = min(args.block_sizes, key=lambda size: abs(size - 16))
    for h, dtype, length, kv_bits in product(
        args.heads, args.dtypes, args.chunk_lengths, args.kv_bits
    ):
        for context in sorted({length, *(c for c in args.chunk_contexts if c > length)}):
            yield Case(h, dtype, length, 1, context, block_size, kv_bits)


class Inputs:
    """The arrays of a case, in a pool whose blocks are in random order."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        heads, dtype = case.heads, DTYPES[case.dtype]
        columns = ceil_div(case.context, case.block_size)
        num_blocks = case.batch * columns
        shapes = {case.shape: None, replace(case.shape, kv_bits=None): None}
        pools = [KVPool([s] * case.num_layers, num_blocks, case.block_size) for s in shapes]
        self.pool, self.plain_pool = pools[0], pools[-1]
        self.scale = heads.head_dim**-0.5
        mx.random.seed(seed)
        tables = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
        self.tables = mx.array(tables.reshape(case.batch, columns))
        self.context_lens = as_int32([case.context] * case.batch)
        slots = as_int32(np.arange(num_blocks * case.block_size, dtype=np.int32))
        rows = (slots.size, heads.num_kv_heads, heads.head_dim)
        for layer in range(case.num_layers):
            k, v = _random(rows, dtype), _random(rows, dtype)
            for pool in pools:
                pool.write(layer, k, v, slots)
                mx.eval(pool.handles())
        self.q = mx.random.normal((case.batch, heads.num_heads, case.length, heads.head_dim))
        self.q = self.q.astype(dtype)
        self.contiguous = [
            [mx.contiguous(x) for x in self.gather(layer)] for layer in range(case.num_layers)
        ]
        mx.eval(self.q, self.tables, self.context_lens, self.contiguous)

    def gather(self, layer: int) -> tuple[mx.array, mx.array]:
        return self.pool.read(
            layer, lambda array: ops.gather_blocks(array, self.tables, self.case.context)
        )

    def contenders(self) -> dict[str, Contender]:
        """The paged op, the gather in front of MLX's attention, MLX's attention alone; beside a
        quantized pool, the paged op on the same K/V as it was."""
        mask = "causal" if self.case.length > 1 else None
        layers = [LayerView(self.pool, layer) for layer in range(self.case.num_layers)]
        query = Query(self.q, self.scale, FULL, None)
        start = self.case.context - self.case.length
        chunk = Chunk(0, start, self.case.length, self.tables[0])

        def paged(layer: int) -> mx.array:
            return layers[layer].through_tables(query, KERNEL, self.tables, self.context_lens)

        def gather(layer: int) -> mx.array:
            if self.case.length > 1:
                return layers[layer].gathered_chunk(query, chunk)
            return mlx_attention(self.q, *self.gather(layer), scale=self.scale)

        def contiguous(layer: int) -> mx.array:
            return mlx_attention(self.q, *self.contiguous[layer], scale=self.scale, mask=mask)

        ways: dict[str, Contender] = {"paged": paged}
        if self.case.kv_bits is not None:
            plain = [LayerView(self.plain_pool, layer) for layer in range(self.case.num_layers)]
            ways["plain"] = lambda layer: plain[layer].through_tables(
                query, KERNEL, self.tables, self.context_lens
            )
        return ways | {"gather": gather, "contiguous": contiguous}

    def ggml_contenders(self) -> dict[str, Contender]:
        """ggml's flash attention on contiguous K/V, as llama.cpp computes it."""
        layers = [GgmlAttention(self.q, k, v, self.scale) for k, v in self.contiguous]
        return {"ggml": lambda layer: layers[layer]()}

    def torch_contenders(self) -> dict[str, Contender]:
        """Torch's attention on contiguous K/V: as it is, and with the query heads of a KV head as
        rows of one matrix. Empty without torch."""
        if importlib.util.find_spec("torch") is None:
            return {}
        import torch
        from torch.nn.functional import scaled_dot_product_attention as attention

        case = self.case
        dtype = getattr(torch, case.dtype)

        def tensor(array: mx.array) -> Any:
            return torch.from_numpy(np.array(array.astype(mx.float32))).to(dtype)

        q = tensor(self.q)
        kv = [(tensor(k), tensor(v)) for k, v in self.contiguous]
        positions = torch.arange(case.context - case.length, case.context)
        mask = torch.arange(case.context)[None] <= positions[:, None]
        folded = q.reshape(case.batch, case.heads.num_kv_heads, -1, case.heads.head_dim)

        def contender(queries: Any, mask: Any, is_folded: bool) -> Contender:
            def attend(layer: int) -> Any:
                options = {"attn_mask": mask if case.length > 1 else None}
                with torch.inference_mode():
                    return attention(queries, *kv[layer], **options, enable_gqa=not is_folded)

            return attend

        return {
            "torch": contender(q, mask, False),
            "torch_folded": contender(folded, mask.repeat(case.heads.group, 1), True),
        }


def _random(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Normal numbers, the same million repeated: times do not depend on them."""
    size = int(np.prod(shape))
    some = mx.random.normal((min(size, 2**20),)).astype(dtype)
    return mx.tile(some, ceil_div(size, some.size))[:size].reshape(shape)
