"""Calls whose arguments are literals of a programming language, not JSON.

Strings may be written without escapes, with quotes within. So the calls are searched: first with
strings that end at their first quote, then of all readings the one with the shortest strings.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mlx_paged.formats.events import Call, NoCall
from mlx_paged.formats.grammar import Function, literal_rules
from mlx_paged.formats.json_text import MAX_DEPTH, written
from mlx_paged.formats.marks import quoted
from mlx_paged.formats.scan import MAX_NAME, Scan, Steps, checked_name
from mlx_paged.formats.searched import Search, Searched, State, after_space, end_of

ARGUMENTS = "a"  # the innermost of the open brackets are those of a call
CLOSING = {"{": "}", "[": "]", "(": ")", ")": ")"}  # a tuple is ")" from its first comma on


class Literals(Searched):
    """A format of calls with literals. A family gives the patterns below, in coded text.

    Attributes:
        start: matches the beginning of a wrapper, up to its first function.
        function: matches a function up to its first argument, with the group ``name``.
        between: matches what is between two functions of a wrapper.
        stop: matches the end of a wrapper.
        end_mark: what a model that ends its answer may omit at the end of a wrapper.
        argument: matches the key of an argument and the mark after it, with the group ``key``.
        close: the bracket that closes arguments.
        cut: matches what may follow a function if the wrapper is cut.
        has_string_marks: what is around strings is a mark, which other text seldom has.
        is_bare: a wrapper has no marks, so that it is one only if the rest is calls, too.
    """

    start: re.Pattern[str]
    function: re.Pattern[str]
    between: re.Pattern[str]
    stop: re.Pattern[str]
    end_mark: str
    argument: re.Pattern[str]
    close: str
    cut: re.Pattern[str] = re.compile(".*", re.DOTALL)
    has_string_marks: bool = False
    is_bare: bool = False

    def ends_of_string(self, text: str, at: int, is_lenient: bool) -> Iterator[int]:
        """Where a string that begins at `at` may end, nearest first; nothing if none begins.

        Args:
            is_lenient: a string may have quotes within.
        """
        raise NotImplementedError

    def string(self, text: str) -> str:
        """The JSON of a string."""
        raise NotImplementedError

    def scalar(self, text: str, at: int) -> tuple[str, int] | None:
        """The JSON of another value without brackets, and its end; None if there is none."""
        raise NotImplementedError

    def key(self, text: str, at: int) -> tuple[str, int] | None:
        """The key of an item of an object, and the position of its value."""
        raise NotImplementedError

    @property
    def last_mark(self) -> str:
        return self.end_mark

    @property
    def is_shared(self) -> bool:
        return True

    def _head(self, scan: Scan) -> Steps[None]:
        while True:
            started = self.start.match(scan.text)
            found = self.function.match(scan.text, started.end()) if started else None
            if found:
                checked_name(found["name"])
                return
            if len(scan.text) > 2 * MAX_NAME or not self._may_begin(scan.text):
                raise NoCall
            yield from scan.more()

    def _may_begin(self, text: str) -> bool:
        """Whether text that is no function yet can become one."""
        return True

    def _search(self, search: Search) -> tuple[list[Call], int] | None:
        is_part = search.is_part and search.is_cut
        if self.is_bare and not search.is_rest:
            if not is_part:
                return None
            search = search._replace(is_rest=True)
        found = super()._search(search)
        is_certain = search.is_rest and (self.has_string_marks or not search.is_cut)
        if found is None and (search.ends_there or is_certain):
            return super()._search(search._replace(is_lenient=True))
        return found

    def _next(self, state: State, search: Search) -> Iterator[State]:
        steps = {
            "outside": self._outside,
            "functions": self._functions,
            "first": self._items,
            "item": self._items,
            "value": self._values,
            "after": self._after,
        }
        return steps[state.kind](state, search)

    def _outside(self, state: State, search: Search) -> Iterator[State]:
        at = after_space(search.text, state.at)
        if state.at and search.is_end(at, (*self.openers, *self.first_openers)):
            yield State("end", state.at)
        started = self.start.match(search.text, at)
        if started:
            yield from self._function(started.end(), search)

    def _function(self, at: int, search: Search) -> Iterator[State]:
        found = self.function.match(search.text, at)
        if found and len(found["name"]) <= MAX_NAME:
            yield State("first", found.end(), found["name"], stack=ARGUMENTS)

    def _functions(self, state: State, search: Search) -> Iterator[State]:
        stopped = self.stop.match(search.text, state.at)
        if stopped:
            yield State("outside", stopped.end())
        between = self.between.match(search.text, state.at)
        if between:
            yield from self._function(between.end(), search)
        if search.is_part and search.is_cut and self.cut.fullmatch(search.text, state.at):
            yield State("end", state.at)

    def _items(self, state: State, search: Search) -> Iterator[State]:
        """After an opening bracket or a comma: an item, or the closing bracket."""
        yield from self._closed(state, search)
        inner = state.stack[-1]
        if inner == ARGUMENTS:
            found = self.argument.match(search.text, state.at)
            if found and self._may_follow(found["key"], state, search):
                given = state.given | {found["key"]}
                yield state._replace(kind="value", at=found.end(), given=given)
        elif inner == "{":
            key = self.key(search.text, after_space(search.text, state.at))
            if key:
                yield state._replace(kind="value", at=key[1])
        else:
            yield state._replace(kind="value")

    def _may_follow(self, key: str, state: State, search: Search) -> bool:
        if key in state.given or not search.is_lenient:
            return key not in state.given
        keys = search.tools.keys(state.name)
        return keys is None or self.marks.plain(key) in keys

    def _values(self, state: State, search: Search) -> Iterator[State]:
        text, at = search.text, after_space(search.text, state.at)
        is_string = False
        for end in self.ends_of_string(text, at, search.is_lenient and self._may_quote(state)):
            is_string = True
            yield state._replace(kind="after", at=end)
        if is_string:
            return
        if text[at : at + 1] in CLOSING and text[at] != ")":
            if len(state.stack) < MAX_DEPTH:
                yield state._replace(kind="first", at=at + 1, stack=state.stack + text[at])
            return
        found = self.scalar(text, at)
        if found:
            yield state._replace(kind="after", at=found[1])

    def _may_quote(self, state: State) -> bool:
        """Whether a string may have quotes within where a reading has come to."""
        return True

    def _after(self, state: State, search: Search) -> Iterator[State]:
        yield from self._closed(state, search)
        at = after_space(search.text, state.at)
        if search.text[at : at + 1] == ",":
            stack = state.stack[:-1] + state.stack[-1].replace("(", ")")
            yield state._replace(kind="item", at=at + 1, stack=stack)

    def _closed(self, state: State, search: Search) -> Iterator[State]:
        at, inner = after_space(search.text, state.at), state.stack[-1]
        is_group = inner == "(" and state.kind == "after"  # brackets around a value are no tuple
        if search.text[at : at + 1] != CLOSING.get(inner, self.close) or is_group:
            return
        if inner == ARGUMENTS:
            yield State("functions", at + 1, state.name)
        else:
            yield state._replace(kind="after", at=at + 1, stack=state.stack[:-1])

    def _read(self, path: list[State], search: Search) -> tuple[list[Call], int]:
        calls, parts = list[Call](), list[str]()
        for state, after in pairwise(path):
            if state.kind in ("outside", "functions"):
                parts = ["{"]
                if state.kind == "outside" and state.at and not search.is_rest:
                    break
            elif after.kind == "functions":
                name = checked_name(self.marks.plain(state.name))
                calls.append(Call(name, "".join([*parts, "}"])))
            else:
                parts.append(self._part(state, after, search.text))
        return calls, end_of(path, search)

    def _part(self, state: State, after: State, text: str) -> str:
        """The JSON of what is between two states of a reading."""
        at = after_space(text, state.at)
        if state.kind in ("first", "item") and after.kind == "value":
            comma = ", " if state.kind == "item" else ""
            return comma + self._written_key(state, at, text)
        if state.kind != "value":
            closed = len(after.stack) < len(state.stack)
            return "" if not closed else "}" if state.stack[-1] == "{" else "]"
        if after.kind == "first":
            return "{" if text[at] == "{" else "["
        found = self.scalar(text, at)
        if found and next(self.ends_of_string(text, at, False), None) is None:
            return found[0]
        return self.string(text[at : after.at])

    def _written_key(self, state: State, at: int, text: str) -> str:
        if state.stack[-1] == ARGUMENTS:
            found = self.argument.match(text, state.at)
            assert found is not None
            return f"{written(self.marks.plain(found['key']))}: "
        key = self.key(text, at) if state.stack[-1] == "{" else None
        return f"{written(key[0])}: " if key else ""

    def rules(self, functions: Sequence[Function], several: bool) -> list[str]:
        return literal_rules(functions, several, self.call_rules(several), self.written_values)

    def call_rules(self, several: bool) -> tuple[str, str, str, str]:
        """How a grammar has calls: the rule of ``calls`` by the rule ``function``; and the texts
        before a name, after a name, and after the arguments."""
        raise NotImplementedError

    def written_values(self, key: str) -> tuple[str, str | None]:
        """How a grammar has an argument: the text before a value; and the mark around strings, None
        if they are JSON."""
        return quoted(f"{key}="), None
