"""Tokens to text as they come, ending before a stop string. Knows no mlx."""

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """What is used of mlx-lm's streaming detokenizers."""

    last_segment: str

    def add_token(self, token: int) -> None: ...
    def finalize(self) -> None: ...


class TextStream:
    """The text of one request.

    Text that may turn out to be the beginning of a stop string is held back until the next tokens
    tell. Stop strings may span any number of tokens.

    Args:
        detokenizer: a fresh one.
        stop: strings before which the text ends.
        context: tokens before the first one, whose own text is not wanted but on which the text of
            those that follow may depend.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._context = context
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; return the text that became certain. Sets `stopped` on a stop string."""
        self._read_context()
        self._detokenizer.add_token(token)
        return self._emit(self._detokenizer.last_segment)

    def finish(self) -> str:
        """No token follows: return the rest of the text."""
        self._detokenizer.finalize()
        segment = self._emit(self._detokenizer.last_segment)
        if not self.stopped:
            segment += self._held
            self.text += self._held
            self._held = ""
        return segment

    def _read_context(self) -> None:
        for token in self._context:
            self._detokenizer.add_token(token)
        if self._context:
            _ = self._detokenizer.last_segment  # reading it is what moves on
        self._context = ()

    def _emit(self, segment: str) -> str:
        if self.stopped:
            return ""
        pending = self._held + segment
        cut = self._first_stop(pending)
        if cut is not None:
            self.stopped = True
            self._held = ""
            certain = pending[:cut]
        else:
            keep = self._possible_stop(pending)
            self._held = pending[len(pending) - keep :]
            certain = pending[: len(pending) - keep]
        self.text += certain
        return certain

    def _first_stop(self, text: str) -> int | None:
        """Where the stop string begins that is complete first, however the text was cut."""
        found = [
            (index + len(stop), index) for stop in self._stop if (index := text.find(stop)) >= 0
        ]
        return min(found)[1] if found else None

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        lengths = (
            length
            for stop in self._stop
            for length in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:length])
        )
        return max(lengths, default=0)
