"""What some tokens add to a choice, in the order in which the model wrote it. Imports no mlx."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
        found = [Delta()]
        for part in self.parts:
            before = found[-1].parts
            if before and ORDER.index(before[-1].kind) > ORDER.index(part.kind):
                found.append(Delta())
            found[-1].parts.append(part)
        found[-1].logprobs = self.logprobs
        return found

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "text")

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "reasoning")

    @property
    def tool_calls(self) -> list[Fields]:
        return [part.call for part in self.parts if part.kind == "tool_call"]


class Placed:
    """Gives the log-probabilities of tokens to the texts that they made. Text may become certain
    some tokens later; the tokens of a thought or of a call are those of no text."""

    def __init__(self) -> None:
        self._waiting: list[Fields] = []
        self._kind: Kind | None = None  # of the last part

    def place(self, delta: Delta, logprobs: Sequence[Fields], is_last: bool) -> None:
        """Give the entries of the newest tokens, and those that wait, to the last text of `delta`.

        Args:
            is_last: no tokens follow.
        """
        self._waiting += logprobs
        texts = [part for part in delta.parts if part.kind == "text"]
        if texts:
            texts[-1].logprobs += self._waiting
        if delta.parts:
            self._waiting, self._kind = [], delta.parts[-1].kind
        if is_last and self._kind == "text":  # of tokens without a text, for example the end token
            delta.write("text", "", self._waiting)
