"""What quantized K/V changes: the table of docs/kv-quantization.md.

    python -m scripts.kv_quantization --model DIR/float32            print the table
    python -m scripts.kv_quantization --model DIR/float32 --write    write it into the page

DIR is what `scripts.real_model` made; without a model the demo model is measured. The texts were
chosen before anything was measured. English: the topics of Python's language reference, as the
module `pydoc_data.topics` has them, in its order. Code: the standard library's `argparse.py`. Of
each the first 4,096 tokens, in one window, 64 at a time. Chats: 16 questions of
`scripts.batch_invariance`, answers of at most 160 greedy tokens.
"""

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from bench.command import print_result
from mlx_paged import Engine, SamplingParams
from mlx_paged.attention.sdpa_hook import attention_hook
from mlx_paged.cli import COUNT, Parser
from mlx_paged.drop_in.caches import make_prompt_cache as make_paged_prompt_cache
from mlx_paged.kv.shapes import KVShape
from mlx_paged.loading import load_model
from mlx_paged.ops.cpu_layers import CPULayers
from mlx_paged.ops.formats import FORMATS
from scripts.batch_invariance import prompts_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "kv-quantization.md"
BEGIN, END = "<!-- measured -->", "<!-- end -->"

NUM_TOKENS, CHUNK = 4096, 64
CHATS, ANSWER_TOKENS = 16, 160
TEXTS = "english", "code"
MLX_LM = ((8, 64), (8, 32), (6, 64), (6, 32), (4, 64), (4, 32))
"""Bits and groups of mlx-lm's caches. Groups wider than a head are left out."""

Limits = dict[str, dict[str, float]]
LIMITS: Limits = {
    "8": {"kld": 4e-4, "same": 0.98},
    "6": {"kld": 6e-3, "same": 0.95},
    "4": {"kld": 1.5e-2, "same": 0.92},
}
"""Of the real model on each text, about one and a half times what was measured. mlx-lm's 4 bits are
far beyond them."""

Kinds = dict[str, tuple[float, Callable[[], list[Any]]]]
"""By name: bits that an element takes, and what makes the caches of one text."""


class RoundedCache(KVCache):
    """Keys and values as mlx-lm's `QuantizedKVCache` gives them back where a model hands them over
    in 16 bits. Attention is computed in the model's type."""

    def __init__(self, bits: int, group_size: int) -> None:
        super().__init__()
        self._form: dict[str, Any] = {"bits": bits, "group_size": group_size}

    def _rounded(self, x: mx.array) -> mx.array:
        parts = mx.quantize(x.astype(mx.float16), **self._form)
        return mx.dequantize(*parts, **self._form).astype(x.dtype)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        found: tuple[mx.array, mx.array] = super().update_and_fetch(
            self._rounded(keys), self._rounded(values)
        )
        return found


class Text(NamedTuple):
    """Next-token log-probabilities over one text, beside those of unquantized K/V: means."""

    kld: float  # KL divergence from unquantized
    same: float  # share of positions with the same likeliest token
    perplexity: float  # its change, as a part


class Row(NamedTuple):
    """What one way to store K/V does."""

    bits: float
    english: Text
    code: Text
    equal: int  # chats whose answers are equal
    kept: float  # share of their tokens before the first that differs


def kinds_of(model: Any) -> Kinds:
    """The first one is unquantized."""
    count, dim = len(make_prompt_cache(model)), head_dim(model)
    kinds: Kinds = {"none": (16.0, lambda: [KVCache() for _ in range(count)])}
    for kv_bits in FORMATS:
        shape = KVShape(1, dim, dim, mx.float16, kv_bits=kv_bits)
        make = partial(make_paged_prompt_cache, model, kv_bits=kv_bits)
        kinds[str(kv_bits)] = (8 * shape.token_bytes / (2 * dim), make)
    for bits, group in MLX_LM:
        if group <= dim:
            make = partial(rounded_caches, count, bits, group)
            kinds[f"mlx-lm, {bits} bits, groups of {group}"] = (bits + 32 / group, make)
    return kinds


def rounded_caches(count: int, bits: int, group_size: int) -> list[Any]:
    return [RoundedCache(bits, group_size) for _ in range(count)]


def head_dim(model: Any) -> int:
    args = model.args
    return int(getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads)


