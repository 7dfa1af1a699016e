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
from mlx_paged.formats.format import Limit
from mlx_paged.formats.grammar import ANY_TEXT, Function, json_rule
from mlx_paged.formats.json_text import is_json
from mlx_paged.formats.marks import Marks, quoted
from mlx_paged.formats.parser import Begin
from mlx_paged.formats.scan import checked_name
from mlx_paged.formats.schemas import Tools

_RECIPIENT = re.compile(r"\bto=(\S+)")
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")  # names of a thought in a message
_PEOPLE = {"assistant", "user", "all", "self"}  # recipients that are no functions


class Harmony(Channels):
    """The marks of Harmony."""

    name = "harmony"
    aliases = ("gpt_oss",)
    tokens = "<|channel|>", "<|message|>", "<|start|>"
    final_marks = "<|return|>", "<|call|>"

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

    def history(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The templates know thoughts as `thinking`, one call in a turn, and no content beside it.
        So each call is a turn of its own, which the result of the call follows."""
        found, at = list[dict[str, Any]](), 0
        while at < len(messages):
            message, at = messages[at], at + 1
            if message.get("role") != "assistant":
                found.append(message)
                continue
            behind = islice(messages, at, None) if message.get("tool_calls") else ()
            results = list(takewhile(lambda each: each.get("role") == "tool", behind))
            found += _said(message, results)
            at += len(results)
        return found

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


def _said(message: dict[str, Any], results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The turns that a message of the assistant becomes, with the results of its calls."""
    thought = message.get("reasoning_content") or message.get("reasoning")
    turn = {"thinking": thought} | message if thought else message
    calls = message.get("tool_calls") or []
    if not calls:
        yield turn
        return
    if message.get("content"):
        yield {name: message[name] for name in ("role", "content")}
    for i, call in enumerate(calls):
        yield turn | {"content": "", "tool_calls": [call]}
        turn = {name: value for name, value in turn.items() if name not in _THOUGHTS}
        is_last = i == len(calls) - 1
        own = [each for each in results if is_last or each.get("tool_call_id") == call.get("id")]
        results = [each for each in results if each not in own]
        yield from own
