"""Calls whose arguments are plain text between tags: where does a value end?

A value may quote the tags. So of all readings in which the rest of the answer consists of calls and
white space, the one with the shortest values is right. After a value comes another parameter that
is declared and not given yet, or the end of the call. A tag that is a token of its own decides at
once.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mlx_paged.formats.events import Call, NoCall
from mlx_paged.formats.grammar import Function, Shape, tagged_rules
from mlx_paged.formats.json_text import written
from mlx_paged.formats.marks import is_token
from mlx_paged.formats.scan import MAX_HEAD, Scan, Steps, checked_name
from mlx_paged.formats.schemas import Tools
from mlx_paged.formats.searched import Search, Searched, State, after_space, end_of

MAX_KEY = 256


class Tagged(Searched):
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

    @property
    def last_mark(self) -> str:
        return self.wrapper[1] if self.wrapper else self.function_end

    @property
    def is_shared(self) -> bool:
        return self.shape is not None and self.shape.is_shared

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
        """A value without the white space that the format puts around each value."""
        return text

    def end_of_value(self, opened: re.Match[str]) -> str:
        """The tag that closes the value after the tag `opened`."""
        return self.parameter_end

    def _head(self, scan: Scan) -> Steps[None]:
        """Wait until the first function is opened, or cannot be."""
        first = self.wrapper[0] if self.wrapper else ""
        yield from scan.take(first)
        while not (found := self.function.match(scan.text, scan.at, MAX_HEAD)):
            if len(scan.text) > MAX_HEAD:
                raise NoCall
            yield from scan.more()
        checked_name(found["name"])

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
        at = after_space(search.text, state.at)
        if state.at and search.is_end(at, self.openers):
            yield State("end", state.at)
        if self.wrapper is None:
            yield from self._function(at, search)
        elif search.text.startswith(self.wrapper[0], at):
            yield from self._function(at + len(self.wrapper[0]), search)

    def _function(self, at: int, search: "Search") -> Iterator[State]:
        found = self.function.match(search.text, at, at + MAX_HEAD)
        if found and not any(map(str.isspace, found["name"])):
            yield State("arguments", found.end(), found["name"])

    def _functions(self, state: State, search: "Search") -> Iterator[State]:
        """After a function: another one, or the end of the wrapper."""
        if self.wrapper is None:
            yield State("outside", state.at)
            return
        at, end = after_space(search.text, state.at), self.wrapper[1]
        if search.text.startswith(end, at):
            yield State("outside", at + len(end))
        yield from self._function(state.at, search)
        if search.is_part and self.shape:
            next_one = self.shape.function[0]
            rest = search.text[at : at + len(next_one) + len(end)]
            if rest.startswith(next_one) or any(x.startswith(rest) for x in (next_one, end)):
                yield State("end", state.at)

    def _arguments(self, state: State, search: "Search") -> Iterator[State]:
        """After the beginning of a function or after a value."""
        at = after_space(search.text, state.at)
        if search.text.startswith(self.function_end, at):
            yield State("functions", at + len(self.function_end))
        opened = self._parameter(search.text, at)
        if opened and self._may_follow(opened["key"], state, search):
            yield state._replace(kind="value", at=opened.end(), key=opened["key"], opened=at)

    def _parameter(self, text: str, at: int) -> re.Match[str] | None:
        """The tag at a position that opens a value."""
        return self.parameter.match(text, at, at + MAX_HEAD)

    def _may_follow(self, key: str, state: State, search: "Search") -> bool:
        if key in state.given or len(key) > MAX_KEY:
            return False
        keys = search.tools.keys(state.name)
        is_decided = not state.given or is_token(self.parameter_end)
        return is_decided or keys is None or self.marks.plain(key) in keys

    def _values(self, state: State, search: "Search") -> Iterator[State]:
        opened = self._parameter(search.text, state.opened)
        assert opened is not None
        end, at = self.end_of_value(opened), state.at
        given = state.given | {state.key}
        while (found := search.text.find(end, at)) >= 0:
            yield state._replace(kind="arguments", at=found + len(end), given=given, key="")
            at = found + 1
            if is_token(end):
                return

    def _read(self, path: list[State], search: "Search") -> tuple[list[Call], int]:
        calls, arguments = list[Call](), list[str]()
        for state, after in pairwise(path):
            if state.kind == "outside" and state.at and not search.is_rest:
                break
            if state.kind == "value":
                opened = self._parameter(search.text, state.opened)
                assert opened is not None
                end = after.at - len(self.end_of_value(opened))
                value = self.value(search.tools, state.name, opened, search.text[state.at : end])
                key = written(self.marks.plain(opened["key"]))
                arguments.append(f"{key}: {value}")
            elif state.kind == "arguments" and after.kind == "functions":
                written_arguments = ", ".join(arguments)
                calls.append(Call(self.marks.plain(state.name), f"{{{written_arguments}}}"))
                arguments = []
        return calls, end_of(path, search)