def compared(model: Any, kinds: Kinds, tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """By name ``[3, T - 1]``: for each token but the last the KL divergence from the first kind,
    the likeliest next token, and the negative log-probability of the next one of the text."""
    caches = {name: make() for name, (_, make) in kinds.items()}
    found: dict[str, list[np.ndarray]] = {name: [] for name in kinds}
    inputs = mx.array([*tokens])
    with attention_hook(), CPULayers(model).diverted():
        for start in range(0, len(tokens) - 1, CHUNK):
            stop = min(start + CHUNK, len(tokens) - 1)
            targets = np.array(tokens[start + 1 : stop + 1])[:, None]
            exact: np.ndarray | None = None
            for name, cache in caches.items():
                logits = model(inputs[None, start:stop], cache=cache)[0].astype(mx.float32)
                row = np.array(logits).astype(np.float64)
                row -= row.max(-1, keepdims=True)
                row -= np.log(np.exp(row).sum(-1, keepdims=True))
                if exact is None:
                    exact = row
                    weights = np.exp(exact)
                kld = (weights * (exact - row)).sum(-1)
                loss = -np.take_along_axis(row, targets, -1)[:, 0]
                found[name].append(np.stack([kld, row.argmax(-1), loss]))
    return {name: np.concatenate(parts, -1) for name, parts in found.items()}


def of_text(model: Any, kinds: Kinds, tokens: Sequence[int]) -> dict[str, Text]:
    rows = compared(model, kinds, tokens)
    _, top, loss = rows["none"]
    return {
        name: Text(
            float(row[0].mean()),
            float((row[1] == top).mean()),
            float(np.exp((row[2] - loss).mean()) - 1),
        )
        for name, row in rows.items()
    }


def of_chats(
    model: Any, kinds: Kinds, prompts: Sequence[list[int]], answers: Sequence[Sequence[int]]
) -> dict[str, tuple[int, float]]:
    """How many greedy answers are equal to the given ones, and the share of tokens before a
    difference. One pass over a given answer tells, because K/V does not depend on the chunks:
    greedy decoding gives the same tokens up to the first that is not the likeliest."""
    equal, kept = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = [*prompt, *answer]
        for name, rows in compared(model, kinds, tokens).items():
            wrong = np.flatnonzero(rows[1, len(prompt) - 1 :] != answer)
            before = int(wrong[0]) if len(wrong) else len(answer)
            equal[name] += before == len(answer)
            kept[name] += before
    total = sum(map(len, answers))
    return {name: (equal[name], kept[name] / total) for name in kinds}


def sources() -> dict[str, str]:
    """The texts by name."""
    code = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()
    return dict(zip(TEXTS, ("\n".join(topics.values()), code), strict=True))


def text_tokens(tokenizer: Any, text: str, count: int) -> list[int]:
    """The first tokens of a text, and one more."""
    part = text[: 16 * count]  # enough characters for these tokens in any language model
    tokens: list[int] = tokenizer.encode(part, add_special_tokens=False)[: count + 1]
    assert len(tokens) == count + 1
    return tokens


def measure(
    model: Any, tokenizer: Any, num_tokens: int = NUM_TOKENS, chats: int = CHATS
) -> dict[str, Row]:
    """By name of the way to store K/V."""
    kinds = kinds_of(model)
    texts = {
        name: of_text(model, kinds, text_tokens(tokenizer, text, num_tokens))
        for name, text in sources().items()
    }
    prompts = prompts_of(tokenizer, chats)
    params = SamplingParams(max_tokens=ANSWER_TOKENS)
    engine = Engine(model, tokenizer, kv_memory=1 << 29, max_running=chats, compile=False)
    answers = [completion.tokens for completion in engine.generate(prompts, params)]
    told = of_chats(model, kinds, prompts, answers)
    return {
        name: Row(bits, texts["english"][name], texts["code"][name], *told[name])
        for name, (bits, _) in kinds.items()
    }


def exceeded(texts: dict[str, dict[str, Text]], limits: Limits = LIMITS) -> list[str]:
    """What is beyond its limit; `texts` are rows by the name of the text and of the kind."""
    wrong = []
    for name, limit in limits.items():
        for text, rows in texts.items():
            kld, same, _ = rows[name]
            if kld > limit["kld"]:
                wrong.append(f"{name}, {text}: KLD is {kld:.4g}, the limit {limit['kld']}")
            if same < limit["same"]:
                wrong.append(f"{name}, {text}: same top-1 is {same}, the limit {limit['same']}")
    return wrong


def table(rows: dict[str, Row]) -> list[str]:
    titles = "KLD", "same top-1", "perplexity"
    head = [
        "kv_bits",
        "bits an element",
        *(f"{x}: {y}" for x in ("English", "code") for y in titles),
    ]
    head += ["equal answers", "tokens before a difference"]
    lines = [head, ["---"] * len(head)]
    for name, row in rows.items():
        texts = [
            cell
            for text in (row.english, row.code)
            for cell in (f"{text.kld:.1e}", f"{text.same:.2%}", f"{text.perplexity:+.2%}")
        ]
        lines.append([name, f"{row.bits:.4g}", *texts, str(row.equal), f"{row.kept:.0%}"])
    return [f"| {' | '.join(line)} |" for line in lines]


def origin() -> str:
    """Which texts these are."""
    sums = {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in sources().items()}
    named = ", ".join(f"{name} {digest}" for name, digest in sums.items())
    return f"Texts of Python {platform.python_version()} (SHA-256: {named})."


def with_table(page: str, lines: Sequence[str]) -> str:
    """The page with these lines between the marks."""
    begin = page.index(BEGIN) + len(BEGIN)
    return page[:begin] + "\n" + "\n".join(lines) + "\n" + page[page.index(END, begin) :]


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="scripts.kv_quantization", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="a directory (default: the demo model)")
    parser.add_argument("--tokens", type=COUNT, default=NUM_TOKENS, help="of each text")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    args = parser.parse_args(argv)
    model, tokenizer = load_model(args.model)
    rows = measure(model, tokenizer, args.tokens)
    lines = [*table(rows), "", origin()]
    print("\n".join(lines))
    if args.write:
        PAGE.write_text(with_table(PAGE.read_text(), lines))
    wrong = exceeded({name: {k: getattr(row, name) for k, row in rows.items()} for name in TEXTS})
    print("\n".join(wrong) or "Nothing exceeds its limit.")
    print_result("kv_quantization", {name: row._asdict() for name, row in rows.items()})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
