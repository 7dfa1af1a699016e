"""Calls whose end only a search finds, for values may quote what ends them.

Of all readings in which the rest of the answer consists of calls and white space, the one with the
shortest values is right. A mark that is a token of its own decides at once.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mlx_paged.formats.events import Call, NoCall
from mlx_paged.formats.format import Format
from mlx_paged.formats.marks import is_token
from mlx_paged.formats.scan import Calls, Effort, Scan, Steps
from mlx_paged.formats.schemas import Tools


class State(NamedTuple):
    """How far a reading has come. What may follow depends on nothing else."""

    kind: str  # "outside" before the first call and after a wrapper, "end", or the format's own
    at: int
    name: str = ""
    given: frozenset[str] = frozenset()
    key: str = ""
    opened: int = 0  # where the tag of the open value begins
    stack: str = ""  # brackets that are open within a value


class Searched(Format):
    """A format whose calls are found by a search through states.

    Attributes:
        last_mark: the text that closes a wrapper.
        is_shared: several calls share a wrapper, and complete ones stay if the rest is cut.
    """

    @property
    def last_mark(self) -> str:
        raise NotImplementedError

    @property
    def is_shared(self) -> bool:
        return False

    def call(self, scan: Scan, tools: Tools) -> Calls:
        yield from self._head(scan)
        last = self.last_mark
        if is_token(last):
            calls = yield from self._until_token(scan, tools, last)
            return calls
        while not scan.is_ended:
            yield
        return self._chosen(scan, tools)

    def _head(self, scan: Scan) -> Steps[None]:
        """Wait until the first call is opened. Raises NoCall if none can be."""
        raise NotImplementedError

    def _next(self, state: State, search: "Search") -> Iterator[State]:
        """What may follow a state, the shortest value first."""
        raise NotImplementedError

    def _read(self, path: list[State], search: "Search") -> tuple[list[Call], int]:
        """The calls of a reading up to the end of the first wrapper, and this end; of all wrappers
        if calls are all of the text."""
        raise NotImplementedError

    def _until_token(self, scan: Scan, tools: Tools, last: str) -> Calls:
        """The calls up to the token that closes them. A token in a value is text if calls are not
        complete there, unless the next call begins after it."""
        looked = scan.at
        while True:
            while (found := scan.text.find(last, looked)) < 0:
                looked = len(scan.text)
                if scan.is_ended:
                    return self._chosen(scan, tools)
                yield
            looked = found + len(last)
            calls = self._search(Search(scan.text[:looked], tools, scan.effort, ends_there=True))
            if calls is not None:
                scan.at = looked
                return calls[0]
            while not (rest := scan.text[looked:].lstrip()):
                if scan.is_ended:
                    return self._chosen(scan, tools)
                yield
            if rest.startswith((*self.openers, *self.first_openers)):
                raise NoCall

    def _chosen(self, scan: Scan, tools: Tools) -> list[Call]:
        """The calls of a text that is known to its end. A model that ends its answer itself may
        omit the last tag."""
        last = self.last_mark
        texts = [scan.text] if scan.is_cut else [scan.text, scan.text + last]
        searches = [
            Search(text, tools, scan.effort, is_rest=is_rest, is_cut=scan.is_cut)
            for is_rest in (True, False)
            for text in texts
        ]
        if self.is_shared:
            cut = Search(scan.text, tools, scan.effort, is_cut=scan.is_cut, is_part=True)
            searches.append(cut)
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
            search.effort.left -= 1
            if search.effort.left < 0:
                return None
            state = next(waiting[-1], None)
            if state is None:
                waiting.pop()
                path.pop()
            elif state.kind == "end":
                return self._read([*path, state], search)
            elif state not in seen:
                seen.add(state)
                path.append(state)
                waiting.append(self._next(state, search))
        return None


class Search(NamedTuple):
    """What is searched for readings.

    Attributes:
        text: coded text that begins with a call.
        effort: how much the search may do.
        ends_there: the first wrapper ends at the end of the text.
        is_rest: the text consists of calls and white space; else only its beginning does.
        is_cut: the last call may be cut.
        is_part: the wrapper may be cut after a function.
        is_lenient: strings may have quotes within, where the format has another reading, too.
    """

    text: str
    tools: Tools
    effort: Effort
    ends_there: bool = False
    is_rest: bool = False
    is_cut: bool = False
    is_part: bool = False
    is_lenient: bool = False

    def is_end(self, at: int, openers: tuple[str, ...]) -> bool:
        """Whether a reading may end at `at`, after a call and white space."""
        size = len(self.text) - at
        if self.ends_there or not size:
            return not size
        if not self.is_rest or not self.is_cut:
            return not self.is_rest
        return self.text.startswith(openers, at) or any(
            size < len(opener) and opener.startswith(self.text[at:]) for opener in openers
        )


def end_of(path: Sequence[State], search: Search) -> int:
    """Where the calls end that a reading tells."""
    ends = (state.at for state in path[1:] if state.kind in ("outside", "end"))
    return path[-1].at if search.is_rest else next(ends)


def after_space(text: str, at: int) -> int:
    """The position of the next character that is not white space."""
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


_SPACE = re.compile(r"\s*")
