"""OpenAI's Harmony, which gpt-oss writes: an answer is several messages, each in a channel.

    <|channel|>analysis<|message|>A thought.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>The answer.<|return|>

A message of the channel analysis is a thought. A message with a recipient is a call. Others are
content.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import Any

from mlx_paged.formats.channels import Channels, Message
from mlx_paged.formats.events import Call, NoCall
from mlx_paged.formats.format import LEADING, Limit
from mlx_paged.formats.grammar import ANY_TEXT, Function, json_rule
from mlx_paged.formats.json_text import is_json
from mlx_paged.formats.marks import Marks, quoted
from mlx_paged.formats.parser import Begin
from mlx_paged.formats.scan import checked_name
from mlx_paged.formats.schemas import Tools

_RECIPIENT = re.compile(r"\bto=(\S+)")
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")  # names of a thought in a message
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_PEOPLE = {"assistant", "user", "all", "self"}  # recipients that are no functions


class Harmony(Channels):
    """The marks of Harmony."""

    name = "harmony"
    aliases = ("gpt_oss",)
    tokens = "<|channel|>", "<|message|>", "<|start|>"
    final_marks = "<|return|>", "<|call|>"
    efforts = _EFFORTS

    def __init__(self, marks: Marks, *options: Any) -> None:
        super().__init__(marks, None)
        names = ("start", "channel", "message", "constrain", "end", "return", "call")
        codes = {name: marks.code(f"<|{name}|>") for name in names}
        self.start, self.channel, self.message = (codes[name] for name in names[:3])
        self.constrain = codes["constrain"]
        self.ends = tuple(codes[name] for name in ("end", "return", "call"))

        self.firsts = self.channel, self.start, self.message, "to="

    def message_of(self, header: str) -> Message:
        plain = header.replace(self.constrain, " ").replace(self.channel, " ")
        recipient = _RECIPIENT.search(plain)
        if recipient and recipient[1] not in _PEOPLE:
            return Message("call", recipient[1])
        channel = header.partition(self.channel)[2].split(maxsplit=1)[:1]
        return Message("thought" if channel == ["analysis"] else "content")

    def calls_of(self, recipient: str, coded: str, is_whole: bool, tools: Tools) -> list[Call]:
        arguments = self.marks.plain(coded).strip() or "{}"
        if not is_whole or arguments[0] != "{" or not is_json(arguments):
            raise NoCall
        return [Call(checked_name(recipient.removeprefix("functions.")), arguments)]

    def limit(self, may_call: bool) -> Limit:
        forced = "<|end|><|start|>assistant<|channel|>"  # which channel is open if it may call
        forced = forced if may_call else f"{forced}final<|message|>"
        return Limit("<|channel|>analysis<|message|>", "<|end|>", forced)

    def history(
        self, messages: list[dict[str, Any]], has_tools: bool = False
    ) -> list[dict[str, Any]]:
        """The templates know thoughts as `thinking`, one call in a turn, and no content beside it.
        So each call is a turn of its own, which the result of the call follows. Instructions are
        the first turn only."""
        found, at = list[dict[str, Any]](), 0
        messages = _instructed(messages)
        answers = [
            i
            for i, message in enumerate(messages)
            if message.get("role") == "assistant" and not message.get("tool_calls")
        ]
        while at < len(messages):
            message, at = messages[at], at + 1
            if message.get("role") != "assistant":
                found.append(message)
                continue
            after = islice(messages, at, None) if message.get("tool_calls") else ()
            results = list(takewhile(lambda each: each.get("role") == "tool", after))
            found += _said(message, results, is_over=bool(answers) and answers[-1] >= at)
            at += len(results)
        return found

    def declared(self, tools: Sequence[Any]) -> Sequence[Any]:
        """The templates take no function without a description."""
        return [*map(_described, tools)]

    def around(self, begin: Begin, parts: Sequence[str]) -> list[str]:
        """Content is the text of the channel final only."""
        if begin == Begin.CONTENT:
            return []
        text, code = f"{ANY_TEXT} {self.marks.lark(self.ends[0])}", self.marks.lark
        next_message = f'{code(self.start)} "assistant"'
        final = f"{code(self.channel + 'final' + self.message)} content"
        answers = " | ".join(final if part == "content" else part for part in parts)
        first = f"{text} {next_message} " if begin == Begin.THOUGHT else ""
        thought = f"{code(self.channel + 'analysis' + self.message)} {text} {next_message}"
        return [f"start: {first}thought* ({answers})", f"thought: {thought}"]

    def rules(self, functions: Sequence[Function], several: bool) -> list[str]:
        code = self.marks.lark
        named = " | ".join(f"call_{i}" for i in range(len(functions)))
        begin = code(f"{self.channel}commentary to=functions.")
        data = code(f" {self.constrain}json{self.message}")
        more = f'({code(self.ends[0] + self.start)} "assistant" call)*' if several else ""
        return [
            f"calls: call {more}",
            f"call: {begin} ({named})",
            *(
                f"call_{i}: {quoted(function.name)} {data} {json_rule(function.schema)}"
                for i, function in enumerate(functions)
            ),
        ]


def _instructed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat whose instructions are one turn, the first. The templates leave out others."""
    leading = [each for each in messages if each.get("role") in LEADING]
    if not leading or (len(leading) == 1 and messages[0] is leading[0]):
        return messages
    others = [each for each in messages if each.get("role") not in LEADING]
    texts = [each["content"] for each in leading if each.get("content")]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _described(tool: Any) -> Any:
    """A tool with a description, which may be empty."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("description"), str):
        return tool
    return tool | {"function": function | {"description": ""}}


def _said(
    message: dict[str, Any], results: list[dict[str, Any]], is_over: bool
) -> Iterator[dict[str, Any]]:
    """The turns that a message of the assistant becomes, with the results of its calls.

    Args:
        is_over: an answer without calls comes later. The templates leave out the thoughts before
            such an answer, and content beside a call with them.
    """
    thought = next(filter(None, map(message.get, _THOUGHTS)), None)
    calls, content = message.get("tool_calls") or [], message.get("content")
    others = (*_THOUGHTS, "tool_calls")
    turn = {name: value for name, value in message.items() if name not in others}
    if content and is_over and calls:
        yield {name: message[name] for name in ("role", "content")}
    elif content and calls:
        thought = f"{thought}\n\n{content}" if thought else content
    thinking = {"thinking": thought} if thought else {}
    if not calls:
        yield turn | thinking
    for i, call in enumerate(calls):
        yield turn | thinking | {"content": "", "tool_calls": [call]}
        thinking = {}
        is_last = i == len(calls) - 1
        own = [each for each in results if is_last or each.get("tool_call_id") == call.get("id")]
        results = [each for each in results if each not in own]
        yield from own
