"""What quantized K/V changes: the page docs/kv-quantization.md, and the limits that CI checks.

    python -m scripts.kv_quantization            print the tables
    python -m scripts.kv_quantization --write    write them into the page

The text is chosen before anything is measured: the held-out files of scripts.train_demo with its
own seed, encoded by the demo model's tokenizer, the first 6,144 tokens. That rule says nothing of
windows: the page shows windows of 256 tokens, as in training, and of 2,048, the model's context.
"""

import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from mlx_paged import ops
from mlx_paged.attention.sdpa_hook import attention_hook
from mlx_paged.cli import Parser, demo_model_path, load_model
from mlx_paged.drop_in.caches import make_prompt_cache as make_paged_prompt_cache
from mlx_paged.kv.pool import KVPool, as_int32
from mlx_paged.kv.shapes import KVShape
from mlx_paged.ops.formats import FORMATS, KVBits
from scripts.train_demo import END_OF_TEXT, read_sources, split_corpus

PAGE = Path(__file__).resolve().parents[1] / "docs" / "kv-quantization.md"
BEGIN, END = "<!-- {} -->", "<!-- end -->"

NUM_TOKENS, MAX_CHARS = 6144, 2000
WINDOWS = 256, 2048
HEADS, GROUP, DIM, NUM_KEYS = 8, 4, 128, 1024
OUTLIERS, OUTLIER_SIZE, MEAN_SIZE = 4, 20.0, 3.0
"""Channels of a head with a mean of this size; other numbers have a deviation of 1. The means of
the value channels have the last deviation."""

LIMITS = {
    "8": {"mean_kld": 1e-4, "same_top_1": 0.995, "softmax_kl": 0.004, "output": 0.01},
    "8,4": {"mean_kld": 2e-3, "same_top_1": 0.97, "softmax_kl": 0.004, "output": 0.08},
}


class TextRow(NamedTuple):
    """Log-probabilities with quantized K/V beside those without."""

    perplexity: float
    change: float  # of the perplexity, as a part
    mean_kld: float
    same_top_1: float


class PlantedRow(NamedTuple):
    """Attention over keys with outlier channels."""

    softmax_kl: float
    output: float  # relative error of the output, norm by norm
    zero_mean_output: float  # the same where no value channel has a mean


def held_out_tokens(tokenizer: Any) -> np.ndarray:
    sources = read_sources(Path(sysconfig.get_path("stdlib")))
    _, held_out = split_corpus(sources, MAX_CHARS, np.random.default_rng(0))
    tokens: list[int] = []
    for document in held_out:
        tokens += tokenizer.encode(document + END_OF_TEXT, add_special_tokens=False)
        if len(tokens) > NUM_TOKENS:
            break
    return np.array(tokens[: NUM_TOKENS + 1], np.int32)


def text_caches(model: Any) -> dict[str, Callable[[], list[Any]]]:
    """By name: caches for one window. mlx-lm's groups cannot be wider than a head of 32."""

    def affine(bits: int) -> list[Any]:
        return [QuantizedKVCache(group_size=32, bits=bits) for _ in make_prompt_cache(model)]

    kinds: dict[str, Callable[[], list[Any]]] = {
        "none": lambda: [KVCache() for _ in make_prompt_cache(model)]
    }
    bits: tuple[KVBits, ...] = (8, "8,4")
    for kv_bits in bits:
        kinds[str(kv_bits)] = partial(make_paged_prompt_cache, model, kv_bits=kv_bits)
    return kinds | {
        "mlx-lm, 8 bits": lambda: affine(8),
        "mlx-lm, 4 bits": lambda: affine(4),
    }


def text_rows(window: int) -> dict[str, TextRow]:
    """The demo model over the held-out text, `window` tokens at a time."""
    model, tokenizer = load_model(str(demo_model_path()))
    tokens = held_out_tokens(tokenizer)
    assert len(tokens) == NUM_TOKENS + 1
    kinds = text_caches(model)
    found: dict[str, list[np.ndarray]] = {name: [] for name in kinds}
    for start in range(0, NUM_TOKENS, window):
        inputs = mx.array(tokens[start : start + window])[None]
        for name, caches in kinds.items():
            with attention_hook():
                logits = model(inputs, cache=caches())[0].astype(mx.float32)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            found[name].append(np.array(logprobs).astype(np.float64))
    rows = {name: np.concatenate(parts) for name, parts in found.items()}
    exact, targets = rows["none"], tokens[1:]
    perplexities = {
        name: float(np.exp(-row[np.arange(NUM_TOKENS), targets].mean()))
        for name, row in rows.items()
    }
    return {
        name: TextRow(
            perplexities[name],
            perplexities[name] / perplexities["none"] - 1,
            float((np.exp(exact) * (exact - row)).sum(axis=-1).mean()),
            float((row.argmax(axis=-1) == exact.argmax(axis=-1)).mean()),
        )
        for name, row in rows.items()
    }


def rotated(rows: np.ndarray, first: int) -> mx.array:
    """Rows ``[T, heads, D]`` under RoPE at the positions from `first` on."""
    x = mx.array(rows.astype(np.float32)).transpose(1, 0, 2)
    options: dict[str, Any] = {"traditional": False, "base": 10000.0, "scale": 1.0}
    return mx.fast.rope(x[None], DIM, offset=first, **options)[0].transpose(1, 0, 2)


