"""Trains an EAGLE-3 head for a model on the model's own answers, and writes it as it is published.

    python -m scripts.train_head MODEL OUT --minutes 60
    python -m scripts.train_head demo OUT --minutes 3

The engine computes the answers: three of four are greedy, each fourth is drawn. The head is trained
to have the model's distribution of the next tokens at several depths: at depth 2 and later its own
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
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten

from mlx_paged import SamplingParams, demo_model_path
from mlx_paged.heads.eagle3 import Eagle3Head, eagle3_config
from mlx_paged.heads.head import NORMED
from scripts.head_answers import Example, read, record
from scripts.head_training import Adam, cross_entropy, gated, softmax

DEPTHS = 4  # guesses that are measured
TRAINED = 3  # guesses that are trained
PART = 3  # a third of the lines go on behind the first guess in each step of the training
DECAY = 0.8  # weight of a guess relative to the one before it
RATE, WARM_UP = 8e-4, 20  # the largest learning rate, and the steps until it is reached
BATCH = 4  # answers in a step of the training
HELD_OUT = 24  # prompts that are not trained on
DRAWN = 4  # each fourth of the other prompts has a drawn answer
COUNTED = 8  # each 8th position of an answer shows which tokens the model likes
WANTED = 32  # tokens of the model's distribution that the head is trained to have
CHECK = 300  # seconds between measurements, at which the best head so far is written

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
    "What is {}?",
    "Tell me something surprising about {}.",
    "How does one begin with {}?",
    "Write a review of a book about {}.",
    "Make a quiz of three questions about {}.",
    "Correct a common error about {}.",
    "Describe {} in two sentences.",
    "Write a letter to a friend about {}.",
    "Invent a riddle about {}.",
    "Why is {} useful?",
)


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


def new_answers(
    model: nn.Module, tokenizer: Any, prompts: Sequence[list[int]], num_tokens: int, folder: Path
) -> None:
    """Write the model's answers to a folder: greedy ones of held-out prompts, and of the others."""
    size, count = model.args.vocab_size, len(model.layers)
    few = np.arange(64)
    recorder = new_head(model, (*layer_ids(count), NORMED), few)
    save(recorder, folder / "recorder", few, size)
    params = [
        SamplingParams(
            max_tokens=num_tokens,
            temperature=0.7 if i >= HELD_OUT and i % DRAWN == DRAWN - 1 else 0.0,
            seed=i,
            speculate=False,
        )
        for i in range(len(prompts))
    ]
    record(model, tokenizer, folder / "recorder", prompts, params, folder)


