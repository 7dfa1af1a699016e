"""What functions are called, and with what: rules that need overloads and templates resolved."""

import re
from collections.abc import Iterator

from .source import MetalSource
from .syntax_tree import (
    Node,
    body,
    callee,
    children,
    referenced,
    type_of,
    walk,
    without_implicit,
    written_type,
)

Found = Iterator[tuple[str, str]]

_ADDRESS_SPACE = re.compile(r"__(?:constant|global|local|private)")
_DELTA_SHUFFLES = ("simd_shuffle", "quad_shuffle")


def recursion(source: MetalSource) -> Found:
    functions = source.tree.functions
    calls = {
        name: {r for node in walk(function) if (r := referenced(node)) in functions}
        for name, function in functions.items()
    }
    for function in {function["id"]: function for function in functions.values()}.values():
        reached: set[str] = set()
        pending = set(calls[function["id"]])
        while pending:
            current = functions[pending.pop()]["id"]
            reached.add(current)
            pending |= {functions[called]["id"] for called in calls[current]} - reached
        if function["id"] in reached:
            yield source.tree.place(function), f"{function['name']} calls itself"


def fast_and_precise(source: MetalSource) -> Found:
    """fast:: and precise:: have functions of float and of vectors of float only."""
    for namespace in ("fast", "precise"):
        functions = source.tree.library_functions(namespace)
        for call in _calls(source):
            function = functions.get(callee(call))
            if function is None:
                continue
            for argument in map(without_implicit, children(call)[1:]):
                if "float" not in type_of(argument):
                    name = f"{namespace}::{function['name']}"
                    yield source.tree.place(call), f"{name} of {written_type(argument)}"
                    break


def shuffle_deltas(source: MetalSource) -> Found:
    """A delta is a ushort: a negative one would be a lane far away."""
    for call in _calls(source):
        named = without_implicit(children(call)[0])
        name = str(named.get("referencedDecl", {}).get("name", ""))
        if not name.startswith(_DELTA_SHUFFLES):
            continue
        delta = without_implicit(children(call)[-1])
        if _may_be_negative(delta):
            yield source.tree.place(call), f"{name} by what may be negative: expected a ushort"


def choices_of_two_address_spaces(source: MetalSource) -> Found:
    """Both arms of ``?:`` are variables, but their references cannot have one type."""
    for choice in _nodes(source, "ConditionalOperator"):
        arms = [without_implicit(arm) for arm in children(choice)[1:]]
        spaces = [_ADDRESS_SPACE.findall(type_of(arm)) for arm in arms]
        if all(arm.get("valueCategory") == "lvalue" for arm in arms) and spaces[0] != spaces[1]:
            types = " and ".join(type_of(arm) for arm in arms)
            yield source.tree.place(choice), f"?: of two address spaces, {types}"


def _calls(source: MetalSource) -> Iterator[Node]:
    return _nodes(source, "CallExpr")


def _nodes(source: MetalSource, kind: str) -> Iterator[Node]:
    for function in source.tree.functions.values():
        statements = body(function)
        assert statements is not None
        yield from (node for node in walk(statements) if node["kind"] == kind)


def _may_be_negative(expression: Node) -> bool:
    if expression["kind"] == "IntegerLiteral":
        return False
    is_negated = any(node.get("opcode") == "-" for node in walk(expression) if _is_unary(node))
    return is_negated or "unsigned" not in type_of(expression)


def _is_unary(node: Node) -> bool:
    return bool(node["kind"] == "UnaryOperator")
