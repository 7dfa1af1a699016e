"""Trains an EAGLE-3 head for a model on the model's own answers, and writes it as it is published.

    python -m scripts.train_head MODEL OUT --minutes 60
    python -m scripts.train_head demo OUT --minutes 3

The engine computes the answers, half of them greedy and half of them drawn. The head is trained to
have the model's distribution of the next tokens at several depths: at depth 2 and later its own
hidden state stands in the place of the model's states, as when it drafts (Li et al. 2025,
arXiv:2503.01840). It begins as a copy of the model's last layer. At the end the script prints how
often the first 1, 2, ... guesses are all right on prompts that were held out.

MODEL is a folder of a model of type llama or qwen3, with a chat template, or ``demo``.
"""

import argparse
import ast
import json
import random
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten

from mlx_paged import Engine, SamplingParams, demo_model_path
from mlx_paged.heads.eagle3 import Eagle3Head, eagle3_config
from mlx_paged.runner.hidden_states import HiddenStates

DEPTHS = 4  # guesses that are measured
FIRST_DEPTHS = 2  # guesses that are trained first; then one more, for the last part of the time
LAST_PART = 0.4
DECAY = 0.8  # weight of a guess relative to the one before it
RATE, WARM_UP = 8e-4, 20  # the largest learning rate, and the steps until it is reached
BATCH = 6  # answers in a step of the training
HELD_OUT = 24  # prompts that are not trained on

TOPICS = """
the sky, photosynthesis, volcanoes, black holes, bread, bicycles, vaccines, inflation, jazz, chess,
coral reefs, gravity, the Roman Empire, electric cars, bees, trains, meditation, recycling, paper,
databases, neural networks, sorting, the stock market, coffee, tides, earthquakes, dreams, vitamins,
languages, bridges, satellites, soil, glaciers, the immune system, time management, friendship,
programming, public speaking, gardens, dogs, cats, the ocean, money, sleep, libraries, small towns,
winter, robots, mathematics, probability, fractions, triangles, maps, rivers, rice, music, colours,
exercise, teamwork, kites, candles, clocks, glass, steel, wool, salt, sugar, tea, horses,
owls, frogs, ants, forests, deserts, islands, caves, snow, rain, wind, lightning, rainbows, planets
"""
FORMS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "Name three facts about {}.",
    "Why do people care about {}?",
    "Write a poem about {}.",
    "Give me step by step advice about {}.",
    "Summarize what is known about {}.",
    "Write an email to a colleague about {}.",
    "What speaks for {}, and what against?",
    "What would be different without {}?",
    "Write a Python function that has to do with {}.",
    "Compare {} with something similar.",
    "Tell me the history of {}.",
    "Write a dialogue of two friends about {}.",
    "What should I ask an expert on {}?",
)


@dataclass
class Example:
    """Tokens of a prompt and its answer, and what the model says of them.

    Attributes:
        states: ``[T, W]`` float16, what the head reads, one state beside the other.
        last: ``[T, D]`` float16, the output of the final norm.
    """

    tokens: np.ndarray
    num_prompt: int
    states: np.ndarray
    last: np.ndarray


def chat_prompts(tokenizer: Any) -> list[list[int]]:
    topics = [each.strip() for each in TOPICS.split(",")]
    questions = [form.format(topic) for topic in topics for form in FORMS]
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": each}], add_generation_prompt=True, tokenize=True
            )
        )
        for each in questions
    ]


def code_prompts(tokenizer: Any) -> list[list[int]]:
    """The first lines of functions of Python's standard library."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno > 6:
                found.append(tokenizer.encode("\n".join(lines[node.lineno - 1 : node.lineno + 2])))
    return [each for each in found if 8 <= len(each) <= 128]


def answers(
    model: nn.Module, tokenizer: Any, prompts: Sequence[list[int]], num_tokens: int
) -> list[list[int]]:
    """The model's answers: of held-out prompts greedy, of the others half of them drawn."""
    engine = Engine(model, tokenizer, max_running=32, kv_memory=1 << 30, prefix_cache=False)
    params = [
        SamplingParams(
            max_tokens=num_tokens,
            temperature=0.7 if i >= HELD_OUT and i % 2 else 0.0,
            seed=i,
        )
        for i in range(len(prompts))
    ]
    return [completion.tokens for completion in engine.generate(list(prompts), params)]


