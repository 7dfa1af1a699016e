"""Reads LLVM's text of one compiled kernel."""

import re
from dataclasses import dataclass, field
from functools import cached_property

_KERNEL = re.compile(
    r"^define [^\n]*amdgpu_kernel [^\n]*?\((.*?)\)[^()\n]*\{\n(.*?)^\}", re.M | re.S
)
_DEVICE_PARAMETER = re.compile(r"ptr addrspace\(1\)[^,]*?(%[\w.]+)(?:,|$)")
_BLOCK = re.compile(r"^([\w.]+):(?:.*; preds = (.*))?")
_INSTRUCTION = re.compile(r"^  (%[\w.]+) = (?:tail |notail )?(\w+) (.*)$")
_VALUE = re.compile(r"%[\w.]+")
_INCOMING = re.compile(r"\[ ([^,\]]+), %")
_OF_POINTERS = ("getelementptr", "addrspacecast", "bitcast", "phi", "select", "freeze")


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction that has a value."""

    block: str
    operation: str
    text: str

    @property
    def operands(self) -> list[str]:
        """Names of the values that it takes; of a phi, not the names of the blocks."""
        text = self.text.split(", !")[0]
        if self.operation == "phi":
            text = " ".join(_INCOMING.findall(text))
        return _VALUE.findall(text)


@dataclass
class Function:
    """A kernel: its instructions by name, the predecessors of its blocks, its device buffers."""

    device_parameters: frozenset[str]
    instructions: dict[str, Instruction] = field(default_factory=dict)
    predecessors: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Function":
        """The one kernel in LLVM's text."""
        ((parameters, body),) = _KERNEL.findall(text)
        function = cls(frozenset(_DEVICE_PARAMETER.findall(parameters)))
        block = ""
        for line in body.splitlines():
            if label := _BLOCK.match(line):
                block = label[1]
                function.predecessors[block] = [
                    name.strip().removeprefix("%") for name in (label[2] or "").split(",")
                ]
            elif instruction := _INSTRUCTION.match(line):
                name, operation, rest = instruction.groups()
                function.instructions[name] = Instruction(block, operation, rest)
        return function

    @cached_property
    def ancestors(self) -> dict[str, set[str]]:
        """The blocks from which a block can be reached."""
        return {block: self._before(block) for block in self.predecessors}

    def _before(self, block: str) -> set[str]:
        found: set[str] = set()
        open_ends = [block]
        while open_ends:
            for before in self.predecessors.get(open_ends.pop(), []):
                if before not in found:
                    found.add(before)
                    open_ends.append(before)
        return found

    def is_in_loop(self, block: str) -> bool:
        """Whether a block can be reached from itself."""
        return block in self.ancestors.get(block, set())

    def begins_loop(self, block: str) -> bool:
        """Whether an outermost loop is entered here."""
        before = self.predecessors.get(block, [])
        return self.is_in_loop(block) and any(
            block not in self.ancestors.get(one, set()) for one in before
        )

    def is_device_load(self, instruction: Instruction) -> bool:
        """Whether it loads from a buffer, and neither threadgroup memory nor constants."""
        return instruction.operation == "load" and any(
            self._is_device_pointer(value, set()) for value in instruction.operands
        )

    def _is_device_pointer(self, value: str, seen: set[str]) -> bool:
        if value in self.device_parameters:
            return True
        instruction = self.instructions.get(value)
        if value in seen or instruction is None or instruction.operation not in _OF_POINTERS:
            return False
        seen.add(value)
        return any(self._is_device_pointer(each, seen) for each in instruction.operands)


def dependent_loads(text: str) -> int:
    """The longest chain of device loads in one pass of a loop, each with an address that comes
    from the one before it."""
    function = Function.parse(text)
    depths: dict[str, int] = {}

    def depth(value: str) -> int:
        """Loads in the chain that ends with this value."""
        instruction = function.instructions.get(value)
        if instruction is None or not function.is_in_loop(instruction.block):
            return 0
        if instruction.operation == "phi" and function.begins_loop(instruction.block):
            return 0
        if value not in depths:
            depths[value] = 0  # while an inner loop comes back to it
            before = max(map(depth, instruction.operands), default=0)
            depths[value] = before + function.is_device_load(instruction)
        return depths[value]

    return max(map(depth, function.instructions), default=0)
