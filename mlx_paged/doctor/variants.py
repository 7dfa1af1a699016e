"""The variants of the kernels, and random calls of each."""

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged import ops
from mlx_paged.doctor.float64 import Array
from mlx_paged.kv.shapes import KVShape
from mlx_paged.ops.formats import quantized

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
QUANTIZED = {"kv8": 8, "kv6": 6, "kv4": 4}
"""In place of a dtype: kv_bits of a float16 model."""

COMMON_QUANTIZED = "bfloat16-kv8"
"""kv_bits 8 of a bfloat16 model, which only the common variants have."""

COMMON = (
    ("float32", "d32", 2),
    ("bfloat16", "d64", 4),
    ("bfloat16", "d128", 4),
    (COMMON_QUANTIZED, "d128", 4),
)
"""Dtype, heads and group of the demo model and of common ones."""

BLOCK_SIZES = (8, 16, 32)
GROUPS = (1, 2, 4, 8)  # query heads that share a KV head
TOKENS = (1, 5)  # query tokens of each sequence: a decode and a chunk
HEADS = {f"d{dim}": (dim, dim) for dim in (20, 32, 64, 80, 96, 128, 192, 256)}
HEADS |= {"d192v128": (192, 128), "latent576": (576, 512)}
"""By name: dimensions of keys and of values. Latent values are columns of the keys."""

CONTEXTS = (1, 70, 33)
LONG_CONTEXTS = (700, 3, 290)
"""Context lengths; the Metal kernels split long ones and merge the parts."""

CROWDS = {"crowd": 22, "long-crowd": 4}
"""Options in which the sequences come so many times: calls of 64 threadgroups or more have kernels
of their own."""

SHARED = "long-shared"
"""The option of a variant whose two longest sequences begin with the same blocks."""
PREFIX_KEYS = 256
"""The number of keys in these blocks."""

SPOILED = "nan", "long-nan"
"""Options with a NaN in the last key of the longest sequence, and an infinity in the first value of
the last sequence. One sink is NaN, unless the pool is quantized."""

FAINT = (2.0**-12, 0.0), (2.0**-13, 0.0012)
"""Factors and offsets of some keys and values in quantized pools. The scales of these rows are
denormal in float16: a GPU could take them for zeros."""

QUICK_STEP = 37
"""A quick check takes every so many-th variant. No number of values above is a multiple of it."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to call an op: "attention", "write" or "copy"."""

    op: str
    dtype: str
    heads: str
    block_size: int
    group: int = 1
    tokens: int = 1
    option: str = "plain"
    is_simplest: bool = False  # the form of the kernels that a GPU gets after a refusal

    @property
    def name(self) -> str:
        name = f"{self.op}-{self.dtype}-{self.heads}-block{self.block_size}"
        if self.is_simplest:
            name = f"simplest-{name}"
        if self.op != "attention":
            return name
        return f"{name}-group{self.group}-tokens{self.tokens}-{self.option}"

    @property
    def kind(self) -> str:
        if self.is_simplest:
            return "simplest"
        if self.op != "attention":
            return self.op if self.kv_bits is None else f"quantized-{self.op}"
        if self.option.startswith("long"):
            return "split"
        return "chunk" if self.tokens > 1 else "decode"

    @property
    def shape(self) -> KVShape:
        latent = self.heads.startswith("latent")
        heads = 1 if latent else 2
        return KVShape(heads, *HEADS[self.heads], self.model_dtype, latent, self.kv_bits)

    @property
    def kv_bits(self) -> int | None:
        return 8 if self.dtype == COMMON_QUANTIZED else QUANTIZED.get(self.dtype)

    @property
    def model_dtype(self) -> mx.Dtype:
        return DTYPES.get(self.dtype.removesuffix("-kv8"), mx.float16)

    @property
    def q_dtype(self) -> mx.Dtype:
        return mx.float32 if self.option == "float32-queries" else self.model_dtype

    def rng(self) -> np.random.Generator:
        """A source of random numbers, which are the same in every run."""
        return np.random.default_rng(zlib.crc32(self.name.encode()))


def all_variants() -> list[Variant]:
    """Attention without options in every combination of the other properties; each option with each
    dtype, head dimension and number of tokens; writes and copies. Then the simplest forms of all
    kernels, with each dtype and head dimension. Latents are not quantized, and fewer than 8 bits
    need multiples of 8 dimensions."""
    kept = [heads for heads in HEADS if not heads.startswith("latent")]
    pools = [*product(DTYPES, HEADS), *product(QUANTIZED, kept)]
    for narrow in ("kv6", "kv4"):
        pools.remove((narrow, "d20"))
    found = [
        Variant("attention", dtype, heads, block_size, group, tokens)
        for (dtype, heads), block_size, group, tokens in product(pools, BLOCK_SIZES, GROUPS, TOKENS)
    ]
    with_options = product(pools, TOKENS, [*OPTIONS][1:])
    for i, ((dtype, heads), tokens, option) in enumerate(with_options):
        block_size, group = BLOCK_SIZES[i % 3], GROUPS[i % 4]
        found.append(Variant("attention", dtype, heads, block_size, group, tokens, option))
    for op, (dtype, heads), block_size in product(("write", "copy"), pools, BLOCK_SIZES):
        found.append(Variant(op, dtype, heads, block_size))
    for i, (dtype, heads) in enumerate(pools):
        simplest = [Variant(op, dtype, heads, BLOCK_SIZES[i % 3]) for op in ("write", "copy")]
        for tokens, option in ((1, "long"), (5, "many")):
            group = GROUPS[i % 4]
            size = BLOCK_SIZES[i % 3]
            simplest.append(Variant("attention", dtype, heads, size, group, tokens, option))
        found += [replace(each, is_simplest=True) for each in simplest]
    return found


