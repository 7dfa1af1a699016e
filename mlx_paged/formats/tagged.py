"""Calls whose arguments are plain text between tags: where does a value end?

A value may quote the tags. So of all readings in which the rest of the answer consists of calls and
white space, the one with the shortest values is right. After a value comes another parameter that
is declared and not given yet, or the end of the call. A tag that is a token of its own decides at
once.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from mlx_paged.formats.events import Call, NoCall
from mlx_paged.formats.format import Format
from mlx_paged.formats.grammar import Function, Shape, tagged_rules
from mlx_paged.formats.json_text import written
from mlx_paged.formats.marks import is_token
from mlx_paged.formats.scan import MAX_NAME, Calls, Scan, Steps, checked_name
from mlx_paged.formats.schemas import Tools

MAX_STATES = 50_000  # of a search; a text that needs more is no call
MAX_HEAD = 2 * MAX_NAME  # characters from the first mark up to the first argument
MAX_KEY = 256


class State(NamedTuple):
    """How far a reading has come. What may follow depends on nothing else."""

    kind: str  # "outside", "functions", "arguments" or "value"
    at: int
    name: str = ""
    given: frozenset[str] = frozenset()
    key: str = ""
    opened: int = 0  # where the tag of the open value begins


class Tagged(Format):
    """A format with tags around plain values. A family gives the patterns and tags below, in coded
    text, when it is made.

    Attributes:
        wrapper: the tags around one or more functions; None if functions stand alone.
        function: matches the tag that opens a function, with the group ``name``.
        function_end: the tag that closes a function.
        parameter: matches the tag that opens a value, with the group ``key``.
        parameter_end: the tag that closes a value.
        shape: how calls are written, for grammars; None if the format has other ``rules``.
    """

    wrapper: tuple[str, str] | None
    function: re.Pattern[str]
    function_end: str
    parameter: re.Pattern[str]
    parameter_end: str
    shape: Shape | None = None

    def rules(self, functions: Sequence[Function], several: bool) -> list[str] | None:
        if self.shape is None:
            return None
        return tagged_rules(self.marks, self.shape, functions, several)

    def value(self, tools: Tools, name: str, opened: re.Match[str], text: str) -> str:
        """The JSON of a value: by the schema of its parameter.

        Args:
            opened: the tag that opens it.
            text: what stands between the tags.
        """
        key = self.marks.plain(opened["key"])
        return tools.value(name, key, self.marks.plain(self.trimmed(text)))

    def trimmed(self, text: str) -> str:
        """A value without the white space that the format puts around each."""
        return text

    def end_of_value(self, opened: re.Match[str]) -> str:
        """The tag that closes the value behind the tag `opened`."""
        return self.parameter_end

    def call(self, scan: Scan, tools: Tools) -> Calls:
        yield from self._head(scan)
        last = self.wrapper[1] if self.wrapper else self.function_end
        if is_token(last):
            calls = yield from self._until_token(scan, tools, last)
            return calls
        while not scan.is_ended:
            yield
        return self._chosen(scan, tools)

    def _head(self, scan: Scan) -> Steps[None]:
        """Wait until the first function is opened, or cannot be."""
        first = self.wrapper[0] if self.wrapper else ""
        yield from scan.take(first)
        while not (found := self.function.match(scan.text, scan.at)):
            if len(scan.text) > MAX_HEAD:
                raise NoCall
            yield from scan.more()
        checked_name(found["name"])

    def _until_token(self, scan: Scan, tools: Tools, last: str) -> Calls:
        """The calls up to the token that closes them. A token in a value is text if calls are not
        complete there, unless the next call begins behind it."""
        looked = scan.at
        while True:
            while (found := scan.text.find(last, looked)) < 0:
                looked = len(scan.text)
                if scan.is_ended:
                    return self._chosen(scan, tools)
                yield
            looked = found + len(last)
            calls = self._search(Search(scan.text[:looked], tools, ends_there=True))
            if calls is not None:
                scan.at = looked
                return calls[0]
            while not (rest := scan.text[looked:].lstrip()):
                if scan.is_ended:
                    return self._chosen(scan, tools)
                yield
            if rest.startswith(tuple(self.openers)):
                raise NoCall

    def _chosen(self, scan: Scan, tools: Tools) -> list[Call]:
        """The calls of a text that is known to its end. A model that ends its answer itself may
        omit the last tag."""
        last = self.wrapper[1] if self.wrapper else self.function_end
        texts = [scan.text] if scan.is_cut else [scan.text, scan.text + last]
        searches = [
            Search(text, tools, is_rest=is_rest, is_cut=scan.is_cut)
            for is_rest in (True, False)
            for text in texts
        ]
        if self.shape and self.shape.is_shared:
            searches.append(Search(scan.text, tools, is_part=True))
        for search in searches:
            found = self._search(search)
            if found is not None:
                calls, at = found
                scan.at = min(at, len(scan.text))
                return calls
        raise NoCall

    def _search(self, search: "Search") -> tuple[list[Call], int] | None:
        """The calls of the first reading, depth first with the shortest values first, and the end
        of the first wrapper; None if there is no reading."""
        path = [State("outside", 0)]
        waiting = [self._next(path[0], search)]
        seen = set[State]()
        while waiting:
            state = next(waiting[-1], None)
            if state is None:
                waiting.pop()
                path.pop()
            elif state.kind == "end":
                return self._read([*path, state], search)
            elif state not in seen:
                seen.add(state)
                if len(seen) > MAX_STATES:
                    return None
                path.append(state)
                waiting.append(self._next(state, search))
        return None

    def _next(self, state: State, search: "Search") -> Iterator[State]:
        """What may follow a state, the shortest value first."""
        steps = {
            "outside": self._outside,
            "functions": self._functions,
            "arguments": self._arguments,
            "value": self._values,
        }
        return steps[state.kind](state, search)

    def _outside(self, state: State, search: "Search") -> Iterator[State]:
        at = _after_space(search.text, state.at)
        if state.at and search.is_end(at, self.openers):
            yield State("end", state.at)
        if self.wrapper is None:
            yield from self._function(at, search)
        elif search.text.startswith(self.wrapper[0], at):
            yield from self._function(at + len(self.wrapper[0]), search)

    def _function(self, at: int, search: "Search") -> Iterator[State]:
        found = self.function.match(search.text, at)
        if found and not any(map(str.isspace, found["name"])):
            yield State("arguments", found.end(), found["name"])

    def _functions(self, state: State, search: "Search") -> Iterator[State]:
        """After a function: another one, or the end of the wrapper."""
        if self.wrapper is None:
            yield State("outside", state.at)
            return
        at, end = _after_space(search.text, state.at), self.wrapper[1]
        if search.text.startswith(end, at):
            yield State("outside", at + len(end))
        yield from self._function(state.at, search)
        if search.is_part and self.shape:
            rest, next_one = search.text[at:], self.shape.function[0]
            if rest.startswith(next_one) or any(x.startswith(rest) for x in (next_one, end)):
                yield State("end", state.at)

    def _arguments(self, state: State, search: "Search") -> Iterator[State]:
        """After the beginning of a function or after a value."""
        at = _after_space(search.text, state.at)
        if search.text.startswith(self.function_end, at):
            yield State("functions", at + len(self.function_end))
        opened = self.parameter.match(search.text, at)
        if opened and self._may_follow(opened["key"], state, search):
            yield state._replace(kind="value", at=opened.end(), key=opened["key"], opened=at)

    def _may_follow(self, key: str, state: State, search: "Search") -> bool:
        if key in state.given or len(key) > MAX_KEY:
            return False
        keys = search.tools.keys(state.name)
        is_decided = not state.given or is_token(self.parameter_end)
        return is_decided or keys is None or self.marks.plain(key) in keys

    def _values(self, state: State, search: "Search") -> Iterator[State]:
        opened = self.parameter.match(search.text, state.opened)
        assert opened is not None
        end, at = self.end_of_value(opened), state.at
        given = state.given | {state.key}
        while (found := search.text.find(end, at)) >= 0:
            yield state._replace(kind="arguments", at=found + len(end), given=given, key="")
            at = found + 1
            if is_token(end):
                return

    def _read(self, path: list[State], search: "Search") -> tuple[list[Call], int]:
        """The calls of a reading up to the end of the first wrapper, and this end."""
        calls, arguments = list[Call](), list[str]()
        for state, after in pairwise(path):
            if state.kind == "outside" and state.at:
                break
            if state.kind == "value":
                opened = self.parameter.match(search.text, state.opened)
                assert opened is not None
                end = after.at - len(self.end_of_value(opened))
                value = self.value(search.tools, state.name, opened, search.text[state.at : end])
                key = written(self.marks.plain(opened["key"]))
                arguments.append(f"{key}: {value}")
            elif state.kind == "arguments" and after.kind == "functions":
                written_arguments = ", ".join(arguments)
                calls.append(Call(self.marks.plain(state.name), f"{{{written_arguments}}}"))
                arguments = []
        at = next(state.at for state in path[1:] if state.kind in ("outside", "end"))
        return calls, at


class Search(NamedTuple):
    """What is searched for readings.

    Attributes:
        text: coded text that begins with a call.
        ends_there: the first wrapper ends at the end of the text.
        is_rest: the text consists of calls and white space; else only its beginning does.
        is_cut: the last call may be cut.
        is_part: the wrapper may be cut behind a function.
    """

    text: str
    tools: Tools
    ends_there: bool = False
    is_rest: bool = False
    is_cut: bool = False
    is_part: bool = False

    def is_end(self, at: int, openers: tuple[str, ...]) -> bool:
        """Whether a reading may end at `at`, behind a call and white space."""
        rest = self.text[at:]
        if self.ends_there or not rest:
            return not rest
        is_call = rest.startswith(openers) or any(opener.startswith(rest) for opener in openers)
        return not self.is_rest or (self.is_cut and is_call)


def _after_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


_SPACE = re.compile(r"\s*")
