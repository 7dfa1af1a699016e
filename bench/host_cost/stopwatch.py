"""Where the time of nested calls goes."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopwatch:
    """Seconds under each label, of calls that are watched, without watched calls inside them."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[float] = []  # of each call under way, what others inside it took

    @contextmanager
    def watching(self, *calls: tuple[Any, str, str]) -> Iterator[None]:
        """Within this context watch calls, each an owner, the name of its attribute, a label."""
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in calls]
        for (owner, name, original), (_, _, label) in zip(originals, calls, strict=True):
            setattr(owner, name, self._timed(original, label))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def lap(self) -> dict[str, float]:
        """What has come together since the last lap."""
        seconds = dict(self.seconds)
        self.seconds.clear()
        return seconds

    def _timed(self, call: Callable[..., Any], label: str) -> Callable[..., Any]:
        clock, seconds, inner = time.perf_counter, self.seconds, self._inner

        def timed(*args: Any, **options: Any) -> Any:
            inner.append(0.0)
            start = clock()
            try:
                return call(*args, **options)
            finally:
                took = clock() - start
                seconds[label] += took - inner.pop()
                if inner:
                    inner[-1] += took

        return timed
