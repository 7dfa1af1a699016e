"""The loads and stores in LLVM's text of kernels."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_ACCESS = re.compile(
    r"^ +(?:%[\w.]+ = (?P<load>load)|store) (?P<atomic>atomic )?(?:volatile )?(?P<operands>.*)"
)
_WATCHED = re.compile(r"@__tsan_\w*?(?P<kind>read|write)\d+\(ptr (?P<address>.*)\)")
_DEFINITION = re.compile(r"^ +(?P<name>%[\w.]+) = (?P<value>.*)")
_CONSTANT = re.compile(r"^(?P<name>@[^ ]+) = .*?\bconstant ")
_SCALARS = re.compile(r"^<?((?P<count>\d+) x )?(?P<element>i\d+|half|bfloat|float|double|ptr)>?$")
_BYTES = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8}


@dataclass(frozen=True)
class Access:
    """A load (`kind` is "read") or a store ("write") that is not atomic."""

    kind: str
    type_name: str
    address: str  # an operand: a local name, a global one, or a constant expression

    @classmethod
    def parse(cls, line: str) -> "Access | None":
        """The access of a line of LLVM's text, or None if the line has none."""
        match = _ACCESS.match(line)
        if not match or match["atomic"]:
            return None
        first, second = split(match["operands"])[:2]
        if match["load"]:
            return cls("read", first, second.removeprefix("ptr "))
        return cls("write", _without_value(first), second.removeprefix("ptr "))


class Function:
    """What the text of a function tells of its accesses, read line by line."""

    def __init__(self, lines: Sequence[str]) -> None:
        found = filter(None, map(_DEFINITION.match, lines))
        self._definitions = {match["name"]: match["value"] for match in found}
        self._watched = Counter[tuple[str, str]]()  # calls of this basic block without an access

    def read(self, line: str) -> None:
        """Take in the next line."""
        if not line.startswith(" "):  # the label of a basic block
            self._watched.clear()
        elif called := _WATCHED.search(line):
            self._watched[called["kind"], called["address"]] += 1

    def is_watched(self, access: Access) -> bool:
        """Whether a call of the sanitizer's runtime belongs to the access. Each belongs to one."""
        key = access.kind, access.address
        self._watched[key] -= 1
        return self._watched[key] >= 0

    def root(self, access: Access) -> str:
        """What the access touches: a global name, or the instruction that makes the pointer."""
        value = access.address
        while True:
            value = self._definitions.get(value, value)
            if not value.startswith("getelementptr "):
                return value
            operands = value.partition("(")[2] if value.endswith(")") else value
            value = split(operands)[1].removeprefix("ptr ")


def constants(code: str) -> frozenset[str]:
    """The global names in `code` that nobody writes."""
    return frozenset(match["name"] for match in map(_CONSTANT.match, code.splitlines()) if match)


def functions(code: str) -> Iterator[list[str]]:
    """The lines of `code`: those of each function together, those between functions too."""
    lines: list[str] = []
    for line in code.splitlines():
        if line.startswith("define "):
            yield lines
            lines = []
        lines.append(line)
        if line == "}":
            yield lines
            lines = []
    yield lines


def size(type_name: str) -> int:
    """The bytes that a load or store of `type_name`, a scalar or a vector, touches.

    Raises:
        ValueError: `type_name` is another type.
    """
    match = _SCALARS.match(type_name)
    if not match:
        raise ValueError(f"an access of type {type_name}: its size is not known")
    element = match["element"]
    bits = int(element[1:]) if element.startswith("i") else 8 * _BYTES[element]
    return -(-int(match["count"] or 1) * bits // 8)


def split(operands: str) -> list[str]:
    """The parts of `operands` between commas that no bracket holds."""
    parts, depth = [""], 0
    for character in operands:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _without_value(operand: str) -> str:
    """The type of `operand`, a type and a value."""
    depth = 0
    for place, character in enumerate(operand):
        depth += (character in "([{<") - (character in ")]}>")
        if character == " " and depth == 0:
            return operand[:place]
    raise ValueError(operand)
