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

from mlx_paged.formats.events import Call, Event, NoCall, Text, Thought
from mlx_paged.formats.format import Format, Limit
from mlx_paged.formats.grammar import ANY_TEXT, Function, json_rule
from mlx_paged.formats.json_text import is_json
from mlx_paged.formats.marks import Marks, quoted
from mlx_paged.formats.parser import Begin, Parser, possible_start
from mlx_paged.formats.scan import checked_name

_RECIPIENT = re.compile(r"\bto=(\S+)")
_CHANNEL = re.compile(r"\s*(\w+)")
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")  # names of a thought in a message
_PEOPLE = {"assistant", "user", "all", "self"}  # recipients that are no functions


class Harmony(Format):
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

    def parser(self, tools: Sequence[Any], begin: Begin, is_data: bool = False) -> Parser:
        return Channels(self, begin, bool(tools))

    @property
    def thinks(self) -> bool:
        return True

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

    def begin(self, generation_prompt: str, continued: str | None) -> Begin:
        if continued is not None:
            return Begin.CONTENT
        said = self.marks.coded_text(generation_prompt)
        header, message, _ = said[said.rfind(self.start) :].partition(self.message)
        if not message:
            return Begin.START
        return Begin.THOUGHT if "analysis" in header else Begin.CONTENT


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


class Channels:
    """The parser of an answer in channels.

    Args:
        may_call: whether a message with a recipient is a call.
    """

    def __init__(self, form: Harmony, begin: Begin, may_call: bool) -> None:
        self._form = form
        self._may_call = may_call
        self._rest = ""  # coded text that is not certain yet
        self._header = ""  # of the message that is open; its text while `_is_header`
        self._is_header = begin == Begin.START
        self._channel = "analysis" if begin == Begin.THOUGHT else "final"
        self._recipient = ""
        self._has_begun = False  # whether a mark has come
        self._is_ended = self._is_cut = False

    @property
    def thinks(self) -> bool:
        return not self._is_header and self._channel == "analysis" and not self._recipient

    def feed(self, token: int | None, text: str) -> list[Event]:
        self._rest += self._form.marks.coded(token, text)
        return self._read()

    def finish(self, is_cut: bool) -> list[Event]:
        self._is_ended, self._is_cut = True, is_cut
        return self._read()

    def _read(self) -> list[Event]:
        events: list[Event] = []
        while self._read_header(events) if self._is_header else self._read_body(events):
            pass
        return [event for event in events if not isinstance(event, Text | Thought) or event.text]

    def _read_header(self, events: list[Event]) -> bool:
        """Read up to the mark before a message. Returns whether there is more to read."""
        form = self._form
        self._header += self._rest
        self._rest = ""
        header, is_whole, rest = self._header.partition(form.message)
        if is_whole:
            self._open(header)
            self._rest, self._header, self._is_header = rest, "", False
            return True
        if not self._is_ended and self._may_be_header():
            return False
        self._is_header, self._channel, self._recipient = False, "final", ""
        self._rest, self._header = self._header, ""
        if self._has_begun or self._rest.startswith(form.channel):  # a header that was cut
            self._rest = ""
        return True

    def _may_be_header(self) -> bool:
        """Whether the text so far can be that of a header; a model may forget it at first."""
        said, form = self._header.lstrip(), self._form
        firsts = (form.channel, form.start, form.message, "to=")
        is_first = said.startswith(firsts) or any(first.startswith(said) for first in firsts)
        return self._has_begun or is_first

    def _open(self, header: str) -> None:
        """A message begins."""
        form, self._has_begun = self._form, True
        header = header.rpartition(form.start)[2]
        plain = header.replace(form.constrain, " ").replace(form.channel, " ")
        recipient = _RECIPIENT.search(plain)
        _, _, behind = header.partition(form.channel)
        channel = _CHANNEL.match(behind)
        self._channel = channel[1] if channel else "final"
        self._recipient = recipient[1] if recipient and recipient[1] not in _PEOPLE else ""

    def _read_body(self, events: list[Event]) -> bool:
        form, rest = self._form, self._rest
        marks = (*form.ends, form.start)
        found = [(at, mark) for mark in marks if (at := rest.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._tell(rest[:at], True, events)
            self._rest = rest[at + len(mark) :]
            self._is_header, self._has_begun = True, True
            return bool(self._rest)
        if self._recipient and self._may_call:
            if self._is_ended:
                self._tell(rest, not self._is_cut, events)
                self._rest = ""
            return False
        kept = 0 if self._is_ended else possible_start(rest, marks)
        self._tell(rest[: len(rest) - kept], False, events)
        self._rest = rest[len(rest) - kept :]
        return False

    def _tell(self, coded: str, is_whole: bool, events: list[Event]) -> None:
        """Tell of text of the open message."""
        text = self._form.marks.plain(coded)
        if self._recipient and self._may_call:
            try:
                events.append(_call(self._recipient, text, is_whole))
            except NoCall:
                events.append(Text(text))
        else:
            events.append(Thought(text) if self.thinks else Text(text))


def _call(recipient: str, text: str, is_whole: bool) -> Call:
    """The call that a message is. Raises NoCall if it is cut or its text is no JSON object."""
    arguments = text.strip() or "{}"
    if not is_whole or arguments[0] != "{" or not is_json(arguments):
        raise NoCall
    return Call(checked_name(recipient.removeprefix("functions.")), arguments)
