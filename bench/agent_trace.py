"""What an agent's turns reuse of their prompts, and how soon they answer, beside recurrent layers.

The trace has 20 turns of tool calls that read files of this repository: an agent, two that it
starts with the same system prompt, thoughts that the chat template leaves out after the next
question, and a tool's result that the client shortens later. Its answers are given, so every model
gets the same prompts. The turns run on a model with recurrent layers and on a Llama of the same
size, one turn of each after the other.

    python -m bench.agent_trace --model lfm2 --snapshots 8

With --changes the last prompt of the trace comes again with other text at some place, as if a
system prompt told the state of a repository, and without thoughts. Counted is what the first and
the second prompt that is changed so reuse of what they have in common with all earlier ones.
"""

import argparse
import time
from importlib import import_module
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from bench.agent_prompts import Prompt, changed_loops, encoded, make_trace
from bench.command import print_result, table, text_of
from bench.flags.agent_trace import HYBRIDS, OTHERS, parse
from bench.machine import check_machine, machine_text
from bench.models import random_llama
from bench.names import SIZES
from bench.pairs import ratio, turns
from mlx_paged import Engine, SamplingParams, demo_model_path
from mlx_paged.kv.states import StateIds
from mlx_paged.loading import load_model


def hybrid(name: str, size: dict[str, Any]) -> nn.Module:
    """A model of :data:`HYBRIDS` or :data:`OTHERS` with random float32 weights."""
    module = import_module(f"mlx_lm.models.{name}")
    own, count = (HYBRIDS | OTHERS)[name], size["num_hidden_layers"]
    config = {"model_type": name, "max_position_embeddings": 1 << 17, "norm_eps": 1e-5}
    config |= {"head_dim": size["hidden_size"] // size["num_attention_heads"]}
    config |= {"block_dim": size["hidden_size"], "block_ff_dim": size["intermediate_size"]}
    by_turns = {key: own[key] for key in ("layer_types", "hybrid_override_pattern") if key in own}
    config |= size | own | {key: (kinds * count)[:count] for key, kinds in by_turns.items()}
    mx.random.seed(0)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    mx.eval(model.parameters())
    model.eval()
    return model


def run_turn(engine: Engine, prompt: Prompt, keeps_ends: bool) -> tuple[int, float]:
    """The prompt tokens that a turn reuses, and the seconds until its first token."""
    start, count = len(prompt.tokens), len(prompt.answer)

    def say(tokens: mx.array, logits: mx.array) -> mx.array:
        token = prompt.answer[min(tokens.size - start, count - 1)]
        return mx.where(mx.arange(logits.shape[-1]) == token, logits, -mx.inf)

    params = SamplingParams(max_tokens=count, logits_processors=(say,))
    began, first = time.perf_counter(), None
    engine.add_request(prompt.tokens, params, turn_ends=prompt.turn_ends if keeps_ends else ())
    while engine.has_work:
        for output in engine.step():
            first = time.perf_counter() - began if first is None else first
            done = output.completion
    assert first is not None and done is not None and done.tokens == prompt.answer
    return done.cached_prompt_tokens, first


def limit_snapshots(engine: Engine, most: int) -> None:
    """Let an engine keep no more snapshots."""
    states = engine.manager.allocator.states
    if isinstance(states, StateIds) and states.snapshots is not None:
        states.snapshots.max_snapshots = min(states.snapshots.max_snapshots, most)


def measure_changes(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each changed prompt the tokens reused."""
    tokenizer = load_model(str(demo_model_path()))[1]
    size = SIZES[args.size] | {"vocab_size": 1 + max(tokenizer.get_vocab().values())}
    model, trace, rows = hybrid(args.model, size), make_trace(), list[dict[str, Any]]()
    for name, turns_of_loop in changed_loops(trace, args.changes):
        prompts = encoded([*trace, *turns_of_loop], tokenizer)
        tokens = sum(len(prompt.tokens) + len(prompt.answer) for prompt in prompts)
        engine = Engine(model, num_blocks=2 * (tokens // 16 + len(prompts)))
        limit_snapshots(engine, args.snapshots)
        reused = [run_turn(engine, prompt, not args.no_turn_ends)[0] for prompt in prompts]
        for i, prompt in list(enumerate(prompts))[len(trace) :]:
            row = {"change": name, "time": i + 1 - len(trace), "tokens": len(prompt.tokens)}
            part = round(reused[i] / prompt.known, 3)
            rows.append(row | {"known": prompt.known, "reused": reused[i], "part": part})
    return rows


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each turn the tokens reused, and the medians of the times of the first tokens."""
    tokenizer = load_model(str(demo_model_path()))[1]
    size = SIZES[args.size] | {"vocab_size": 1 + max(tokenizer.get_vocab().values())}
    models = {args.model: hybrid(args.model, size), "llama": random_llama(size)}
    prompts = encoded(make_trace(), tokenizer)
    blocks = sum(len(prompt.tokens) + len(prompt.answer) for prompt in prompts) // 16 + len(prompts)
    engines = {name: Engine(model, num_blocks=blocks) for name, model in models.items()}
    limit_snapshots(engines[args.model], args.snapshots)
    times: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in engines}
    reused: dict[str, list[int]] = {name: [0] * len(prompts) for name in engines}
    for _ in range(args.rounds):
        for engine in engines.values():
            engine.reset_prefix_cache()
        for i, name in turns(engines, len(prompts)):
            turn = run_turn(engines[name], prompts[i], not args.no_turn_ends)
            reused[name][i], seconds = turn
            times[name][i].append(seconds)
    rows = []
    for i, prompt in enumerate(prompts):
        row: dict[str, Any] = {"turn": i + 1, "agent": prompt.agent, "tokens": len(prompt.tokens)}
        row |= {"known": prompt.known} | {f"{name} reused": reused[name][i] for name in engines}
        row |= {f"{name} ms": round(1000 * median(times[name][i]), 1) for name in engines}
        row["ratio"] = round(ratio(times[args.model][i], times["llama"][i]).median, 2)
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    machine = check_machine()
    print(f"Rounds: {args.rounds}; {machine_text(machine)}. No model can reuse more than is known.")
    if args.changes:
        rows = measure_changes(args)
        print(table([list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]))
        least = min(row["part"] for row in rows)
        result = {"model": args.model, "size": args.size, "snapshots": args.snapshots}
        result |= {"changes": rows, "least": least}
        return print_result("agent_trace", result | machine)
    rows = measure(args)
    print(table([list(rows[0]), *([text_of(cell, "") for cell in row.values()] for row in rows)]))
    total = {key: sum(row[key] for row in rows) for key in rows[0] if key not in ("turn", "agent")}
    computed = {name: total["tokens"] - total[f"{name} reused"] for name in (args.model, "llama")}
    result = {
        "model": args.model,
        "size": args.size,
        "snapshots": args.snapshots,
        "turn_ends": not args.no_turn_ends,
        "prompt_tokens": total["tokens"],
        "known": total["known"],
        "reused": {name: total[f"{name} reused"] for name in (args.model, "llama")},
        "reuse_ratio": round(total[f"{args.model} reused"] / total["llama reused"], 4),
        "computed_ratio": round(computed[args.model] / computed["llama"], 3),
        "first_token_ratio": round(median(row["ratio"] for row in rows), 3),
        "first_tokens_ratio_of_sums": round(total[f"{args.model} ms"] / total["llama ms"], 3),
    }
    print_result("agent_trace", result | {"rounds": args.rounds, **machine})


if __name__ == "__main__":
    main()