def examples(
    model: nn.Module, ids: Sequence[int], texts: Sequence[tuple[list[int], list[int]]]
) -> list[Example]:
    """What the model says of each prompt and its answer."""
    watched = HiddenStates(model, (*ids, -1))
    found = []
    for prompt, answer in texts:
        tokens = np.array(prompt + answer, np.int32)
        with watched.forward():
            model(mx.array(tokens)[None])
        *states, last = [each[0].astype(mx.float16) for each in watched.found]
        joined = mx.concatenate(states, axis=-1)
        mx.eval(joined, last)
        found.append(Example(tokens, len(prompt), np.array(joined), np.array(last)))
    return found


def new_head(model: nn.Module, ids: Sequence[int], vocabulary: np.ndarray) -> Eagle3Head:
    """A head that begins as the model's last layer behind the last of the states."""
    args, width = model.args, model.args.hidden_size
    config = {
        "model_type": model.model_type,
        "hidden_size": width,
        "intermediate_size": args.intermediate_size,
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": args.num_key_value_heads,
        "head_dim": getattr(args, "head_dim", None),
        "rms_norm_eps": args.rms_norm_eps,
        "rope_theta": args.rope_theta,
        "vocab_size": args.vocab_size,
        "max_position_embeddings": args.max_position_embeddings or 4096,
        "draft_vocab_size": len(vocabulary),
        "eagle_aux_hidden_state_layer_ids": list(ids),
    }
    head = Eagle3Head(eagle3_config(config), len(model.layers))
    head.written = config
    source, layer = model.layers[-1], head.layers[0]
    layer.mlp.update(source.mlp.parameters())
    for name, module in source.self_attn.children().items():
        own = layer.self_attn[name]
        if name in ("q_proj", "k_proj", "v_proj"):
            of_tokens = 0.02 * mx.random.normal(module.weight.shape)
            own.weight = mx.concatenate([of_tokens, module.weight], axis=1)
        elif module.parameters():
            own.update(module.parameters())
    layer.hidden_norm.weight = source.input_layernorm.weight * 1.0
    layer.post_attention_layernorm.weight = source.post_attention_layernorm.weight * 1.0
    before = [0.01 * mx.random.normal((width, width)) for _ in ids[1:]]
    head.fc.weight = mx.concatenate([*before, mx.eye(width)], axis=1)
    head.norm.weight = model.model.norm.weight * 1.0
    head.lm_head.weight = output_rows(model, vocabulary) * 1.0
    return head


def output_rows(model: nn.Module, vocabulary: np.ndarray) -> mx.array:
    """Rows of the model's output projection."""
    tied = "lm_head" not in model
    weight: mx.array = (model.model.embed_tokens if tied else model.lm_head).weight
    return weight[mx.array(vocabulary)]


def entries(
    head: Eagle3Head, hidden: mx.array, tokens: mx.array, past: list[Any], embed: Any
) -> mx.array:
    """The head's hidden states ``[B, T, D]`` of one depth more. `past` has keys and values of depth
    1, of all positions, then of each line's own entries; that of this depth is appended."""
    layer, attention, depth = head.layers[0], head.layers[0].self_attn, len(past)
    batch, length, _ = hidden.shape
    normed = layer.hidden_norm(hidden)
    x = mx.concatenate([layer.input_layernorm(embed(tokens)), normed], axis=-1)

    def heads(name: str, count: int, norm: str) -> mx.array:
        y = attention[name](x).reshape(batch, length, count, -1)
        y = attention[norm](y) if norm in attention else y
        moved: mx.array = y.transpose(0, 2, 1, 3)
        return moved

    groups, scale = attention.n_heads // attention.n_kv_heads, attention.scale
    query = attention.rope(heads("q_proj", attention.n_heads, "q_norm"), offset=depth) * scale
    key = attention.rope(heads("k_proj", attention.n_kv_heads, "k_norm"), offset=depth)
    past.append((key, heads("v_proj", attention.n_kv_heads, "")))
    first, *others = [tuple(mx.repeat(each, groups, axis=1) for each in pair) for pair in past]
    scores = query @ first[0].swapaxes(-1, -2)
    at = mx.arange(length)
    scores = mx.where(at[:, None] >= at[None], scores, -1e9)
    own = [mx.sum(query * key, axis=-1, keepdims=True) for key, _ in others]
    weights = mx.softmax(mx.concatenate([scores, *own], axis=-1), axis=-1)
    result = weights[..., :length] @ first[1]
    for i, (_, value) in enumerate(others):
        result = result + weights[..., length + i : length + i + 1] * value
    result = result.transpose(0, 2, 1, 3).reshape(batch, length, -1)
    hidden = hidden + attention.o_proj(result)
    found: mx.array = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return found


