"""Parsers divide an answer into events while it comes, token by token."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from mlx_paged.formats.events import Call, Event, NoCall, Text, Thought
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.scan import Calls, Effort, Scan
from mlx_paged.formats.schemas import Tools
from mlx_paged.formats.thoughts import Thoughts


class Begin(Enum):
    """Where an answer begins."""

    START = "start"  # nothing of the answer is known: it may open a thought
    THOUGHT = "thought"  # the prompt has opened a thought
    CONTENT = "content"  # the prompt ends in the content of the answer


class Parser(Protocol):
    """Divides one answer."""

    @property
    def thinks(self) -> bool:
        """Whether the newest token belongs to a thought."""

    @property
    def fed(self) -> int:
        """Characters of all tokens; a mark that is a token has those of its text."""

    @property
    def decided(self) -> int:
        """Those at the beginning of which is told what they are."""

    def feed(self, token: int | None, text: str) -> list[Event]:
        """Add a token. Returns what is certain now.

        Args:
            token: its id, which decides whether it is a mark; None if it is not known.
            text: what the detokenizer adds with this token.
        """

    def finish(self, is_cut: bool) -> list[Event]:
        """End the answer. Returns the rest of it.

        Args:
            is_cut: the model has not ended the answer itself. A call that is not complete is text.
        """


class Whole:
    """A parser that finds nothing: every token is content."""

    thinks = False

    def __init__(self) -> None:
        self.fed = 0

    @property
    def decided(self) -> int:
        return self.fed

    def feed(self, token: int | None, text: str) -> list[Event]:
        self.fed += len(text)
        return [Text(text, self.fed)] if text else []

    def finish(self, is_cut: bool) -> list[Event]:
        return []


class CallFormat(Protocol):
    """What :class:`Inline` needs of a format."""

    @property
    def openers(self) -> tuple[str, ...]: ...
    @property
    def first_openers(self) -> tuple[str, ...]: ...

    def call(self, scan: Scan, tools: Tools) -> Calls: ...


class Inline:
    """A parser of formats that write thoughts and calls into one text, between marks.

    Args:
        marks: those of the model.
        thoughts: the marks of a thought in coded text; None if the model does not think.
        calls: the format of calls; None if nothing is a call.
        tools: what the request declares.
        begin: where the answer begins.
        is_data: the content follows a schema or a grammar: nothing in it is a call.

    Attributes:
        silent: coded texts in the content that are not told.
    """

    silent: Sequence[str] = ()

    def __init__(
        self,
        marks: Marks,
        thoughts: Thoughts | None,
        calls: CallFormat | None,
        tools: Tools,
        begin: Begin = Begin.START,
        is_data: bool = False,
    ) -> None:
        self._marks = marks
        self._thoughts = thoughts
        self._calls = calls
        self._tools = tools
        self._state = begin if thoughts or begin != Begin.THOUGHT else Begin.START
        self._is_data = is_data
        self._rest = ""  # coded text that is not certain yet
        self._blanks = ""  # white space before it, which has no mark
        self._effort = Effort()
        self._is_empty = begin != Begin.CONTENT  # no content but white space since the last call
        self._has_called = False
        self._scan: Scan | None = None  # of the call that has begun at the beginning of `_rest`
        self._steps: Calls | None = None
        self._space = ""  # before that call, told only if it is none
        self._late: list[tuple[list[Call], str]] = []  # calls in a thought, with their text
        self._is_ended = self._is_cut = False
        self.fed = 0

    @property
    def thinks(self) -> bool:
        return self._state == Begin.THOUGHT

    @property
    def decided(self) -> int:
        return self._end_before(self._rest if self._scan is None else self._scan.text)

    def _end_before(self, rest: str) -> int:
        """Where the text before `rest` ends, which are the newest characters of coded text."""
        return self.fed - self._marks.length(rest)

    def feed(self, token: int | None, text: str) -> list[Event]:
        return self._add(self._marks.coded(token, text))

    def finish(self, is_cut: bool) -> list[Event]:
        self._is_ended, self._is_cut = True, is_cut
        return self._add("")

    def _add(self, coded: str) -> list[Event]:
        events: list[Event] = []
        self.fed += self._marks.length(coded)
        if self._scan is None:
            self._rest += coded
        else:
            self._scan.text += coded
        while self._go_on(events):
            pass
        return events

    def _go_on(self, events: list[Event]) -> bool:
        """Read as far as the state goes. Returns whether there is more to read."""
        if self._scan is not None:
            return self._read_call(self._scan, events)
        if self._state == Begin.START:
            return self._read_start()
        if self._state == Begin.THOUGHT:
            return self._read_thought(events)
        return self._read_content(events)

    def _read_start(self) -> bool:
        """Look for a thought, which begins before the first character that is not white space."""
        said = self._without_blanks()
        start = self._thoughts.start if self._thoughts else ""
        if start and said.startswith(start):
            self._rest, self._blanks = said[len(start) :], ""
            self._state = Begin.THOUGHT
            return True
        if start.startswith(said) and start != said and not self._is_ended:
            return False
        self._state = Begin.CONTENT
        return True

    def _without_blanks(self) -> str:
        """The rest, of which white space at its beginning is apart from now on."""
        said = self._rest.lstrip()
        self._blanks += self._rest[: len(self._rest) - len(said)]
        self._rest = said
        return said

    def _taken(self, end: int) -> str:
        """The text up to a position of the rest, with the white space before it, which is apart no
        longer."""
        text, self._blanks = self._blanks + self._rest[:end], ""
        return text

    def _read_thought(self, events: list[Event]) -> bool:
        assert self._thoughts is not None
        if self._late and not self._are_late_told(events):
            return False
        end, openers = self._thoughts.end, self._openers
        marks = [end, *openers]
        found = [(at, mark) for mark in marks if (at := self._rest.find(mark)) >= 0]
        if not found:
            kept = 0 if self._is_ended else possible_start(self._rest, marks)
            self._tell_thought(self._rest[: len(self._rest) - kept], events)
            self._rest = self._rest[len(self._rest) - kept :]
            return False
        at, mark = min(found)
        if not self._late:
            self._tell_thought(self._rest[:at], events)
        if mark in openers:
            self._begin_call(at, events)
            return True
        self._rest = self._rest[at + len(end) :]
        self._state = Begin.CONTENT
        return True

    def _are_late_told(self, events: list[Event]) -> bool:
        """Calls in a thought count if the model ends its answer after them: it has forgotten to
        end the thought. Before another text they are part of the thought. Returns whether the
        rest can be read."""
        said = self._without_blanks()
        may_begin = any(opener.startswith(said[: len(opener)]) for opener in self._openers)
        if may_begin and not self._is_ended:
            return said.startswith(tuple(self._openers))
        if self._is_ended and not self._is_cut and not said:
            events += [call for calls, _ in self._late for call in calls]
            self._rest = self._blanks = ""
        elif not said.startswith(tuple(self._openers)):
            self._tell_thought("".join(text for _, text in self._late) + self._taken(0), events)
            self._late = []
        return bool(self._rest)

    def _tell_thought(self, coded: str, events: list[Event]) -> None:
        if coded:
            events.append(Thought(self._marks.plain(coded)))

    def _read_content(self, events: list[Event]) -> bool:
        marks = [*self.silent, *self._openers]
        kept = 0 if self._is_ended else possible_start(self._rest, marks)
        places = [(self._rest.find(mark), -len(mark), mark) for mark in marks]
        found = [place for place in places if 0 <= place[0] < len(self._rest) - kept]
        first = self._first_opener()
        if first is not None:
            found.append(first)
        if found:
            at, _, mark = min(found)  # the longest of those that begin first
            is_call = mark not in self.silent
            if is_call and not (self._is_data and self._rest[:at].strip()):
                self._begin_call(at, events)
                return True
            before, rest = self._taken(at), self._rest[at:]
            is_told = bool(before.strip()) or not self._is_empty
            self._tell_content(before if is_told else "", rest, events)
            self._rest = rest[0 if is_call else len(mark) :]
            return True
        num_certain = len(self._rest) - kept
        certain, rest = self._rest[:num_certain], self._rest[num_certain:]
        if self._is_empty and (marks or self._calls) and not certain.strip():
            if not self._is_ended:  # white space beside calls is not told
                self._blanks += certain
                self._rest = rest
                return False
            before = "" if self._has_called else self._taken(len(certain))
        else:
            before = self._taken(len(certain))
        self._rest = rest
        self._tell_content(before, rest, events)
        return False

    def _tell_content(self, coded: str, rest: str, events: list[Event]) -> None:
        """Tell the text before `rest`, which are the newest characters."""
        if coded:
            self._is_empty = False
            events.append(Text(self._marks.plain(coded), self._end_before(rest)))

    @property
    def _openers(self) -> Sequence[str]:
        is_over = self._is_data and not self._is_empty
        return [] if self._calls is None or is_over else self._calls.openers

    def _first_opener(self) -> tuple[int, int, str] | None:
        """Where the content begins with a mark that begins a call only there, its negative length,
        and this mark."""
        said = self._rest.lstrip()
        if self._calls is None or not self._is_empty:
            return None
        marks = [mark for mark in self._calls.first_openers if said.startswith(mark)]
        return (len(self._rest) - len(said), -len(marks[0]), marks[0]) if marks else None

    def _begin_call(self, at: int, events: list[Event]) -> None:
        """Tell the text before the mark of a call, which is at `at`, and begin to read the call."""
        assert self._calls is not None
        before = self._taken(at)
        self._scan, self._rest = Scan(self._rest[at:], self._effort), ""
        self._steps = self._calls.call(self._scan, self._tools)
        if self.thinks:  # what is before has been told, or is white space between calls
            self._space = before if self._late else ""
            return
        self._space = before if self._is_empty and not before.strip() else ""
        if before and not self._space:
            self._tell_content(before, self._scan.text, events)

    def _read_call(self, scan: Scan, events: list[Event]) -> bool:
        assert self._steps is not None and self._calls is not None
        scan.is_ended, scan.is_cut = self._is_ended, self._is_cut
        try:
            next(self._steps)
            return False
        except StopIteration as done:
            self._rest = scan.text[scan.at :]
            self._take_calls(done.value, scan.text[: scan.at], events)
        except NoCall:
            if scan.kept:
                self._rest = scan.text[scan.kept_at :]
                self._take_calls(scan.kept, scan.text[: scan.kept_at], events)
            else:
                openers = (*self._calls.openers, *self._calls.first_openers)
                opener = max((o for o in openers if scan.text.startswith(o)), key=len)
                self._rest = scan.text[len(opener) :]
                self._tell_as_text(self._space + opener, events)
        self._scan = self._steps = None
        return True

    def _take_calls(self, calls: list[Call], text: str, events: list[Event]) -> None:
        """Tell calls, which `text` has. Calls in a thought wait for what follows them. Calls that
        may not be made are text."""
        if not self._tools.allow(calls):
            self._tell_as_text(self._space + text, events)
        elif self.thinks:
            self._late.append((calls, self._space + text))
        else:
            self._is_empty = self._has_called = True
            events += calls

    def _tell_as_text(self, coded: str, events: list[Event]) -> None:
        """Tell text that is no call, with the white space before it."""
        if self.thinks:
            self._tell_thought("".join(text for _, text in self._late) + coded, events)
            self._late = []
        else:
            self._tell_content(coded, self._rest, events)


def possible_start(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of one of the marks."""
    return max(
        (
            length
            for mark in marks
            for length in range(min(len(mark) - 1, len(text)), 0, -1)
            if text.endswith(mark[:length])
        ),
        default=0,
    )
