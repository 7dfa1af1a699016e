"""The prompts of agents: a trace of tool calls, and what clients change in it later."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

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


def changed_loops(trace: list[Turn], percents: Sequence[int]) -> Iterator[tuple[str, list[Turn]]]:
    """What clients do to the last prompt of a trace, by name, and the two prompts that they send
    then: the text there is another one each time, as the state of a repository that is told in a
    system prompt, or there are no thoughts any more."""
    for percent in percents:
        yield f"{percent} %", [with_status(trace[-1], percent / 100, i) for i in (1, 2)]
    told = next(turn for turn in reversed(trace) if turn.messages[-1]["role"] == "tool")
    without = [message | {"reasoning_content": ""} for message in told.messages]
    asked = [*without, told.answer, {"role": "user", "content": "Go on."}]
    yield "thoughts", [replace(told, messages=each) for each in (without, asked)]


def with_status(turn: Turn, part: float, number: int) -> Turn:
    """A turn with a line after this part of its messages' characters."""
    left = int(part * sum(len(message["content"]) for message in turn.messages))
    messages = [*turn.messages]
    for i, message in enumerate(messages):
        content = message["content"]
        if left <= len(content):
            status = f"\n[{number} files have changed]\n"
            messages[i] = message | {"content": content[:left] + status + content[left:]}
            break
        left -= len(content)
    return replace(turn, messages=messages)