def planted(rng: np.random.Generator, mean_size: float) -> tuple[mx.array, mx.array, mx.array]:
    """Queries ``[1, H, 1, D]`` at the last position, keys and values ``[T, H_kv, D]``."""
    keys = rng.standard_normal((NUM_KEYS, HEADS, DIM))
    for head in range(HEADS):
        channels = rng.choice(DIM, OUTLIERS, replace=False)
        keys[:, head, channels] += OUTLIER_SIZE * rng.choice((-1, 1), OUTLIERS)
    means = mean_size * rng.standard_normal((HEADS, DIM))
    values = rng.standard_normal((NUM_KEYS, HEADS, DIM)) + means
    queries = rng.standard_normal((1, HEADS * GROUP, DIM))
    q, k = rotated(queries, NUM_KEYS - 1), rotated(keys, 0)
    return q[:, :, None], k, mx.array(values.astype(np.float32))


def attended(q: mx.array, k: mx.array, v: mx.array, kv_bits: Any) -> tuple[np.ndarray, ...]:
    """Output and softmax weights of the paged op, in float64."""
    pool = KVPool([KVShape(HEADS, DIM, DIM, mx.float32, kv_bits=kv_bits)], NUM_KEYS // 16, 16)
    pool.write(0, k, v, as_int32(np.arange(NUM_KEYS, dtype=np.int32)))
    scales: dict[str, Any] = dict(pool.scales)
    tables = as_int32(np.arange(NUM_KEYS // 16, dtype=np.int32))[None]
    out, weights = ops.paged_attention(
        q, pool.k, pool.v, tables, as_int32([NUM_KEYS]), return_attn=True, **scales
    )
    return np.array(out).astype(np.float64), np.array(weights).astype(np.float64)


def affine(x: mx.array, bits: int) -> mx.array:
    """Rows as mlx-lm's quantized cache gives them back."""
    return mx.dequantize(*mx.quantize(x, group_size=64, bits=bits), group_size=64, bits=bits)


def planted_rows() -> dict[str, PlantedRow]:
    found: dict[str, list[float]] = {}
    for mean_size in (MEAN_SIZE, 0.0):
        q, k, v = planted(np.random.default_rng(0), mean_size)
        out, weights = attended(q, k, v, None)
        ways = {str(kv_bits): attended(q, k, v, kv_bits) for kv_bits in FORMATS}
        for bits in (8, 4):
            ways[f"mlx-lm, {bits} bits"] = attended(q, affine(k, bits), affine(v, bits), None)
        for name, (own, own_weights) in ways.items():
            kl = weights * np.log(weights / np.maximum(own_weights, 1e-300))
            error = np.linalg.norm(own - out, axis=-1) / np.linalg.norm(out, axis=-1)
            found.setdefault(name, []).extend([kl.sum(axis=-1).mean(), error.mean()])
    return {name: PlantedRow(row[0], row[1], row[3]) for name, row in found.items()}


def exceeded(texts: dict[str, TextRow], rows: dict[str, PlantedRow]) -> list[str]:
    """What is beyond its limit."""
    wrong = []
    for name, limits in LIMITS.items():
        measured = texts[name]._asdict() | rows[name]._asdict()
        for measure, limit in limits.items():
            value = measured[measure]
            is_wrong = value < limit if measure == "same_top_1" else value > limit
            if is_wrong:
                wrong.append(f"{name}: {measure} is {value:.4g}, the limit {limit}")
    return wrong


def text_table(rows: dict[str, TextRow]) -> Iterator[str]:
    yield "| kv_bits | perplexity | change | mean KL divergence | same top-1 |"
    yield "|---|---|---|---|---|"
    for name, row in rows.items():
        yield (
            f"| {name} | {row.perplexity:.3f} | {row.change:+.3%} | {row.mean_kld:.2g} |"
            f" {row.same_top_1:.2%} |"
        )


def planted_table(rows: dict[str, PlantedRow]) -> Iterator[str]:
    yield "| kv_bits | KL of the softmax | error of the output | the same, values without a mean |"
    yield "|---|---|---|---|"
    for name, row in rows.items():
        yield (f"| {name} | {row.softmax_kl:.2g} | {row.output:.2%} | {row.zero_mean_output:.2%} |")


def with_table(page: str, name: str, lines: list[str]) -> str:
    """The page with these lines between the marks of a table."""
    begin = page.index(BEGIN.format(name)) + len(BEGIN.format(name))
    return page[:begin] + "\n" + "\n".join(lines) + "\n" + page[page.index(END, begin) :]


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="scripts.kv_quantization", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE.name}")
    args = parser.parse_args(argv)
    texts, rows = {window: text_rows(window) for window in WINDOWS}, planted_rows()
    tables = {str(window): [*text_table(rows)] for window, rows in texts.items()}
    tables["planted"] = [*planted_table(rows)]
    for lines in tables.values():
        print("\n".join(lines), end="\n\n")
    if args.write:
        page = PAGE.read_text()
        for name, lines in tables.items():
            page = with_table(page, name, lines)
        PAGE.write_text(page)
    wrong = exceeded(texts[WINDOWS[-1]], rows)
    print("\n".join(wrong) or "Nothing exceeds its limit.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