def shifted(tokens: mx.array, by: int) -> mx.array:
    moved: mx.array = mx.pad(tokens[:, by:], [(0, 0), (0, by)])
    return moved


def loss_of(
    head: Eagle3Head,
    batch: tuple[mx.array, ...],
    depths: int,
    embed: Any,
) -> mx.array:
    """Cross entropy with the model's distribution on the head's vocabulary, over all depths."""
    tokens, answered, states, teacher = batch
    hidden, past, total = head.fc(states), list[Any](), mx.array(0.0)
    for depth in range(depths):
        hidden = entries(head, hidden, shifted(tokens, 1 + depth), past, embed)
        logits = head.lm_head(head.norm(hidden))[:, : -1 - depth]
        wanted = teacher[:, 1 + depth :]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        weight = answered[:, 1 + depth :]
        crossed = -mx.sum(mx.sum(wanted * logprobs, axis=-1) * weight) / mx.sum(weight)
        total = total + DECAY**depth * crossed
    return total


def padded(group: Sequence[Example], rows: mx.array) -> tuple[mx.array, ...]:
    """Tokens ``[B, T]``, which of them are of answers, states, and the model's distributions."""
    length = max(len(each.tokens) for each in group)

    def stacked(arrays: Sequence[np.ndarray]) -> mx.array:
        tail = [(0, 0)] * (arrays[0].ndim - 1)
        return mx.array(np.stack([np.pad(a, [(0, length - len(a)), *tail]) for a in arrays]))

    tokens = stacked([each.tokens for each in group])
    answered = stacked(
        [(np.arange(len(e.tokens)) >= e.num_prompt - 1).astype(np.float32) for e in group]
    )
    states = stacked([each.states for each in group]).astype(mx.float32)
    last = stacked([each.last for each in group]).astype(mx.float32)
    return tokens, answered, states, mx.softmax(last @ rows.T, axis=-1)


def groups_of(train: Sequence[Example], rng: random.Random) -> Iterator[list[Example]]:
    """Batches of answers of about the same length, again and again."""
    while True:
        order = sorted(train, key=lambda each: len(each.tokens) + rng.randrange(40))
        groups = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        rng.shuffle(groups)
        yield from groups


def train(
    head: Eagle3Head, model: nn.Module, known: Sequence[Example], rows: mx.array, seconds: float
) -> int:
    """Train for so many seconds; the number of steps."""
    embed, rng = model.model.embed_tokens, random.Random(0)
    optimizer = optim.AdamW(learning_rate=RATE, betas=[0.9, 0.95], weight_decay=0.0)
    step = nn.value_and_grad(head, loss_of)
    started, count, losses = time.perf_counter(), 0, list[float]()
    for group in groups_of(known, rng):
        done = (time.perf_counter() - started) / seconds
        if done >= 1:
            break
        slope = 0.05 + 0.95 * 0.5 * (1 + float(np.cos(np.pi * done)))
        optimizer.learning_rate = RATE * min(1.0, (count + 1) / WARM_UP) * slope
        batch = padded(group, rows)
        depths = FIRST_DEPTHS + (done > 1 - LAST_PART)
        loss, gradients = step(head, batch, depths, embed)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(head, gradients)
        mx.eval(head.parameters(), optimizer.state)
        losses.append(loss.item())
        count += 1
        if count % 50 == 0:
            mean = float(np.mean(losses[-50:]))
            print(f"{count} steps, {done:.0%} of the time, loss {mean:.3f}", flush=True)
    return count


