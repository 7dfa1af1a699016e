"""Train the demo model: a Qwen3 of one million parameters that writes text shaped like Python.

The corpus is the source of the Python standard library on the machine that runs this script. The
architecture is mlx-lm's own, so that the checkpoint loads like any other; this script knows
nothing about paging or serving.

    python -m scripts.train_demo --out mlx_paged/demo_model
"""

import argparse
import ast
import json
import math
import platform
import re
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
LOG_EVERY = 200
NEAR_TIE = 1e-4
"""Logits this close may change places where a kernel sums in another order."""

EXCLUDED = {"dist-packages", "encodings", "idlelib", "lib2to3", "site-packages", "test", "tests"}
"""Folders of installed packages, tests and tables."""

NOTICE = re.compile(r"copyright\s+(\(c\)|[0-9]{4}|by\b)|licen[sc]ed\b|SPDX-", re.IGNORECASE)

PROMPTS = (
    "def read_file(path):",
    "class Stack:",
    "def __init__(self, name, value=None):",
    "class Request(object):",
    "def main():",
    "def parse_header(line):",
    "def get_value(self, key, default=None):",
    "def format_time(seconds):",
    "async def connect(host, port):",
    "def close(self):",
    "@property\ndef name(self):",
    "def split_lines(text, keepends=False):",
    "class Config(dict):",
)
"""Prompts whose greedy continuations are shown and whose closest calls are reported."""


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of the model; a small corpus may yield fewer than `vocab_size` tokens."""

    vocab_size: int = 1792
    hidden_size: int = 128
    intermediate_size: int = 320
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32


def carries_foreign_notice(source: str) -> bool:
    """Whether a file states a copyright or licence of anyone but the Python Software Foundation."""
    return any(
        NOTICE.search(line) and "Python Software Foundation" not in line
        for line in source.splitlines()
    )


def read_sources(root: Path) -> list[str]:
    """The texts of the modules under `root` that the licence of the library covers, by path."""
    paths = [p for p in root.rglob("*.py") if EXCLUDED.isdisjoint(p.relative_to(root).parts)]
    sources = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(paths)]
    return [source for source in sources if not carries_foreign_notice(source)]


def split_documents(source: str) -> Iterator[str]:
    """Cut a module into its top-level functions and classes and the statements between them."""
    lines = source.splitlines(keepends=True)
    cuts = [0]
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            assert node.end_lineno is not None
            cuts += [first - 1, node.end_lineno]
    for start, stop in pairwise([*cuts, len(lines)]):
        if document := "".join(lines[start:stop]).strip("\n"):
            yield document


def split_corpus(
    sources: Sequence[str], max_chars: int, rng: np.random.Generator
) -> tuple[list[str], list[str]]:
    """The documents to train on, and those of the one file in twenty that is held out."""
    order = rng.permutation(len(sources))
    num_held_out = max(1, len(sources) // 20)
    held_out, kept = (
        [d for i in part for d in split_documents(sources[i]) if len(d) <= max_chars]
        for part in (order[:num_held_out], order[num_held_out:])
    )
    return kept, held_out


def train_tokenizer(documents: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE in which a newline is always its own token.

    Merging it with the indentation that follows would save tokens, but a prompt that ends in a
    newline would then be text the model has never seen.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("\n"), "isolated"), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def encode(documents: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    encodings = tokenizer.encode_batch([document + END_OF_TEXT for document in documents])
    return np.concatenate([encoding.ids for encoding in encodings]).astype(np.int32)


def model_config(size: ModelSize, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        **asdict(size),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def mean_loss(model: nn.Module, tokens: mx.array) -> mx.array:
    """Nats per token of `tokens` [B, L + 1], each predicted from those before it."""
    loss: mx.array = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")
    return loss


def random_windows(
    stream: np.ndarray, batch_size: int, seq_len: int, rng: np.random.Generator
) -> Iterator[mx.array]:
    """Endless `[batch_size, seq_len + 1]` batches of tokens cut from `stream` at random offsets."""
    while True:
        offsets = rng.integers(0, len(stream) - seq_len, size=(batch_size, 1))
        yield mx.array(stream[offsets + np.arange(seq_len + 1)])


def validation_loss(model: nn.Module, stream: np.ndarray, seq_len: int) -> float:
    """Mean loss over the consecutive windows of `stream`."""
    starts = range(0, len(stream) - seq_len, seq_len)
    windows = (mx.array(stream[start : start + seq_len + 1]) for start in starts)
    return float(np.mean([mean_loss(model, window[None]).item() for window in windows]))


def make_optimizer(steps: int, peak: float) -> optim.AdamW:
    """AdamW with a linear warm-up over the first twentieth and a cosine down to a fiftieth."""
    warmup = max(1, steps // 20)
    rise = optim.linear_schedule(peak / warmup, peak, warmup)
    fall = optim.cosine_decay(peak, max(1, steps - warmup), peak / 50)
    schedule = optim.join_schedules([rise, fall], [warmup])
    return optim.AdamW(schedule, betas=[0.9, 0.98], weight_decay=0.1, bias_correction=True)


def train(
    model: nn.Module, batches: Iterator[mx.array], held_out: np.ndarray, steps: int, peak: float
) -> float:
    """Take `steps` steps; return the mean training loss over the last `LOG_EVERY`."""
    optimizer = make_optimizer(steps, peak)
    loss_and_grad = nn.value_and_grad(model, mean_loss)
    losses: list[float] = []
    for step, tokens in enumerate(islice(batches, steps), start=1):
        loss, grads = loss_and_grad(model, tokens)
        grads, _ = optim.clip_grad_norm(grads, max_norm=1.0)
        optimizer.update(model, grads)
        mx.eval(loss, model.state, optimizer.state)
        losses.append(loss.item())
        if step % LOG_EVERY == 0:
            recent = np.mean(losses[-LOG_EVERY:])
            unseen = validation_loss(model, held_out, seq_len=tokens.shape[1] - 1)
            print(f"step {step:5d}  loss {recent:.3f}  validation {unseen:.3f}", flush=True)
    return float(np.mean(losses[-LOG_EVERY:]))


def save(model: nn.Module, config: dict[str, Any], tokenizer: Tokenizer, out: Path) -> None:
    """Write the checkpoint as a folder that `mlx_lm.load` reads."""
    out.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(out / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "config.json": config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in settings.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def show_samples(out: Path, max_tokens: int) -> float:
    """Continue every prompt greedily; return the least top-1 minus top-2 logit on the way."""
    model, tokenizer, *_ = mlx_lm.load(str(out))
    margin = math.inf
    for prompt in PROMPTS:
        text = ""
        for response in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=max_tokens):
            text += response.text
            second, first = np.sort(np.array(response.logprobs))[-2:]
            margin = min(margin, float(first - second))
        print("-" * 80, prompt + text, sep="\n")
    return margin


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model on Python source.")
    stdlib = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--corpus", type=Path, default=stdlib, help="folder of .py files")
    parser.add_argument("--max-chars", type=int, default=2000, help="leave out longer documents")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256, help="tokens per window")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="peak of the schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample-tokens", type=int, default=64, help="tokens after each prompt")
    for field in fields(ModelSize):
        parser.add_argument("--" + field.name.replace("_", "-"), type=int, default=field.default)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, save, reload through mlx-lm and show samples; the last line is the report as JSON."""
    args = parse_arguments(argv)
    size = ModelSize(**{field.name: getattr(args, field.name) for field in fields(ModelSize)})
    rng = np.random.default_rng(args.seed)
    mx.random.seed(args.seed)

    kept, held_out = split_corpus(read_sources(args.corpus), args.max_chars, rng)
    tokenizer = train_tokenizer(kept, size.vocab_size)
    stream, unseen = encode(kept, tokenizer), encode(held_out, tokenizer)
    print(f"{len(stream)} training tokens, {len(unseen)} held out", flush=True)
    config = model_config(size, tokenizer)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))

    start = time.perf_counter()
    batches = random_windows(stream, args.batch_size, args.seq_len, rng)
    train_loss = train(model, batches, unseen, args.steps, args.learning_rate)
    seconds = time.perf_counter() - start
    save(model, config, tokenizer, args.out)
    while (margin := show_samples(args.out, args.sample_tokens)) < NEAR_TIE:
        train(model, batches, unseen, steps=20, peak=args.learning_rate / 50)
        save(model, config, tokenizer, args.out)

    val_loss = validation_loss(model, unseen, args.seq_len)
    tokens_per_byte = len(unseen) / len("".join(held_out).encode())
    report = {
        "steps": args.steps,
        "seconds": round(seconds, 1),
        "tokens_seen": args.steps * args.batch_size * args.seq_len,
        "train_loss": round(train_loss, 4),
        "val_loss": round(val_loss, 4),
        "val_bits_per_byte": round(val_loss / math.log(2) * tokens_per_byte, 4),
        "smallest_margin": round(margin, 6),
        "parameters": sum(w.size for w in dict(tree_flatten(model.parameters())).values()),
        "bytes": sum(file.stat().st_size for file in args.out.iterdir()),
        "python": platform.python_version(),
    }
    print(json.dumps(report))
    return report


if __name__ == "__main__":
    main()
