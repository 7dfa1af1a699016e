"""An argument that a pipeline may lack is read only where its function constant is true."""

from collections.abc import Iterator
from dataclasses import dataclass

from .source import MetalSource
from .syntax_tree import (
    Node,
    SyntaxTree,
    body,
    callee,
    parameters,
    referenced,
    without_implicit,
)

Found = Iterator[tuple[str, str]]
Facts = frozenset[tuple[str, bool]]
"""Constants by id, and what they are known to be."""

_LEAVING = frozenset({"ReturnStmt", "BreakStmt", "ContinueStmt"})


def absent_arguments(source: MetalSource) -> Found:
    """The argument may also be handed on to a function that reads it only there."""
    tree = source.tree
    constants = {node.name: key for key, node in tree.variables.items()}
    for kernel in source.kernels:
        for function in tree.functions.values():
            if function.name != kernel.name:
                continue
            for argument, declared in zip(parameters(function), kernel.parameters, strict=True):
                if declared.condition in constants:
                    check = _Check(tree, _resolve(tree, constants[declared.condition], True))
                    for read in check.reads(function, argument.id, frozenset()):
                        message = f"{declared.name} is read where {declared.condition} may be false"
                        yield tree.place(read), f"{kernel.name}: {message}"


@dataclass(frozen=True)
class _Check:
    tree: SyntaxTree
    needed: Facts

    def reads(self, function: Node, argument: str, facts: Facts) -> Iterator[Node]:
        """The places where a function reads its argument without what is needed."""
        statements = body(function)
        if statements is not None and not self.needed <= facts:
            yield from self._visit(statements, argument, facts)

    def _visit(self, node: Node, argument: str, facts: Facts) -> Iterator[Node]:
        if self.needed <= facts or argument not in self.tree.names[node.number]:
            return
        if referenced(node) == argument:
            yield node
            return
        parts = node.children
        if node.kind == "CompoundStmt":
            yield from self._statements(parts, argument, facts)
        elif node.kind in ("IfStmt", "ConditionalOperator"):
            condition, *branches = parts
            yield from self._visit(condition, argument, facts)
            for branch, value in zip(branches, (True, False), strict=False):
                known = facts | self._known(condition, value)
                yield from self._visit(branch, argument, known)
        elif node.opcode in ("&&", "||"):
            left, right = parts
            yield from self._visit(left, argument, facts)
            known = facts | self._known(left, node.opcode == "&&")
            yield from self._visit(right, argument, known)
        elif node.kind == "CallExpr" and callee(node) in self.tree.functions:
            yield from self._call(node, argument, facts)
        else:
            for part in parts:
                yield from self._visit(part, argument, facts)

    def _statements(self, parts: list[Node], argument: str, facts: Facts) -> Iterator[Node]:
        """One after the other: behind `if (!C) return;` C is true."""
        for part in parts:
            yield from self._visit(part, argument, facts)
            if part.kind == "IfStmt" and len(part.children) == 2:
                condition, branch = part.children
                if branch.kind == "CompoundStmt" and branch.children:
                    branch = branch.children[-1]
                if branch.kind in _LEAVING:
                    facts |= self._known(condition, False)

    def _call(self, call: Node, argument: str, facts: Facts) -> Iterator[Node]:
        function = self.tree.functions[callee(call)]
        for given, taken in zip(call.children[1:], parameters(function), strict=False):
            address, rest = _address(given, argument)
            if address:
                yield from self.reads(function, taken.id, facts)
            for part in rest:
                yield from self._visit(part, argument, facts)

    def _known(self, condition: Node, value: bool) -> Facts:
        """What follows if a condition has a value."""
        condition = without_implicit(condition)
        parts = condition.children
        opcode = condition.opcode
        if condition.kind == "UnaryOperator" and opcode == "!":
            return self._known(parts[0], not value)
        if opcode == ("&&" if value else "||"):
            return self._known(parts[0], value) | self._known(parts[1], value)
        if referenced(condition) in self.tree.variables:
            return _resolve(self.tree, referenced(condition), value)
        return frozenset()


def _resolve(tree: SyntaxTree, constant: str, value: bool) -> Facts:
    """What a constant's value says of the function constants that it is made of."""
    initialiser = tree.variables[constant].children
    if initialiser:
        known = _Check(tree, frozenset())._known(initialiser[0], value)
        if known:
            return known
    return frozenset({(constant, value)})


def _address(expression: Node, argument: str) -> tuple[bool, list[Node]]:
    """Whether an expression is the argument, or the argument plus something; and what is left."""
    expression = without_implicit(expression)
    if referenced(expression) == argument:
        return True, []
    if expression.kind == "BinaryOperator" and expression.opcode in ("+", "-"):
        sides = [_address(side, argument) for side in expression.children]
        return any(found for found, _ in sides), [node for _, rest in sides for node in rest]
    return False, [expression]
