"""A lazy graph of MLX, from its exported form, and the order in which MLX evaluates it."""

import io
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

WIDTH = 20
"""The default of MLX_BFS_MAX_WIDTH."""

NODE = re.compile(r'\{ (\d+) \[label ="([^"]+)"')
EDGE_IN = re.compile(r'"([^"]+)" -> (\d+)$')
EDGE_OUT = re.compile(r'(\d+) -> "([^"]+)"$')


@dataclass(eq=False)
class Node:
    """A primitive that is not evaluated yet, with the names of its arrays."""

    primitive: str
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


class Graph:
    """What evaluating `arrays` computes.

    Args:
        arrays: in the order in which they are given to mx.eval.
        names: names of these and of other arrays; MLX makes names for the rest.

    Attributes:
        nodes: in no meaningful order.
        producer: by the name of an array that is not evaluated, its node.
    """

    def __init__(self, arrays: Sequence[mx.array], names: Mapping[str, mx.array]) -> None:
        text = io.StringIO()
        mx.export_to_dot(text, *arrays, **names)
        by_id: dict[str, Node] = {}
        for line in text.getvalue().splitlines():
            if match := NODE.match(line):
                by_id[match[1]] = Node(match[2])
            elif match := EDGE_IN.match(line):
                by_id[match[2]].inputs.append(match[1])
            elif match := EDGE_OUT.match(line):
                by_id[match[1]].outputs.append(match[2])
        self.nodes = list(by_id.values())
        self.producer = {name: node for node in self.nodes for name in node.outputs}

    def origin(self, name: str, known: Container[str]) -> str | None:
        """The known array that this array is a view of, or that writes have changed to it."""
        while name not in known:
            node = self.producer.get(name)
            if node is None or not node.inputs:
                return None
            place = 2 + node.outputs.index(name) if node.primitive == "WriteKV" else 0
            name = node.inputs[place]
        return name

    def evaluation_order(self, outputs: Sequence[str], width: int = WIDTH) -> list[Node]:
        """The nodes in the order in which MLX evaluates them for these outputs."""
        root = Node("Synchronizer", list(outputs))
        uses = self._uses(root)
        tape, stack = [root], list[tuple[Node, int]]()
        position = 0
        while position < len(tape) or stack:
            if position < len(tape):
                node, first = tape[position], 0
                position += 1
            else:
                node, first = stack.pop()
            for place in range(first, len(node.inputs)):
                producer = self.producer.get(node.inputs[place])
                if producer is None:
                    continue
                if len(tape) - position >= width:
                    stack.append((node, place))
                    break
                uses[producer] -= 1
                if not uses[producer]:
                    tape.append(producer)
        return tape[:0:-1]

    def _uses(self, root: Node) -> Counter[Node]:
        """How often each node's outputs are inputs."""
        uses: Counter[Node] = Counter()
        stack, seen = [root], {root}
        while stack:
            for name in stack.pop().inputs:
                producer = self.producer.get(name)
                if producer is not None:
                    uses[producer] += 1
                    if producer not in seen:
                        seen.add(producer)
                        stack.append(producer)
        return uses
