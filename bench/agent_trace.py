"""What an agent's turns reuse of their prompts, and how soon they answer, beside recurrent layers.

The trace has 20 turns of tool calls that read files of this repository: an agent, two that it
starts with the same system prompt, thoughts that the chat template leaves out after the next
question, and a tool's result that the client shortens later. Its answers are given, so every model
gets the same prompts. The turns run on a model with recurrent layers and on a Llama of the same
size, one turn of each after the other.

    python -m bench.agent_trace --model lfm2 --snapshots 8
"""

import argparse
import time
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.tokenizer_utils import TokenizerWrapper

from bench.command import print_result, table, text_of
from bench.flags.agent_trace import HYBRIDS, parse
from bench.machine import check_machine, machine_text
from bench.models import random_llama
from bench.names import SIZES
from bench.pairs import ratio, turns
from mlx_paged import Engine, SamplingParams, demo_model_path
from mlx_paged.kv.states import StateIds
from mlx_paged.loading import load_model
from mlx_paged.protocol.turn_ends import turn_ends

ROOT = Path(__file__).parents[1]
Message = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {each: {"type": kind} for each, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }
    for name, description, parameters in (
        (
            "read_file",
            "Reads lines of a file of the repository.",
            {"path": "string", "first": "integer", "last": "integer"},
        ),
        ("search", "Finds the lines that contain a text.", {"text": "string"}),
        ("start_agent", "Gives a task to another agent.", {"task": "string"}),
    )
]

