"""Answers of several messages, each with a header that says what it is."""

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

from mlx_paged.formats.events import Call, Event, NoCall, Text, Thought
from mlx_paged.formats.format import Format
from mlx_paged.formats.parser import Begin, Parser, possible_start
from mlx_paged.formats.scan import MAX_HEAD
from mlx_paged.formats.schemas import Tools


class Message(NamedTuple):
    """What a header says of its message.

    Attributes:
        recipient: who is called.
    """

    kind: Literal["thought", "content", "call"]
    recipient: str = ""


FIRST = {Begin.THOUGHT: Message("thought"), Begin.CONTENT: Message("content")}
"""The message that a prompt has opened."""


class Channels(Format):
    """A format of messages with headers. A family gives the coded texts below, when it is made.

    Attributes:
        start: begins a message, before its header.
        message: ends a header.
        ends: end a message.
        firsts: how the first header may begin, after white space, and an answer without one not.
    """

    start: str
    message: str
    ends: tuple[str, ...]
    firsts: tuple[str, ...]

    @property
    def thinks(self) -> bool:
        return True

    def message_of(self, header: str) -> Message:
        """What a header says, which is coded text."""
        raise NotImplementedError

    def calls_of(self, recipient: str, coded: str, is_whole: bool, tools: Tools) -> list[Call]:
        """The calls that a message is.

        Args:
            coded: the text of the message.
            is_whole: it has come to its end.

        Raises:
            NoCall: it is no well-formed call.
        """
        raise NotImplementedError

    def parser(
        self,
        tools: Sequence[Any],
        begin: Begin,
        is_data: bool = False,
        allowed: Collection[str] | None = None,
    ) -> Parser:
        return Messages(self, begin, Tools(tools, allowed=allowed))

    def begin(self, generation_prompt: str, continued: str | None) -> Begin:
        if continued is not None:
            return Begin.CONTENT
        said = self.marks.coded_text(generation_prompt)
        header, message, _ = said.rpartition(self.start)[2].rpartition(self.message)
        if not message:
            return Begin.START
        return Begin.THOUGHT if self.message_of(header).kind == "thought" else Begin.CONTENT


class Messages:
    """The parser of an answer of messages. Without tools none of them is a call."""

    def __init__(self, form: Channels, begin: Begin, tools: Tools) -> None:
        self._form = form
        self._tools = tools
        self._rest = ""  # coded text that is not certain yet
        self._header = ""  # the text of a header that is open
        self._body = ""  # of a call
        self._message = FIRST.get(begin)  # which is open; None: its header is
        self._has_begun = False  # whether the mark before a header has come
        self._firsts = form.firsts  # how this header may begin
        self._is_ended = self._is_cut = False
        self.fed = 0

    @property
    def decided(self) -> int:
        length = self._form.marks.length
        return self.fed - sum(map(length, (self._header, self._body, self._rest)))

    @property
    def thinks(self) -> bool:
        return self._message is not None and self._message.kind == "thought"

    @property
    def _is_call(self) -> bool:
        is_call = self._message is not None and self._message.kind == "call"
        return is_call and bool(self._tools.given)

    def feed(self, token: int | None, text: str) -> list[Event]:
        coded = self._form.marks.coded(token, text)
        self._rest += coded
        self.fed += self._form.marks.length(coded)
        return self._read()

    def finish(self, is_cut: bool) -> list[Event]:
        self._is_ended, self._is_cut = True, is_cut
        return self._read()

    def _read(self) -> list[Event]:
        events: list[Event] = []
        while self._read_header() if self._message is None else self._read_body(events):
            pass
        return [event for event in events if isinstance(event, Call) or event.text]

    def _read_header(self) -> bool:
        """Read up to the mark before a message. Returns whether there is more to read."""
        form = self._form
        self._header, self._rest = self._header + self._rest, ""
        at = self._header.find(form.message, 0, MAX_HEAD)
        if at >= 0 and (self._has_begun or self._begins(self._header[:at])):
            self._message = form.message_of(self._header[:at].rpartition(form.start)[2])
            self._rest, self._header = self._header[at + len(form.message) :], ""
            self._has_begun = True
            return True
        is_too_long = len(self._header) >= MAX_HEAD
        if not self._is_ended and not is_too_long and self._may_be_header():
            return False
        is_header = self._has_begun or self._header.lstrip().startswith(self._firsts)
        is_header = is_header and not is_too_long
        self._message = Message("content")
        self._rest, self._header = "" if is_header else self._header, ""  # one that was cut
        return True

    def _begins(self, header: str) -> bool:
        """Whether a text can be the first header, or nothing is in this."""
        said = header.lstrip()
        return not said or said.startswith(self._firsts)

    def _may_be_header(self) -> bool:
        """Whether the text so far can be that of a header; a model may forget it."""
        said, firsts = self._header.lstrip(), self._firsts
        is_begun = any(first.startswith(said) for first in firsts)
        return self._has_begun or is_begun or self._begins(said)

    def _read_body(self, events: list[Event]) -> bool:
        rest, marks = self._rest, (*self._form.ends, self._form.start)
        found = [(at, mark) for mark in marks if (at := rest.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._tell(rest[:at], rest[at:], True, events)
            self._rest = rest[at + len(mark) :]
            self._message, self._has_begun = None, mark == self._form.start
            self._firsts = (*self._form.firsts, "assistant")
            return bool(self._rest)
        kept = 0 if self._is_ended else possible_start(rest, marks)
        certain, self._rest = rest[: len(rest) - kept], rest[len(rest) - kept :]
        self._tell(certain, self._rest, self._is_ended and not self._is_cut, events)
        return False

    def _tell(self, coded: str, rest: str, is_whole: bool, events: list[Event]) -> None:
        """Tell of new text of the open message, which is whole with it or not; of a call when it is
        whole, or ended. `rest` is after the text."""
        assert self._message is not None
        end = self.fed - self._form.marks.length(rest)
        if not self._is_call:
            text = self._form.marks.plain(coded)
            events.append(Thought(text) if self.thinks else Text(text, end))
            return
        self._body += coded
        if not (is_whole or self._is_ended):
            return
        body, self._body = self._body, ""
        try:
            calls = self._form.calls_of(self._message.recipient, body, is_whole, self._tools)
            if not self._tools.allow(calls):
                raise NoCall
            events += calls
        except NoCall:
            events.append(Text(self._form.marks.plain(body), end))