def acceptance(
    head: Eagle3Head, model: nn.Module, held: Sequence[Example], vocabulary: np.ndarray
) -> list[float]:
    """How often the first 1, 2, ... guesses behind a token of a greedy answer are all right."""
    right, count, embed = np.zeros(DEPTHS), 0, model.model.embed_tokens
    for each in held:
        tokens, length = mx.array(each.tokens)[None], len(each.tokens)
        hidden, past = head.fc(mx.array(each.states)[None].astype(mx.float32)), list[Any]()
        at = np.arange(each.num_prompt - 1, length - DEPTHS - 1)
        if not len(at):
            continue
        given, good = shifted(tokens, 1), np.ones(len(at), bool)
        for depth in range(DEPTHS):
            hidden = entries(head, hidden, given, past, embed)
            best = np.array(mx.argmax(head.lm_head(head.norm(hidden)), axis=-1))[0]
            guesses = vocabulary[best]
            good &= guesses[at] == each.tokens[at + 2 + depth]
            right[depth] += good.sum()
            given = mx.array(guesses[None].astype(np.int32))
        count += len(at)
    return [round(float(each), 3) for each in right / max(count, 1)]


def save(head: Eagle3Head, folder: Path, vocabulary: np.ndarray, vocab_size: int) -> None:
    """Write the head in EAGLE's own layout."""
    weights = {
        name.replace("layers.0.", "midlayer."): array.astype(mx.float16)
        for name, array in tree_flatten(head.parameters())
    }
    if len(vocabulary) < vocab_size:
        weights["d2t"] = mx.array(vocabulary - np.arange(len(vocabulary)))
        weights["t2d"] = mx.array(np.isin(np.arange(vocab_size), vocabulary))
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = {"architectures": ["LlamaForCausalLMEagle3"], **head.written}
    config["num_hidden_layers"], config["hidden_act"] = 1, "silu"
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder, or demo")
    parser.add_argument("out", type=Path, help="folder of the head")
    parser.add_argument("--minutes", type=float, default=60, help="for all of it")
    parser.add_argument("--answers", type=int, default=700)
    parser.add_argument("--tokens", type=int, default=160, help="of an answer at most")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens that can be guessed")
    args = parser.parse_args()
    started = time.perf_counter()
    is_demo = args.model == "demo"
    model, tokenizer = mlx_lm.load(str(demo_model_path()) if is_demo else args.model)[:2]
    model.freeze()
    mx.random.seed(0)
    prompts = code_prompts(tokenizer) if is_demo else chat_prompts(tokenizer)
    random.Random(7).shuffle(prompts)
    prompts = prompts[: HELD_OUT + args.answers]
    texts = list(zip(prompts, answers(model, tokenizer, prompts, args.tokens), strict=True))
    print(
        f"{sum(len(a) for _, a in texts)} tokens, {time.perf_counter() - started:.0f} s", flush=True
    )
    size, count = model.args.vocab_size, len(model.layers)
    counts = np.zeros(size, np.int64)
    for _, answer in texts[HELD_OUT:]:
        np.add.at(counts, answer, 1)
    vocabulary = np.sort(np.argsort(-counts, kind="stable")[: args.vocabulary])
    print(f"the vocabulary covers {counts[vocabulary].sum() / counts.sum():.2%}", flush=True)
    ids = (2, count // 2, count - 1) if count > 5 else (1, count // 2, count - 1)
    known = examples(model, ids, texts)
    print(f"states, {time.perf_counter() - started:.0f} s", flush=True)
    head, rows = new_head(model, ids, vocabulary), output_rows(model, vocabulary)
    left = args.minutes * 60 - (time.perf_counter() - started)
    steps = train(head, model, known[HELD_OUT:], rows, max(left, 30.0))
    found = acceptance(head, model, known[:HELD_OUT], vocabulary)
    save(head, args.out, vocabulary, size)
    minutes = (time.perf_counter() - started) / 60
    print(json.dumps({"all right": found, "steps": steps, "minutes": round(minutes, 1)}))


if __name__ == "__main__":
    main()