TEMPLATE = """\
{%- set last = namespace(question=-1) -%}
{%- for message in messages -%}
{%- if message.role == "user" -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{- "<|im_start|>" + message.role + "\\n" -}}
{%- if message.reasoning_content and loop.index0 > last.question -%}
{{- "<think>\\n" + message.reasoning_content + "\\n</think>\\n\\n" -}}
{%- endif -%}
{{- message.content -}}
{%- if loop.first -%}
{%- for tool in tools -%}{{- "\\n" + (tool | tojson) -}}{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- "<tool_call>\\n" + (call.function | tojson) + "\\n</tool_call>" -}}
{%- endfor -%}
{{- "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""
SHORTENED = "[left out: read the file again if you need it]"


@dataclass(frozen=True)
class Turn:
    """What an agent is asked, and its answer."""

    agent: str
    messages: list[Message]
    answer: Message


class Agent:
    """A conversation; each answer adds a turn to the trace."""

    def __init__(self, name: str, trace: list[Turn], system: str, task: str) -> None:
        self.name, self.trace = name, trace
        self.messages: list[Message] = [{"role": "system", "content": system}]
        self.ask(task)

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def read(self, path: str, first: int, last: int) -> None:
        """Read lines of a file, and get them."""
        lines = (ROOT / path).read_text().splitlines()[first - 1 : last]
        arguments = {"path": path, "first": first, "last": last}
        thought = f"I have not seen lines {first} to {last} of {path}, and the answer may be there."
        self._answer(thought, "", [{"name": "read_file", "arguments": arguments}])
        self.messages.append({"role": "tool", "content": "\n".join(lines)})

    def say(self, text: str) -> None:
        self._answer("Now I know enough to answer.", text, [])

    def _answer(self, thought: str, text: str, calls: list[dict[str, Any]]) -> None:
        tool_calls = [{"type": "function", "function": call} for call in calls]
        answer: Message = {"role": "assistant", "content": text, "reasoning_content": thought}
        answer |= {"tool_calls": tool_calls} if calls else {}
        self.trace.append(Turn(self.name, list(self.messages), answer))
        self.messages.append(answer)


def make_trace() -> list[Turn]:
    """The 20 turns."""
    trace: list[Turn] = []
    rules = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    system = f"You help the developers of this project. Its README begins:\n{rules}\nTools:"
    main = Agent("main", trace, system, "How does a request get blocks, and keep them?")
    main.read("mlx_paged/kv/blocks.py", 1, 60)
    main.read("mlx_paged/kv/allocator.py", 1, 60)
    main.read("mlx_paged/scheduler/places.py", 1, 70)
    main.say("Places admits it, BlockAllocator takes blocks, and BlockStore evicts idle ones.")
    main.ask("Where are K/V and states of a prefix kept? Ask others about tests and documents.")
    main.read("mlx_paged/kv/prefix_cache.py", 1, 80)
    first = Agent("tests", trace, system, "Which tests check the prefix cache?")
    first.read("mlx_paged/kv/prefix_match.py", 1, 60)
    first.read("mlx_paged/kv/layer_groups.py", 1, 60)
    first.say("Those of the room kv, which compare with a search through all prompts.")
    main.read("mlx_paged/kv/state_ends.py", 1, 60)
    second = Agent("documents", trace, system, "What do the documents say of the prefix cache?")
    second.read("docs/engine.md", 1, 50)
    second.read("docs/kv-disk.md", 1, 40)
    second.say("A prefix is found by a chained hash; on a disk it outlives the process.")
    main.read("mlx_paged/kv/snapshots.py", 1, 70)
    main.say("PrefixCache knows the blocks, and Snapshots has the states.")
    main.ask("Then say what a snapshot is worth.")
    kept = [i for i, message in enumerate(main.messages) if message["role"] == "tool"][2]
    main.messages[kept] = {"role": "tool", "content": SHORTENED}  # the client saves tokens
    main.read("mlx_paged/kv/snapshot_plan.py", 1, 60)
    main.read("mlx_paged/request.py", 1, 60)
    main.say("The tokens that it saves beyond the snapshot before it.")
    main.ask("And who takes it?")
    main.read("mlx_paged/runner/recurrent_states.py", 1, 60)
    main.say("The runner copies the states after the piece of a chunk that ends there.")
    main.ask("Thank you. Anything else?")
    main.say("No.")
    return trace


@dataclass(frozen=True)
class Prompt:
    """A turn as tokens."""

    agent: str
    tokens: list[int]
    answer: list[int]
    turn_ends: tuple[int, ...]
    known: int  # leading tokens that an earlier turn has, too: none can reuse more


def encoded(turns: list[Turn], tokenizer: TokenizerWrapper) -> list[Prompt]:
    """The prompts of a trace and the places where later ones may depart from them."""

    def text_of_chat(messages: list[Message], **options: Any) -> str:
        options = {"tools": TOOLS, "chat_template": TEMPLATE, "tokenize": False} | options
        return str(tokenizer.apply_chat_template(messages, **options))

    encode = partial(tokenizer.encode, add_special_tokens=False)
    prompts, earlier = list[Prompt](), list[list[int]]()
    for turn in turns:
        text = text_of_chat(turn.messages, add_generation_prompt=True)
        whole = text_of_chat([*turn.messages, turn.answer])
        tokens, answer = list(encode(text)), list(encode(whole[len(text) :].removesuffix("\n")))
        known = max((common(tokens, each) for each in earlier), default=0)
        ends = turn_ends(tokenizer, text_of_chat, turn.messages, text, tokens)
        prompts.append(Prompt(turn.agent, tokens, answer, ends, min(known, len(tokens) - 1)))
        earlier.append(tokens + answer)
    return prompts


def common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def hybrid(name: str, size: dict[str, Any]) -> nn.Module:
    """A model of :data:`HYBRIDS` with random float32 weights."""
    module = import_module(f"mlx_lm.models.{name}")
    own, count = HYBRIDS[name], size["num_hidden_layers"]
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


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each turn the tokens reused, and the medians of the times of the first tokens."""
    tokenizer = load_model(str(demo_model_path()))[1]
    size = SIZES[args.size] | {"vocab_size": 1 + max(tokenizer.get_vocab().values())}
    models = {args.model: hybrid(args.model, size), "llama": random_llama(size)}
    prompts = encoded(make_trace(), tokenizer)
    blocks = sum(len(prompt.tokens) + len(prompt.answer) for prompt in prompts) // 16 + len(prompts)
    engines = {name: Engine(model, num_blocks=blocks) for name, model in models.items()}
    states = engines[args.model].manager.allocator.states
    assert isinstance(states, StateIds) and states.snapshots is not None
    kept = states.snapshots
    kept.max_snapshots = min(kept.max_snapshots, args.snapshots)
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
