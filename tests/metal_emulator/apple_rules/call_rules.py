"""What functions are called, and with what: rules that need overloads and templates resolved."""

import re
from collections.abc import Iterator

from .source import MetalSource
from .syntax_tree import (
    Node,
    callee,
    referenced_name,
    type_of,
    walk,
    without_implicit,
    written_type,
)

Found = Iterator[tuple[str, str]]

_ADDRESS_SPACE = re.compile(r"__(?:constant|global|local|private)")
_DELTA_SHUFFLES = ("simd_shuffle", "quad_shuffle")


def recursion(source: MetalSource) -> Found:
    functions, names = source.tree.functions, source.tree.names
    calls = {name: names[each.number] & functions.keys() for name, each in functions.items()}
    for function in {function.id: function for function in functions.values()}.values():
        reached: set[str] = set()
        pending = set(calls[function.id])
        while pending:
            current = functions[pending.pop()].id
            reached.add(current)
            pending |= {functions[called].id for called in calls[current]} - reached
        if function.id in reached:
            yield source.tree.place(function), f"{function.name} calls itself"


def fast_and_precise(source: MetalSource) -> Found:
    """fast:: and precise:: have functions of float and of vectors of float only."""
    for namespace in ("fast", "precise"):
        functions = source.tree.library_functions(namespace)
        for call in source.tree.in_bodies["CallExpr"]:
            function = functions.get(callee(call))
            if function is None:
                continue
            for argument in map(without_implicit, call.children[1:]):
                if "float" not in type_of(argument):
                    name = f"{namespace}::{function.name}"
                    yield source.tree.place(call), f"{name} of {written_type(argument)}"
                    break


def shuffle_deltas(source: MetalSource) -> Found:
    """A delta is a ushort: a negative one would be a lane far away."""
    for call in source.tree.in_bodies["CallExpr"]:
        name = referenced_name(without_implicit(call.children[0]))
        if not name.startswith(_DELTA_SHUFFLES):
            continue
        delta = without_implicit(call.children[-1])
        if _may_be_negative(delta):
            yield source.tree.place(call), f"{name} by what may be negative: expected a ushort"


def choices_of_two_address_spaces(source: MetalSource) -> Found:
    """Both arms of ``?:`` are variables, but their references cannot have one type."""
    for choice in source.tree.in_bodies["ConditionalOperator"]:
        arms = [without_implicit(arm) for arm in choice.children[1:]]
        spaces = [_ADDRESS_SPACE.findall(type_of(arm)) for arm in arms]
        if all(arm.is_variable for arm in arms) and spaces[0] != spaces[1]:
            types = " and ".join(type_of(arm) for arm in arms)
            yield source.tree.place(choice), f"?: of two address spaces, {types}"


def _may_be_negative(expression: Node) -> bool:
    if expression.kind == "IntegerLiteral":
        return False
    negated = (node for node in walk(expression) if node.kind == "UnaryOperator")
    return any(node.opcode == "-" for node in negated) or "unsigned" not in type_of(expression)