def common_variants() -> list[Variant]:
    """What most models need: decodes, chunks, long contexts, writes and copies of the
    demo model, and of bfloat16 models with four query heads for each KV head."""
    found = []
    for dtype, heads, group in COMMON:
        for tokens, option in ((1, "plain"), (5, "plain"), (1, "long")):
            found.append(Variant("attention", dtype, heads, 16, group, tokens, option))
        found += [Variant(op, dtype, heads, 16) for op in ("write", "copy")]
    return found


def attention_call(variant: Variant) -> tuple[list[mx.array], dict[str, Any]]:
    """Random arguments of ``paged_attention``, on one layer's caches: five arrays, and the options.
    Tables name blocks in random order. NaN fills every slot that no sequence has."""
    rng, shape, block_size = variant.rng(), variant.shape, variant.block_size
    contexts = np.array(LONG_CONTEXTS if variant.option.startswith("long") else CONTEXTS, np.int32)
    contexts = np.tile(contexts, CROWDS.get(variant.option, 1))
    columns = -(-int(contexts.max()) // block_size)
    num_blocks = len(contexts) * columns
    tables = rng.permutation(num_blocks).reshape(len(contexts), columns).astype(np.int32)
    if variant.option == SHARED:
        tables[2, : PREFIX_KEYS // block_size] = tables[0, : PREFIX_KEYS // block_size]
    used = np.zeros((num_blocks, 1, block_size, 1), np.bool_)
    for table, context in zip(tables, contexts, strict=True):
        blocks, offsets = np.divmod(np.arange(context), block_size)
        used[table[blocks], 0, offsets] = True

    last, longest = len(contexts) - 1, int(contexts.argmax())
    is_spoiled = variant.option in SPOILED

    def cache(
        dim: int, sequence: int, faint: tuple[float, float], spoiled: int, value: float
    ) -> mx.array:
        numbers = normal(rng, num_blocks, shape.n_kv_heads, block_size, dim)
        if shape.kv_bits is not None:
            numbers[tables[sequence]] = numbers[tables[sequence]] * faint[0] + faint[1]
        if is_spoiled:
            key = int(contexts[spoiled]) - 1 if np.isnan(value) else 0
            numbers[tables[spoiled, key // block_size], :, key % block_size, dim - 1] = value
        poisoned = mx.array(np.where(used, numbers, np.float32(np.nan)))
        return poisoned.astype(shape.dtype).transpose(1, 0, 2, 3)  # a pool's order in memory

    k = cache(shape.head_dim, last, FAINT[0], longest, np.nan)
    v = k[..., : shape.v_head_dim]
    v = v if shape.latent else cache(shape.v_head_dim, longest, FAINT[1], last, np.inf)
    heads = shape.n_kv_heads * variant.group
    sizes = len(contexts), heads, variant.tokens, columns * block_size
    queries = normal(rng, *sizes[:3], shape.head_dim)
    queries[-1] /= 1 if shape.kv_bits is None else FAINT[0][0]  # scores as those of others
    q = mx.array(queries).astype(variant.q_dtype)
    options = OPTIONS[variant.option](rng, sizes, shape)
    options = {n: mx.array(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    if shape.kv_bits is not None:
        with mx.stream(mx.cpu):
            (k, of_k), (v, of_v) = map(quantized, (k, v), shape.formats)
        options |= {"k_scales": of_k, "v_scales": of_v}
    arrays = [q, k, v, mx.array(tables), mx.array(contexts)]
    mx.eval(arrays, options)
    return arrays, options


def form_of(variant: Variant) -> AbstractContextManager[None]:
    """The context in which the calls of a variant are planned."""
    return ops.in_simplest_forms() if variant.is_simplest else nullcontext()


def launches_of(variant: Variant) -> list[dict[str, Any]]:
    """What a GPU gets for a variant: kernels, pipelines, sources."""
    with form_of(variant):
        return _launches_of(variant)


def _launches_of(variant: Variant) -> list[dict[str, Any]]:
    metal = ops.metal
    if variant.op == "attention":
        arrays, options = attention_call(variant)
        plan = metal.plan_attention(*arrays, scale=1.0, **options)
    else:
        shape, size = variant.shape, variant.block_size
        dims, heads = shape.row_dims, shape.n_kv_heads
        formats = list(zip(shape.formats, dims, strict=True))
        caches = [
            mx.zeros((heads, 2, size, form.columns(dim)), form.dtype) for form, dim in formats
        ]
        rows = [mx.zeros((1, heads, dim), shape.dtype) for dim in dims]
        scales = {
            name: mx.zeros((heads, 2, size, form.scale_columns(dim)), mx.float16)
            for name, (form, dim) in zip(("k_scales", "v_scales"), formats, strict=True)
            if form.has_scales
        }
        if variant.op == "write":
            plan = metal.plan_write_kv(*rows, *caches, mx.zeros((1,), mx.int32), **scales)
        else:
            plan = metal.plan_copy_blocks(*caches, mx.zeros((1, 2), mx.int32))
    return list(plan["launches"])


def normal(rng: np.random.Generator, *sizes: int) -> Array:
    """Random numbers, float32. None is subnormal in float16: a GPU could take it for zero."""
    numbers = rng.standard_normal(sizes, np.float32)
    return np.copysign(np.maximum(abs(numbers), np.finfo(np.float16).smallest_normal), numbers)


Sizes = tuple[int, int, int, int]
"""Sequences, query heads, tokens of each sequence, keys that a table has room for."""

Option = Callable[[np.random.Generator, Sizes, KVShape], dict[str, Any]]


def _bool_mask(rng: np.random.Generator, sizes: Sizes, shape: KVShape) -> dict[str, Any]:
    """True for 7 keys in 10, and for no key that the first query of the last sequence sees."""
    mask = rng.random(sizes) < 0.7
    mask[-1, :, 0] = False
    return {"attn_mask": mask}


def _float_mask(rng: np.random.Generator, sizes: Sizes, shape: KVShape) -> dict[str, Any]:
    seen = _bool_mask(rng, sizes, shape)["attn_mask"]
    return {"attn_mask": np.where(seen, normal(rng, *sizes), np.float32(-np.inf))}


def _rope(share: int) -> Option:
    """Rotate the first 1/`share` of the dimensions by angles as large as positions are."""

    def options(rng: np.random.Generator, sizes: Sizes, shape: KVShape) -> dict[str, Any]:
        angles = rng.uniform(0, 5000, (sizes[0], sizes[2], shape.head_dim // 2 // share))
        return {"rope_freqs": angles.astype(np.float32)}

    return options


def _many(rng: np.random.Generator, sizes: Sizes, shape: KVShape) -> dict[str, Any]:
    names = ("window", "sinks", "softcap", "alibi", "float-mask", "partial-rope", "mapping")
    together: dict[str, Any] = {}
    for name in names:
        together |= OPTIONS[name](rng, sizes, shape)
    return together


def _nan_sink(rng: np.random.Generator, sizes: Sizes, shape: KVShape) -> dict[str, Any]:
    sinks = normal(rng, sizes[1])
    if len(sinks) > 1 and shape.kv_bits is None:  # of one head no result would be a number
        sinks[0] = np.nan
    return {"sinks": sinks}


OPTIONS: dict[str, Option] = {
    "plain": lambda rng, sizes, shape: {},
    "long": lambda rng, sizes, shape: {},
    "long-window": lambda rng, sizes, shape: {"window": 300},
    "long-many": lambda rng, sizes, shape: _many(rng, sizes, shape),
    "long-sinks": lambda rng, sizes, shape: {"sinks": normal(rng, sizes[1])},
    SHARED: lambda rng, sizes, shape: {
        "shared_prefixes": np.array([[1, 0, 2], [0, 0, PREFIX_KEYS]], np.int32)
    },
    "float32-queries": lambda rng, sizes, shape: {},
    "weights": lambda rng, sizes, shape: {"return_attn": True},
    "not-causal": lambda rng, sizes, shape: {"causal": False},
    "window": lambda rng, sizes, shape: {"window": 21},
    "sinks": lambda rng, sizes, shape: {"sinks": normal(rng, sizes[1])},
    "softcap": lambda rng, sizes, shape: {"softcap": 0.7},
    "alibi": lambda rng, sizes, shape: {"alibi_slopes": abs(normal(rng, sizes[1])) / 3},
    "bool-mask": _bool_mask,
    "float-mask": _float_mask,
    "rope": _rope(share=1),
    "partial-rope": _rope(share=4),
    "mapping": lambda rng, sizes, shape: {
        "kv_head_mapping": rng.integers(0, shape.n_kv_heads, sizes[1]).astype(np.int32)
    },
    "many": _many,
    **dict.fromkeys(CROWDS, lambda rng, sizes, shape: {}),
    SPOILED[0]: _nan_sink,
    SPOILED[1]: _nan_sink,
}
"""By name: arguments of ``paged_attention``. "long" has long contexts."""
