"""Ask a chat model the same questions in many settings, and count the answers that differ.

    python -m scripts.batch_invariance [--model DIR] [--chats 200] [--max-tokens 32] [--dtype TYPE]

Half of the chats are greedy, half are drawn with a seed. The answers of an engine that computes one
request at a time are compared with those of 16 at once, of a prompt that is in the prefix cache, of
other prefill chunks, of drafts, of compiled decodes and of requests that were preempted. The exit
status is 1 if any answer differs. The last line is JSON.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_map

from mlx_paged import Engine, SamplingParams, demo_model_path

QUESTIONS = (
    "What is {}?",
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "Why is {} useful?",
)
TOPICS = (
    *("a prime number", "rain", "the moon", "a compiler", "bread", "a river", "gravity", "chess"),
    *(
        "a list in Python",
        "salt",
        "the sea",
        "sleep",
        "a bridge",
        "ice",
        "a mirror",
        "music",
        "ink",
    ),
)
LONG_EVERY = 20  # chats: one has a prompt of more than 512 tokens
NUM_RULES = 70
DRAFT_MODEL = "draft model"  # the model itself
PREEMPTED = "preempted"  # a pool that holds the longest request and little more
SETTINGS: dict[str, dict[str, Any]] = {
    "16 at once": {},
    "prefix hit": {"prefix_cache": True},
    "chunks of 7": {"prefill_chunk": 7},
    "chunks of 64": {"prefill_chunk": 64},
    "chunks of 512": {"prefill_chunk": 512},
    "n-gram drafts": {"speculate": "ngram"},
    DRAFT_MODEL: {},
    "compiled": {"compile": True},
    PREEMPTED: {"max_running": 32},
    "blocks of 32": {"block_size": 32},
}

Answers = list[tuple[int, ...]]


def prompts_of(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of different chats."""
    pairs = [(question, topic) for topic in TOPICS for question in QUESTIONS]
    prompts = []
    for i in range(count):
        question, topic = pairs[i % len(pairs)]
        text = question.format(topic) + " Answer briefly." * (i // len(pairs))
        if i % LONG_EVERY == LONG_EVERY // 2:
            text += "".join(f" Rule {k}: answer politely." for k in range(NUM_RULES))
        if getattr(tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": text}]
            prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        else:
            prompts.append(tokenizer.encode(text))
    return prompts


def params_of(count: int, max_tokens: int) -> list[SamplingParams]:
    """Greedy ones and ones with a seed in turn."""
    return [
        SamplingParams(max_tokens=max_tokens, temperature=0.8 * (i % 2), seed=i)
        for i in range(count)
    ]


def answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    twice: bool = False,
    **options: Any,
) -> Answers:
    """The tokens of each answer; if `twice`, those of the second time that one engine is asked."""
    room: dict[str, Any] = {
        "kv_memory": 1 << 28,
        "prefix_cache": False,
        "max_running": 16,
        "compile": False,
    }
    engine = Engine(model, tokenizer, **(room | options))
    for _ in range(1 + twice):
        found = engine.generate(prompts, list(params))
    return [tuple(completion.tokens) for completion in found]


def differing(model: Any, tokenizer: Any, chats: int, max_tokens: int) -> dict[str, int]:
    """How many answers differ from those of one request at a time, by setting."""
    prompts, params = prompts_of(tokenizer, chats), params_of(chats, max_tokens)
    alone = answers(model, tokenizer, prompts, params, max_running=1)
    counts = {}
    for name, options in SETTINGS.items():
        if name == DRAFT_MODEL:
            options = {"draft_model": model}
        elif name == PREEMPTED:
            longest = max(map(len, prompts)) + max_tokens
            options = options | {"kv_memory": None, "num_blocks": longest // 16 + 3}
        found = answers(model, tokenizer, prompts, params, name == "prefix hit", **options)
        counts[name] = sum(one != other for one, other in zip(alone, found, strict=True))
    return counts


def cast(model: Any, dtype: mx.Dtype) -> None:
    """Turn all floating-point weights to `dtype`."""
    model.update(
        tree_map(
            lambda x: x.astype(dtype) if mx.issubdtype(x.dtype, mx.floating) else x,
            model.parameters(),
        )
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=demo_model_path(), type=Path)
    parser.add_argument("--chats", default=200, type=int)
    parser.add_argument("--max-tokens", default=32, type=int)
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights"
    )
    options = parser.parse_args(arguments)
    model, tokenizer = mlx_lm.load(str(options.model))[:2]
    if options.dtype is not None:
        cast(model, getattr(mx, options.dtype))
    counts = differing(model, tokenizer, options.chats, options.max_tokens)
    for name, count in counts.items():
        print(f"{name}: {count} of {options.chats} answers differ")
    print(json.dumps({"chats": options.chats, "differing": counts}))
    return 1 if any(counts.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