def layer_ids(count: int) -> tuple[int, int, int]:
    """The layers whose inputs a head of a model with so many layers reads."""
    return (2, count // 2, count - 1) if count > 5 else (1, count // 2, count - 1)


class Budget:
    """The time of a run, which began with the process.

    Args:
        minutes: on the clock.
        processor_minutes: of all threads.
    """

    def __init__(self, minutes: float, processor_minutes: float) -> None:
        self._started = time.perf_counter()
        self._minutes, self._processor_minutes = minutes, processor_minutes

    @property
    def spent(self) -> float:
        """The part that is spent of the one that ends first."""
        minutes = (time.perf_counter() - self._started) / 60
        return max(minutes / self._minutes, time.process_time() / 60 / self._processor_minutes)


Answer = tuple[Example, np.ndarray, np.ndarray]
"""An example, and the tokens and shares of the model's distribution at each of its positions."""


class Known:
    """Examples of a folder, to which files may still be added.

    Attributes:
        train: examples to train on.
        held: examples to measure on.
        vocabulary: the tokens that can be guessed; those that the model likes most.
    """

    def __init__(self, folder: Path, model: nn.Module, num_guessed: int) -> None:
        self._folder, self._model, self._files = folder, model, set[Path]()
        self.train: list[Answer] = []
        self.held: list[Example] = []
        self.vocabulary = self._liked(num_guessed)
        self._rows = output_rows(model, self.vocabulary)
        self.refresh()

    def _liked(self, count: int) -> np.ndarray:
        """The tokens that the model chose or gave large shares, most of all."""
        every = np.arange(self._model.args.vocab_size)
        weight, rows = np.zeros(len(every)), output_rows(self._model, every)
        chosen = np.zeros(len(every))
        for path in sorted(self._folder.glob("*.npz")):
            for number, each in read(path):
                if number < HELD_OUT:
                    continue
                last = mx.array(each.last[each.num_prompt - 1 :: COUNTED]).astype(mx.float32)
                ids, shares = most_wanted(last @ rows.T)
                np.add.at(weight, ids, shares)
                np.add.at(chosen, each.tokens[each.num_prompt :], 1)
        found = np.sort(np.argsort(-(weight + chosen), kind="stable")[:count])
        print(f"the vocabulary covers {chosen[found].sum() / chosen.sum():.2%}", flush=True)
        return found

    def refresh(self) -> None:
        """Read the files that are new."""
        for path in sorted(self._folder.glob("*.npz")):
            if path in self._files:
                continue
            self._files.add(path)
            for number, each in read(path):
                if number < HELD_OUT:
                    self.held.append(each)
                elif len(each.tokens) > each.num_prompt + DEPTHS + 1:
                    last = mx.array(each.last).astype(mx.float32)
                    self.train.append((each, *most_wanted(last @ self._rows.T)))


def most_wanted(logits: mx.array) -> tuple[np.ndarray, np.ndarray]:
    """The columns ``[T, K]`` with the largest shares of rows, and their shares."""
    found = np.array(logits)
    count = min(WANTED, found.shape[1])
    ids = np.argpartition(-found, count - 1, axis=-1)[:, :count].astype(np.int32)
    found -= found.max(-1, keepdims=True)
    total = np.exp(found).sum(-1, keepdims=True)
    return ids, np.exp(np.take_along_axis(found, ids, -1)) / total


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


def take(head: Eagle3Head, folder: Path, vocabulary: np.ndarray) -> None:
    """Take the weights of a head that was written. Tokens that it did not guess keep their rows."""
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    offsets = np.array(weights.pop("d2t"))
    weights.pop("t2d")
    row_of = {token: i for i, token in enumerate((offsets + np.arange(len(offsets))).tolist())}
    rows, trained = np.array(head.lm_head.weight), np.array(weights.pop("lm_head.weight"))
    for i, token in enumerate(vocabulary.tolist()):
        if token in row_of:
            rows[i] = trained[row_of[token]]
    given = {name.replace("midlayer.", "layers.0."): a for name, a in weights.items()}
    head.load_weights(
        [("lm_head.weight", mx.array(rows)), *((n, a.astype(mx.float32)) for n, a in given.items())]
    )


def output_rows(model: nn.Module, vocabulary: np.ndarray) -> mx.array:
    """Rows of the model's output projection."""
    tied = "lm_head" not in model
    weight: mx.array = (model.model.embed_tokens if tied else model.lm_head).weight
    return weight[mx.array(vocabulary)]


def entries(
    head: Eagle3Head,
    hidden: mx.array,
    tokens: mx.array,
    past: list[Any],
    embed: Any,
    start: int = 0,
) -> mx.array:
    """The head's hidden states ``[B, L, D]`` of one depth more, for the lines that begin at
    positions ``[start, start + L)``. `past` has keys and values of depth 1, of all positions, then
    of each line's own entries; that of this depth is appended."""
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
    query = (
        attention.rope(heads("q_proj", attention.n_heads, "q_norm"), offset=start + depth) * scale
    )
    key = attention.rope(heads("k_proj", attention.n_kv_heads, "k_norm"), offset=start + depth)
    past.append((key, heads("v_proj", attention.n_kv_heads, "")))
    first, *others = [tuple(mx.repeat(each, groups, axis=1) for each in pair) for pair in past]
    scores = query @ first[0].swapaxes(-1, -2)
    count = scores.shape[-1]
    is_past = mx.arange(start, start + length)[:, None] >= mx.arange(count)
    scores = scores + mx.where(is_past, 0.0, -1e9)
    own = [mx.sum(query * key, axis=-1, keepdims=True) for key, _ in others]
    weights = softmax(mx.concatenate([scores, *own], axis=-1))
    result = weights[..., :count] @ first[1]
    for i, (_, value) in enumerate(others):
        result = result + weights[..., count + i : count + i + 1] * value
    result = result.transpose(0, 2, 1, 3).reshape(batch, length, -1)
    hidden = hidden + attention.o_proj(result)
    normed, mlp = layer.post_attention_layernorm(hidden), layer.mlp
    found: mx.array = hidden + mlp.down_proj(gated(mlp.gate_proj(normed), mlp.up_proj(normed)))
    return found


def shifted(tokens: mx.array, by: int) -> mx.array:
    moved: mx.array = mx.pad(tokens[:, by:], [(0, 0), (0, by)])
    return moved


class Batch(NamedTuple):
    """Answers to train on.

    Attributes:
        tokens: ``[B, T]``.
        states: ``[B, T, W]``.
        window: the positions whose lines go on behind the first guess.
        wanted: for each depth the rows whose guesses count, their columns and shares ``[R, K]``.
    """

    tokens: mx.array
    states: mx.array
    window: slice
    wanted: list[tuple[mx.array, mx.array, mx.array]]


def loss_of(head: Eagle3Head, batch: Batch, embed: Any) -> mx.array:
    """Cross entropy with the model's distribution on the head's vocabulary, over all depths."""
    hidden, past, total = head.fc(batch.states), list[Any](), mx.array(0.0)
    for depth, (rows, ids, shares) in enumerate(batch.wanted):
        tokens, start = shifted(batch.tokens, 1 + depth), 0
        if depth:
            tokens, start = tokens[:, batch.window], batch.window.start
        hidden = entries(head, hidden, tokens, past, embed, start)
        logits = head.lm_head(head.norm(hidden.flatten(0, 1)[rows]))
        total = total + DECAY**depth * cross_entropy(logits, ids, shares)
        if depth == 0:
            hidden = hidden[:, batch.window]
    return total


def batch_of(group: Sequence[Answer], depths: int, rng: random.Random) -> Batch:
    """These answers, of which a part of the lines goes on to `depths` guesses."""
    length = max(len(each.tokens) for each, _, _ in group)
    size = max(length // PART, 1)
    first = min(each.num_prompt for each, _, _ in group) - 2
    start = rng.randint(max(first, 0), max(length - size - depths, first, 0))
    window = slice(start, min(start + size, length))

    def stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
        tail = [(0, 0)] * (arrays[0].ndim - 1)
        return np.stack([np.pad(a, [(0, length - len(a)), *tail]) for a in arrays])

    tokens = stacked([each.tokens for each, _, _ in group])
    states = stacked([each.states for each, _, _ in group]).astype(np.float32)
    wanted = []
    for depth in range(depths):
        lines = window if depth else slice(0, length)
        rows, ids, shares = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        for i, (each, of_model, likely) in enumerate(group):
            # The entry at t guesses token t + 2 + depth, which the model's row before it chooses.
            stop = min(len(each.tokens) - 1 - depth, lines.stop)
            at = np.arange(max(each.num_prompt - 2, lines.start), stop)
            rows.append(i * (lines.stop - lines.start) + at - lines.start)
            ids.append(of_model[at + 1 + depth])
            shares.append(likely[at + 1 + depth])
        joined = [mx.array(np.concatenate(parts)) for parts in (rows, ids, shares)]
        if len(joined[0]):
            wanted.append((joined[0], joined[1], joined[2]))
    return Batch(mx.array(tokens), mx.array(states), window, wanted)


def groups_of(known: Known, rng: random.Random) -> Iterator[list[Answer]]:
    """Batches of answers of about the same length, again and again."""
    while True:
        known.refresh()
        order = sorted(known.train, key=lambda each: len(each[0].tokens) + rng.randrange(40))
        groups = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        rng.shuffle(groups)
        yield from groups


def train(
    head: Eagle3Head, model: nn.Module, known: Known, budget: Budget, rate: float, out: Path
) -> list[float]:
    """Train until the budget is spent, and write the best head; how often its guesses are all
    right."""
    embed, rng = model.model.embed_tokens, random.Random(0)
    optimizer, step = Adam(head, (0.9, 0.95), 1.0), nn.value_and_grad(head, loss_of)
    begun, checked, losses = budget.spent, time.perf_counter(), list[float]()
    best = [0.0] * DEPTHS
    for count, group in enumerate(groups_of(known, rng)):
        spent = budget.spent
        done = (spent - begun) / (1 - begun)
        if done >= 1 or time.perf_counter() > checked + CHECK:
            checked = time.perf_counter()
            found = acceptance(head, model, known.held, known.vocabulary)
            mean = float(np.mean(losses[-100:]))
            print(
                f"{count} steps of {len(known.train)} answers, {spent:.0%} of the time, loss "
                f"{mean:.3f}, right {found}",
                flush=True,
            )
            if sum(found) > sum(best):
                best = found
                save(head, out, known.vocabulary, model.args.vocab_size)
        if done >= 1:
            return best
        slope = 0.05 + 0.95 * 0.5 * (1 + float(np.cos(np.pi * done)))
        loss, gradients = step(head, batch_of(group, TRAINED, rng), embed)
        optimizer.update(gradients, rate * min(1.0, (count + 1) / WARM_UP) * slope)
        losses.append(loss.item())
    raise AssertionError("there are answers without end")


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
    parser.add_argument("--minutes", type=float, default=60, help="for all of it, on the clock")
    parser.add_argument(
        "--processor-minutes", type=float, default=120, help="for all of it, of all threads"
    )
    parser.add_argument("--answers", type=int, default=700)
    parser.add_argument("--tokens", type=int, default=160, help="of an answer at most")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens that can be guessed")
    parser.add_argument("--rate", type=float, default=RATE, help="largest learning rate")
    parser.add_argument("--start", type=Path, help="folder of a head to go on with")
    parser.add_argument("--data", type=Path, help="folder of the answers; made where there is none")
    args = parser.parse_args()
    budget = Budget(args.minutes, args.processor_minutes)
    is_demo = args.model == "demo"
    model, tokenizer = mlx_lm.load(str(demo_model_path()) if is_demo else args.model)[:2]
    model.freeze()
    mx.random.seed(0)
    folder = args.data or args.out / "answers"
    if not [*folder.glob("*.npz")]:
        prompts = code_prompts(tokenizer) if is_demo else chat_prompts(tokenizer)
        random.Random(7).shuffle(prompts)
        new_answers(model, tokenizer, prompts[: HELD_OUT + args.answers], args.tokens, folder)
    known = Known(folder, model, min(args.vocabulary, model.args.vocab_size))
    print(f"{len(known.train)} answers, {budget.spent:.0%} of the time", flush=True)
    head = new_head(model, layer_ids(len(model.layers)), known.vocabulary)
    if args.start is not None:
        take(head, args.start, known.vocabulary)
    found = train(head, model, known, budget, args.rate, args.out)
    print(json.dumps({"all right": found}))


if __name__ == "__main__":
    main()
