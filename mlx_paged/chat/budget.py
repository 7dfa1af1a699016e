"""What the rendering of a chat template may take: steps, and seconds of its thread."""

import operator
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from types import GeneratorType
from typing import Any

from jinja2 import TemplateRuntimeError
from jinja2.utils import Namespace

STEPS = 20_000
"""Steps of a template, whatever the chat is."""
STEPS_PER_WEIGHT = 200
"""Further steps for each unit of the chat's weight."""
STEPS_PER_SQUARE = 32
"""Units of the square of the chat's weight for which a template gets one step more."""
SECONDS = 10.0
"""Seconds of its thread that a template may take: the limit of a template whose steps are slow."""
STEP_BYTES = 32
"""Characters or bytes of a value that weigh as much as one item."""
MAX_BITS = 1 << 14
"""Bits of an integer at most."""
MAX_DEPTH = 200
"""Lists and objects in each other at most."""
CLOCK_STEPS = 256
"""Steps between two looks at the clock."""

FLAT = frozenset(
    ["default", "d", "length", "count", "first", "last", "attr", "random", "get", "keys", "values"]
)
"""Filters, and methods of objects, that look at no item or at one."""
BY_ITEM = frozenset(
    ["list", "reverse", "map", "select", "selectattr", "reject", "rejectattr", "items"]
)
"""Filters that look at each item, but not into it."""
WHOLE = frozenset(["join", "sort", "unique", "min", "max", "sum", "groupby"])
"""Filters that need all items of a generator."""
PADDED = frozenset(
    [
        "center",
        "ljust",
        "rjust",
        "zfill",
        "expandtabs",
        "to_bytes",
        "indent",
        "batch",
        "slice",
        "tojson",
        "round",
        "translate",
        "wordwrap",
        "urlize",
        "join",
    ]
)
"""Filters and methods whose result may be as long as the value times an argument."""
SQUARED = frozenset(["striptags", "wordwrap", "urlize", "pprint"])
"""Filters and methods whose time grows as the square of the value's length."""
SPLITTING = frozenset(["split", "rsplit", "splitlines", "partition", "rpartition"])
FORMATTING = frozenset(["format", "format_map"])

WIDTHS = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\d+|\*)?(?:\.(\d+|\*))?")
"""The width and the precision of a ``%`` in a format."""
FIELDS = re.compile(r"\{[^}]*")
"""A field of a format for ``str.format``, up to its end or to the field within it."""

_current: ContextVar["Budget"] = ContextVar("budget")


class TemplateTooLongError(TemplateRuntimeError):
    """A chat template takes more steps or time than it may."""


