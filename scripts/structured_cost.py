"""What grammars cost and save: step times with and without, and model steps.

    python -m scripts.structured_cost [--pairs 12] [--vocab 131072] [--rows 32] [--seconds 220]

A llama of random weights has `--vocab` tokens: those of the demo model, and random words. The rows
are constrained to a long JSON text, or with `--hard` by an expression that counts characters of a
class of its own: llguidance's slow case, in which no mask resembles the one before. Neither has
fixed text, so that each step computes one token a row with and without it. Each pair runs both in
turns, with lookahead and without; after `--seconds` no new pair begins. The last line is one JSON
object: medians over the pairs, and the model's steps for an object with fixed keys. On Linux,
preload OpenBLAS (docs/engine.md, On a CPU): with MLX's reference BLAS a step takes seconds.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import llama
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from bench.command import print_result
from bench.pairs import in_turns, ratio
from mlx_paged import Engine
from mlx_paged.cli import COUNT
from mlx_paged.loading import load_model
from mlx_paged.sampling.grammar import Grammars

TEXT = {"type": "string", "minLength": 4000}
BOUND: dict[str, Any] = {"json_schema": TEXT}
HARD: dict[str, Any] = {"regex": "[a-zA-Z0-9 .,_]{400,}"}
PLAIN: dict[str, Any] = {"ignore_eos": True}
KEYS = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "last_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_member": {"type": "boolean"},
    },
    "required": ["first_name", "last_name", "age", "is_member"],
    "additionalProperties": False,
}


def wide_model(vocab: int) -> tuple[Any, Any]:
    """A random llama, and the demo model's tokenizer with random words, both of `vocab` tokens."""
    _, tokenizer = load_model()
    known = json.loads(tokenizer._tokenizer.backend_tokenizer.to_str())
    rng, words = random.Random(0), known["model"]["vocab"]
    count = len(tokenizer._tokenizer)
    while count < vocab:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9)))
        count += words.setdefault(word, count) == count
    inner = Tokenizer.from_str(json.dumps(known))
    ends = tokenizer._tokenizer.eos_token
    tokenizer._tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=ends)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=512,
        num_hidden_layers=8,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=4,
        rms_norm_eps=1e-5,
        vocab_size=vocab,
        tie_word_embeddings=True,
    )
    mx.random.seed(0)
    model = llama.Model(args)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, tokenizer


def step_ms(engine: Engine, rows: int, steps: int, **options: Any) -> float:
    """Median time of a step in which all rows decode."""
    ids = [engine.add_request([5 + row], max_tokens=steps + 8, **options) for row in range(rows)]
    for _ in range(6):
        engine.step()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    return 1000 * statistics.median(times)


def count_steps(fast_forward: bool) -> tuple[int, int]:
    """Steps and tokens of one object with fixed keys on the demo model."""
    model, tokenizer = load_model()
    engine = Engine(model, tokenizer, num_blocks=64)
    assert isinstance(engine.constraints, Grammars)
    engine.constraints.fast_forward = fast_forward
    engine.add_request("x = ", json_schema=KEYS, max_tokens=200)
    steps = tokens = 0
    while engine.has_work:
        tokens += len(engine.step())
        steps += 1
    return steps, tokens


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="structured_cost", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    numbers = {"pairs": 12, "vocab": 1 << 17, "rows": 32, "steps": 12, "seconds": 220}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=COUNT, default=default)
    parser.add_argument(
        "--hard", action="store_true", help="constrain by an expression that counts"
    )
    args = parser.parse_args(argv)
    model, tokenizer = wide_model(args.vocab)
    engines = {
        name: Engine(model, tokenizer, num_blocks=512, lookahead=lookahead)
        for name, lookahead in (("lookahead", True), ("no_lookahead", False))
    }
    courses = {
        f"{kind} {name}": partial(step_ms, engine, args.rows, args.steps, **options)
        for name, engine in engines.items()
        for kind, options in (("bound", HARD if args.hard else BOUND), ("plain", PLAIN))
    }
    times = in_turns(courses, args.pairs, title="pairs", seconds=args.seconds)
    found: dict[str, Any] = {"vocab": args.vocab, "rows": args.rows}
    for name in engines:
        plain = times[f"plain {name}"]
        bound_over_plain = ratio(times[f"bound {name}"], plain)
        found[name] = {
            "pairs": len(plain),
            "plain_ms": round(statistics.median(plain), 1),
            "ratio": round(bound_over_plain.median, 3),
            "from": round(bound_over_plain.lowest, 3),
            "to": round(bound_over_plain.highest, 3),
        }
        print(name, found[name])
    (fewer, tokens), (all_steps, _) = count_steps(True), count_steps(False)
    found |= {"tokens": tokens, "steps": fewer, "steps_one_by_one": all_steps}
    print_result("structured_cost", found)


if __name__ == "__main__":
    main()
