"""Checks a format: tables of cases, and random calls that are rendered and read again.

A family's test module has a table of :class:`Case` and a renderer, which is written after the
family's documentation, and calls :func:`check_case` and :func:`check_round_trips`. With
``FORMAT_ROUNDS=10000`` in the environment each of these reads so many answers.
"""

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from mlx_paged.formats.events import Call, Event, Text, Thought
from mlx_paged.formats.format import Format
from mlx_paged.formats.marks import Marks
from mlx_paged.formats.parser import Begin
from mlx_paged.formats.thoughts import STYLES
from tests.support.formats.random_calls import random_call, random_tools

Parts = Sequence[str]
"""A text in parts. Each :class:`Mark` among them is a token, where the marks are tokens."""


class Mark(str):
    """A mark of the format, not text that looks like it."""


class Case(NamedTuple):
    """An answer, and what is in it.

    Attributes:
        parts: of the answer, or the answer as one text.
        expected: events, in which text or thoughts in a row are one event.
        options: of :func:`read`.
    """

    name: str
    parts: Parts | str
    expected: list[Event]
    options: Mapping[str, Any] = MappingProxyType({})


def function(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


F = function("f", x={"type": "string"}, n={"type": "integer"})
G = function("g", y={"type": "string"})
TOOLS = [F, G]


def made(kind: type[Format], marks: Sequence[str], style: str | None = "think") -> Format:
    """A format of a model whose tokens are `marks`."""
    thoughts = STYLES[style] if style else None
    return kind(Marks({mark: i for i, mark in enumerate(marks)}), thoughts)


def read(
    form: Format,
    parts: Parts,
    width: int | random.Random,
    *,
    tools: Sequence[Any] = TOOLS,
    is_cut: bool = False,
    begin: Begin = Begin.START,
    is_data: bool = False,
) -> list[Event]:
    """The events of an answer whose text comes `width` characters at a time, or at random. Marks
    are tokens if the vocabulary of `form` has them."""
    parser = form.parser(tools, begin, is_data)
    events: list[Event] = []
    for token, text in _tokens(form, parts, width):
        events += parser.feed(token, text)
    return merged(events + parser.finish(is_cut))


def _tokens(form: Format, parts: Parts, width: int | random.Random) -> Any:
    vocab = form.marks._vocab
    for part in parts:
        if isinstance(part, Mark) and part in vocab:
            yield vocab[part], str(part)
            continue
        at = 0
        while at < len(part):
            size = width if isinstance(width, int) else width.choice((1, 1, 2, 3, 7, 50))
            yield None, str(part[at : at + size])
            at += size


def merged(events: Sequence[Event]) -> list[Event]:
    """The events, in which text or thoughts in a row are one event."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Text | Thought) and type(event) is type(last):
            found[-1] = type(event)(last.text + event.text)
        elif isinstance(event, Call) or event.text:
            found.append(event)
    return found


def check_case(kind: type[Format], marks: Sequence[str], case: Case) -> None:
    """A case comes out, whether marks are tokens or text and whatever the pieces are."""
    parts = [case.parts] if isinstance(case.parts, str) else case.parts
    options = dict(case.options)
    style = options.pop("style", "think")
    for tokens in options.pop("vocabularies", (marks, ())):
        for width in (1, 3, 10_000):
            found = read(made(kind, tokens, style), parts, width, **options)
            assert found == case.expected, (case.name, tokens, width)


def check_round_trips(
    kind: type[Format],
    marks: Sequence[str],
    render: Callable[[list[tuple[str, dict[str, Any]]], random.Random], list[Parts]],
    *,
    quotes: Sequence[str],
    rounds: int,
    seed: int = 0,
    cuts: int = 3,
    shares: bool = False,
) -> None:
    """Random calls come out of what `render` makes of them, also if the answer is cut.

    Args:
        render: gives the parts of each wrapper, for names with arguments.
        quotes: texts that look like marks, for values of strings.
        cuts: how often an answer is cut, at random.
        shares: several calls share a wrapper, and each is complete before this is.
    """
    rng = random.Random(seed)
    for i in range(int(os.environ.get("FORMAT_ROUNDS", rounds))):
        form = made(kind, marks if i % 2 else (), None)
        tools = random_tools(rng)
        calls = [random_call(rng, tools, quotes) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        wrappers = render(calls, rng)
        parts = [part for wrapper in wrappers for part in wrapper]
        events = read(form, parts, rng, tools=tools)
        assert as_values(events) == calls, "".join(parts)
        for _ in range(cuts):
            check_cut(form, wrappers, calls, tools, shares, rng)


def as_values(events: Sequence[Event]) -> list[Any]:
    """Names and arguments of the calls; another event stays as it is."""
    return [
        (event.name, strict_json(event.arguments)) if isinstance(event, Call) else event
        for event in events
    ]


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def check_cut(
    form: Format,
    wrappers: list[Parts],
    calls: list[Any],
    tools: Any,
    shares: bool,
    rng: random.Random,
) -> None:
    """The calls of whole wrappers stay; a wrapper that is cut is text, behind complete calls that
    share it."""
    count, rest = rng.randrange(len(wrappers)), list[str]()
    last = [*wrappers[count]]
    for part in last[: rng.randrange(len(last))]:
        rest.append(part)
    if len(rest) < len(last) and not isinstance(last[len(rest)], Mark):
        rest.append(last[len(rest)][: rng.randrange(len(last[len(rest)]) + 1)])
    if "".join(rest).strip() == "".join(last).strip():
        return
    parts = [part for wrapper in wrappers[:count] for part in wrapper] + rest
    events = read(form, parts, rng, tools=tools, is_cut=True)
    done = [call for call in as_values(events) if isinstance(call, tuple)]
    text = "".join(event.text for event in events if isinstance(event, Text))
    assert done == calls[: len(done)], "".join(parts)
    whole = "".join(rest).strip()
    if shares and len(done) > count:
        assert whole.endswith(text.strip()), "".join(parts)
    else:
        assert (len(done), text.strip()) == (count, whole), "".join(parts)