class Budget:
    """The steps that are left to a rendering.

    Args:
        steps: that it may take; None: any number, for :meth:`weigh`.
        at_once: steps that one filter, call or operator may take; a value that needs more is not
            made.
    """

    def __init__(self, steps: int | None = None, at_once: int = 0) -> None:
        self.steps = steps
        self.at_once = at_once
        self.spent = 0
        self._look_at = float("inf") if steps is None else CLOCK_STEPS
        self._end = time.thread_time() + SECONDS

    @classmethod
    def of(cls, *values: Any) -> "Budget":
        """A budget for the rendering of these values: a chat, tools, other arguments. It grows as
        the square of the chat, for some models' templates look at all earlier messages for each
        message."""
        weight = cls().weigh(values)
        linear = STEPS + STEPS_PER_WEIGHT * weight
        return cls(linear + weight * weight // STEPS_PER_SQUARE, linear)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Templates that this thread renders meanwhile spend from this budget."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
        self._look()  # a filter may have caught the error

    def spend(self, steps: int) -> None:
        """Take so many steps. Raises TemplateTooLongError if they are not left."""
        self.spent += steps
        if self.spent >= self._look_at:
            self._look(steps)

    def _look(self, steps: int = 0) -> None:
        """Raise TemplateTooLongError if steps or time are used up."""
        assert self.steps is not None
        most = self.at_once if steps > self.at_once else self.steps
        if self.spent > self.steps or steps > self.at_once:
            raise TemplateTooLongError(
                f"the chat template takes more than {most} steps for this chat:"
                " expected a template that ends"
            )
        self._look_at = self.spent + CLOCK_STEPS
        if time.thread_time() > self._end:
            raise TemplateTooLongError(
                f"the chat template takes more than {SECONDS:g} s for this chat: expected less"
            )

    def weigh(self, value: Any, depth: int = 0) -> int:
        """Spend the weight of a value, and return it: one for each item in it, at any depth, and
        one for each `STEP_BYTES` of text. It bounds the time and the text of ``str(value)``, of a
        comparison with `value`, and of its hash."""
        if isinstance(value, str | bytes):
            weight = 1 + len(value) // STEP_BYTES
            self.spend(weight)
            return weight
        weight = 1
        self.spend(1)
        if isinstance(value, Namespace):
            value = object.__getattribute__(value, "_Namespace__attrs")
        if not isinstance(value, Collection) or isinstance(value, range):
            return weight
        if depth > MAX_DEPTH:
            raise TemplateTooLongError(
                f"the chat template has values of more than {MAX_DEPTH} levels: expected fewer"
            )
        for item in chain.from_iterable(value.items()) if isinstance(value, Mapping) else value:
            weight += self.weigh(item, depth + 1)
        return weight

    def enter(self, name: str, value: Any, arguments: Sequence[Any]) -> None:
        """Spend what the filter or method `name` of a value takes at most, before it is called."""
        if name in FLAT:
            self.spend(1)
            return
        if name in BY_ITEM:
            self.spend(1 + (len(value) if isinstance(value, Collection) else 0))
            return
        weight = self.weigh(value)
        if isinstance(value, range):
            self.spend(len(value))
        for argument in arguments:
            self.weigh(argument)
        if name in PADDED:
            self.spend(weight * max((_extent(argument) for argument in arguments), default=1))
        if name in SQUARED or (name == "sum" and not _adds_numbers(arguments)):
            self.spend(weight * weight)
        if name in FORMATTING and isinstance(value, str):
            self.spend(_format_width(value, arguments))
        if name in SPLITTING and isinstance(value, str):
            separator = next((x for x in arguments if isinstance(x, str) and x), None)
            self.spend(value.count(separator) if separator else len(value) // 4)
        if name == "replace" and len(arguments) > 1:
            old, new, *_ = map(str, arguments)
            self.spend(str(value).count(old) * len(new) // STEP_BYTES)

    def slice(self, value: Any) -> None:
        """Spend what a copy of all of a value takes."""
        size = len(value) if isinstance(value, Collection) else 0
        self.spend(1 + (size // STEP_BYTES if isinstance(value, str | bytes) else size))

    def leave(self, result: Any) -> Any:
        """Spend what a result takes. Returns the result; a generator becomes one that counts."""
        if isinstance(result, int) and result.bit_length() > MAX_BITS:
            raise TemplateTooLongError(f"the chat template makes an integer of {MAX_BITS} bits")
        if isinstance(result, str | bytes):
            self.spend(len(result) // STEP_BYTES)
        elif isinstance(result, list | tuple):
            self.spend(len(result))
        elif isinstance(result, Iterator) and not isinstance(result, Collection):
            return self._counted(result)
        return result

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(1)
            yield item

    def compare(self, left: Any, right: Any) -> None:
        """Spend what a comparison by order or for equality takes."""
        if isinstance(left, str) and isinstance(right, str):
            self.spend(1 + min(len(left), len(right)) // STEP_BYTES)
        elif isinstance(left, Collection) and isinstance(right, Collection):
            self.weigh(right)
        else:
            self.spend(1)

    def search(self, item: Any, container: Any) -> None:
        """Spend what ``item in container`` takes."""
        weight = self.weigh(item)
        if isinstance(container, str | bytes):
            self.spend(len(container) // STEP_BYTES)
        elif isinstance(container, Collection) and not isinstance(
            container, Mapping | set | frozenset
        ):
            self.spend(weight * len(container))


def current() -> Budget | None:
    """The budget that this thread renders within; None if it renders no chat template of ours."""
    return _current.get(None)


def spending() -> Budget:
    """The budget that this thread renders within; there is one."""
    return _current.get()


def listed(value: Any) -> Any:
    """The items of a generator, which counts them; any other value as it is."""
    return list(value) if isinstance(value, GeneratorType) else value


def times(left: Any, right: Any) -> Any:
    """``left * right``, which repeats if one of them is a text or a list."""
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and isinstance(value, str | bytes | list | tuple):
            extent = len(value) * max(0, count)
            is_text = isinstance(value, str | bytes)
            spending().spend(extent // STEP_BYTES if is_text else extent)
    return left * right


def power(base: Any, exponent: Any) -> Any:
    """``base**exponent``, of integers only up to :data:`MAX_BITS`."""
    if isinstance(base, int) and isinstance(exponent, int):
        bits = base.bit_length() * abs(exponent)
        if bits > MAX_BITS:
            raise TemplateTooLongError(f"the chat template makes an integer of {bits} bits")
    return base**exponent


def remainder(left: Any, right: Any) -> Any:
    """``left % right``, which formats if `left` is a text."""
    if isinstance(left, str):
        spending().weigh(left)
        spending().weigh(right)
        arguments = right if isinstance(right, tuple) else [right]
        spending().spend(_format_width(left, arguments))
    return left % right


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "*": times,
    "**": power,
    "+": operator.add,
    "%": remainder,
}
"""Operators whose result may be much larger than their operands."""


def _extent(argument: Any) -> int:
    """How often or how long an argument may repeat a value."""
    if isinstance(argument, int):
        return max(1, abs(argument))
    if isinstance(argument, str):
        return max(1, len(argument))
    if isinstance(argument, Mapping):
        return max(map(_extent, argument.values()), default=1)
    if isinstance(argument, list | tuple):
        return max(map(_extent, argument), default=1)
    return 1


def _adds_numbers(arguments: Sequence[Any]) -> bool:
    return not any(isinstance(argument, list | tuple) for argument in arguments)


def _format_width(template: str, arguments: Sequence[Any]) -> int:
    """Characters of padding that a format asks for at most, by ``%`` or by ``str.format``."""
    found = [text for pair in WIDTHS.findall(template) for text in pair if text]
    fields = FIELDS.findall(template)
    found += [number for field in fields for number in re.findall(r"\d+", field)]
    width = sum(int(number[:18]) for number in found if number != "*")
    if "*" in found or any("{" in field[1:] for field in fields):
        width += sum(abs(value) for value in arguments if isinstance(value, int))
    return width
