"""What a parser finds in an answer."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """Content of the answer. `end` is where the text ends, in characters of all that the parser
    got."""

    text: str
    end: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function. `arguments` is the text of a JSON object, as the model wrote it where
    the format has JSON; `id` is the model's own name of the call."""

    name: str
    arguments: str
    id: str | None = None


Event = Text | Thought | Call


class NoCall(Exception):
    """A text is no well-formed call of the format."""
