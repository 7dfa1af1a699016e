"""What some tokens add to a choice, in the order in which the model wrote it. Imports no mlx."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mlx_paged.formats.events import Text

Fields = dict[str, Any]
Kind = Literal["text", "reasoning", "tool_call"]
ORDER: tuple[Kind, ...] = ("reasoning", "text", "tool_call")
"""In which clients read the parts of one event of a chat, which has a place for each kind."""


@dataclass(slots=True)
class Part:
    """A piece of one kind.

    Attributes:
        call: of a tool, in the API's form; empty for the other kinds.
        logprobs: one entry for each token of a text, if they are wanted.
    """

    kind: Kind
    text: str = ""
    call: Fields = field(default_factory=dict)
    logprobs: list[Fields] = field(default_factory=list)


@dataclass(slots=True)
class Delta:
    """The part of a choice that some tokens add.

    Attributes:
        parts: in their order; neighbors that are no calls differ in kind.
        logprobs: one entry for each token, whatever it is a part of, if they are wanted.
    """

    parts: list[Part] = field(default_factory=list)
    logprobs: list[Fields] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.parts or self.logprobs)

    def write(self, kind: Kind, text: str, logprobs: Sequence[Fields] = ()) -> None:
        """Add a text or a thought; nothing if it is empty."""
        if not text and not logprobs:
            return
        if not self.parts or self.parts[-1].kind != kind:
            self.parts.append(Part(kind))
        self.parts[-1].text += text
        self.parts[-1].logprobs += logprobs

    def call(self, call: Fields) -> None:
        """Add a call of a tool."""
        self.parts.append(Part("tool_call", call=call))

    def add(self, later: "Delta") -> None:
        """Add what later tokens add."""
        self.logprobs += later.logprobs
        for part in later.parts:
            if part.kind == "tool_call":
                self.parts.append(part)
            else:
                self.write(part.kind, part.text, part.logprobs)

    def in_order(self) -> list["Delta"]:
        """This delta as several, at least one, whose parts are each in :data:`ORDER`."""
        if len(self.parts) <= 1:
            return [self]
        deltas = [Delta()]
        for part in self.parts:
            before = deltas[-1].parts
            if before and ORDER.index(before[-1].kind) > ORDER.index(part.kind):
                deltas.append(Delta())
            deltas[-1].parts.append(part)
        deltas[-1].logprobs = self.logprobs
        return deltas

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "text")

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "reasoning")

    @property
    def tool_calls(self) -> list[Fields]:
        return [part.call for part in self.parts if part.kind == "tool_call"]


class _Made(NamedTuple):
    """Tokens and where the text is that they made: characters of what the parser got."""

    entries: list[Fields]
    start: int
    end: int


class Placed:
    """Gives the log-probabilities of tokens to the content that they made. Content may become
    certain some tokens later. Tokens of a thought, a call or a mark are not those of content."""

    def __init__(self) -> None:
        self._made: deque[_Made] = deque()
        self._without_text: list[Fields] = []  # the next token makes a character of theirs whole
        self._at = 0  # where the text of the newest token ends
        self._texts: deque[tuple[int, int]] = deque()  # places of content that is not taken yet

    def add(self, entry: Fields, end: int, is_end: bool = False) -> None:
        """Add a token.

        Args:
            entry: its log-probability.
            end: where the text ends that is known with it.
            is_end: it ends the answer, so that what becomes known is the text of earlier tokens.
        """
        start, self._at = self._at, end
        own = end if is_end else max(start, end - len(entry["token"]))
        if self._without_text and own > start:
            self._made.append(_Made(self._without_text, start, own))
            self._without_text = []
        self._without_text.append(entry)
        if end > own:
            self._made.append(_Made(self._without_text, own, end))
            self._without_text = []

    def expect(self, text: Text) -> None:
        """A content that is going to be taken."""
        self._texts.append((text.end - len(text.text), text.end))

    def take(self, length: int) -> list[Fields]:
        """The entries of the next `length` characters of content; none of an entry twice."""
        found = list[Fields]()
        while length and self._texts:
            start, end = self._texts.popleft()
            size = min(length, end - start)
            length -= size
            if start + size < end:
                self._texts.appendleft((start + size, end))
            self._forget(start)
            while self._made and self._made[0].start < start + size:
                found += self._made.popleft().entries
        return found

    def decide(self, end: int) -> None:
        """Note that the content of all text before `end` has been told."""
        self._forget(min(end, self._texts[0][0]) if self._texts else end)

    def _forget(self, end: int) -> None:
        while self._made and self._made[0].end <= end:
            self._made.popleft()
