"""Clang's syntax tree of a Metal source, translated to C++ for OpenCL.

Types, overloads and templates are resolved in it, and types name their address space. It is read
from clang's text: clang's JSON is fourteen times as long.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from .. import toolchain
from ..language.opencl import to_opencl
from ..typecheck import OPENCL_FLAGS, OPENCL_HEADERS

_FLAGS = (*OPENCL_FLAGS, "-Wno-everything", "-Werror=pre-c++17-compat", "-Xclang", "-ast-dump")
"""With what clang says of C++17, which Metal 3 has not, as errors."""

_ID = "0x[0-9a-f]+"
_RANGE = "<(?:<[^<>]*>|[^<>])*>"
_LINE = re.compile(
    rf"^([ |`-]*)(?:(?:(TemplateArgument|CXXCtorInitializer)|(\w+) ({_ID}))(.*)|.*)$",
    re.MULTILINE,
)
"""Two letters for each level; the kind and the id of a node; the rest. Lines without a kind are
parts of types and of values."""

_PLACE = re.compile(rf"(?: (?:parent|prev) {_ID})* ({_RANGE})((?: (?:<[^<>]*>)?[^ ]*)?)")
"""Where a node is: its range, and for a declaration its name's place."""

_POSITION = re.compile(r"(line|<[^<>]*>|[^\s<>,:]+):(\d+):\d+")
"""A file and a line, or a line of the file that was named last. A column is of the last line."""

_PREVIOUS = re.compile(rf" prev ({_ID})")
_TYPE = re.compile("'([^']*)'(?::'([^']*)')?( lvalue)?")
_OPCODE = re.compile("'([^\\w' :]{1,3})'")
_OPERATORS = frozenset({"UnaryOperator", "BinaryOperator", "CompoundAssignOperator"})
_REFERENCE = re.compile(rf"({_ID})(?: '([^']*)')?")
_TEMPLATE_PARAMETER = re.compile(r" depth \d+ index \d+(?: \.\.\.)? ([A-Za-z_]\w*)$")
_NAMELESS = frozenset({"UsingDirectiveDecl", "LinkageSpecDecl"})
_MARKS = frozenset({"used", "referenced", "implicit", "invalid", "constexpr", "inline"})
_BEFORE_NAMES = _MARKS | {"struct", "class", "union", "enum"}


@dataclass(slots=True)
class Node:
    """Attributes:
    kind: clang's name for it.
    id: of a declaration: what `referenced` returns of its uses.
    text: what clang says of it.
    number: of its line in what clang says.
    children: the nodes in it.
    """

    kind: str
    id: str
    text: str
    number: int
    children: "list[Node]" = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of a declaration, or ""."""
        place = _PLACE.match(self.text)
        text = self.text[place.end() :] if place and self.kind not in _NAMELESS else ""
        parameter = _TEMPLATE_PARAMETER.search(text)
        if parameter:
            return parameter[1]
        words = (word for word in text.partition("'")[0].split() if word not in _BEFORE_NAMES)
        return next(words, "")

    @property
    def opcode(self) -> str:
        """Of an operator, or ""."""
        found = _OPCODE.search(self.text) if self.kind in _OPERATORS else None
        return found[1] if found else ""

    @property
    def is_variable(self) -> bool:
        """Whether an expression is something in memory, which a reference can be bound to."""
        found = _TYPE.search(self.text)
        return found is not None and found[3] is not None


def walk(node: Node) -> Iterator[Node]:
    """A node and all nodes in it."""
    pending = [node]
    while pending:
        current = pending.pop()
        yield current
        pending += reversed(current.children)


def body(function: Node) -> Node | None:
    """The statement of a function that is defined here."""
    bodies = (child for child in function.children if child.kind == "CompoundStmt")
    return next(bodies, None)


def parameters(function: Node) -> list[Node]:
    return [child for child in function.children if child.kind == "ParmVarDecl"]


def type_of(node: Node) -> str:
    """The type without names that only stand for it."""
    found = _TYPE.search(node.text)
    return found[2] or found[1] if found else ""


def written_type(node: Node) -> str:
    """The type as the source names it, without its address space."""
    found = _TYPE.search(node.text)
    return found[1].removeprefix("__private ") if found else ""


def referenced(node: Node) -> str:
    """The id of the declaration that a name refers to, or ""."""
    found = _reference(node)
    return found[1] if found else ""


def referenced_name(node: Node) -> str:
    """The name that refers to a declaration, or ""."""
    found = _reference(node)
    return found[2] or "" if found else ""


def _reference(node: Node) -> re.Match[str] | None:
    if node.kind in ("DeclRefExpr", "MemberExpr"):
        return _REFERENCE.search(node.text)
    return None


def skip(node: Node, is_skipped: Callable[[Node], bool]) -> Node:
    """The innermost only child, as long as nodes are skipped."""
    while is_skipped(node) and len(node.children) == 1:
        (node,) = node.children
    return node


def without_implicit(node: Node) -> Node:
    """An expression as it is written: without parentheses and conversions that nobody wrote."""
    written = ("ParenExpr", "ExprWithCleanups", "MaterializeTemporaryExpr", "ConstantExpr")
    return skip(node, lambda each: each.kind in ("ImplicitCastExpr", *written))


def callee(call: Node) -> str:
    """The id of the function that a call calls, or ""."""
    return referenced(without_implicit(call.children[0])) if call.children else ""


@dataclass(frozen=True)
class SyntaxTree:
    """Attributes:
    dump: what clang says of the translated text.
    errors: what clang refuses of it, and what of it is newer than Metal 3.
    library: the declarations of Metal's standard library.
    own: those of the source.
    """

    dump: str
    errors: str
    library: tuple[Node, ...]
    own: tuple[Node, ...]

    @classmethod
    def of(cls, preprocessed: str) -> "SyntaxTree":
        """What clang refuses is missing in the tree: `typecheck` reports it."""
        dump, errors = toolchain.output_of_clang(*_FLAGS, "-", source=to_opencl(preprocessed))
        nodes = _nodes(dump)
        first = next((i for i, node in enumerate(nodes) if _is_own(node)), len(nodes))
        return cls(dump, errors, tuple(nodes[:first]), tuple(nodes[first:]))

    @cached_property
    def functions(self) -> dict[str, Node]:
        """All functions with a body, also under the ids of their earlier declarations. Of a
        template these are its instances, not the template itself."""
        found = {}
        for top in self.own:
            for node in _without_templates(top):
                if node.kind in ("FunctionDecl", "CXXMethodDecl") and body(node) is not None:
                    found[node.id] = node
                    earlier = _PREVIOUS.match(node.text)
                    if earlier:
                        found[earlier[1]] = node
        return found

    @cached_property
    def variables(self) -> dict[str, Node]:
        """Variables outside of functions, by id."""
        return {node.id: node for node in self.own if node.kind == "VarDecl"}

    @cached_property
    def names(self) -> dict[int, frozenset[str]]:
        """The ids of all that is named in a node of a function, by the node's number."""
        found: dict[int, frozenset[str]] = {}
        for function in self.functions.values():
            _collect_names(function, found)
        return found

    @cached_property
    def in_bodies(self) -> dict[str, list[Node]]:
        """The nodes in the bodies of functions, by kind."""
        found = defaultdict(list)
        for function in {each.id: each for each in self.functions.values()}.values():
            statements = body(function)
            assert statements is not None
            for node in walk(statements):
                found[node.kind].append(node)
        return found

    def library_functions(self, namespace: str) -> dict[str, Node]:
        """The functions of a namespace of the library, by id."""
        return {
            function.id: function
            for top in self.library
            for node in _namespaces(top)
            if node.name == namespace
            for function in node.children
        }

    def place(self, node: Node) -> str:
        """The file and line of a node."""
        return self._places[node.number]

    @cached_property
    def _places(self) -> list[str]:
        """By number of a line, where its node begins."""
        places = []
        file, line = "<source>", 1
        for text in _LINE.finditer(self.dump):
            place = _PLACE.match(text[5] or "")
            begin = file, line
            for number, part in enumerate(place.groups() if place else ()):
                before = len(part.partition(",")[0])
                for position in _POSITION.finditer(part):
                    file = file if position[1] == "line" else position[1]
                    line = int(position[2])
                    if number == 0 and position.end() <= before:
                        begin = file, line
            places.append(f"{Path(begin[0]).name}:{begin[1]}")
        return places


def _nodes(dump: str) -> list[Node]:
    """The nodes at the top of clang's text."""
    root = Node("", "", "", 0)
    path: list[Node | None] = [root]
    for number, line in enumerate(_LINE.finditer(dump)):
        level, kind, more_kind, identity, text = line.groups()
        depth = len(level) // 2
        node = None
        parent = path[depth]
        if parent is not None and (kind or more_kind):
            node = Node(kind or more_kind, identity or "", text, number)
            parent.children.append(node)
        path[depth + 1 :] = [node]
    return [node for top in root.children for node in top.children]


def _collect_names(node: Node, found: dict[int, frozenset[str]]) -> frozenset[str]:
    names = {referenced(node)} - {""}
    for child in node.children:
        names |= _collect_names(child, found)
    found[node.number] = frozenset(names)
    return found[node.number]


def _without_templates(node: Node) -> Iterator[Node]:
    """A node and all nodes in it, without those whose types are not known yet."""
    yield node
    for child in node.children:
        is_template = node.kind == "ClassTemplateDecl" and child.kind == "CXXRecordDecl"
        if node.kind == "FunctionTemplateDecl":
            is_template = all(part.kind != "TemplateArgument" for part in child.children)
        if not is_template:
            yield from _without_templates(child)


def _namespaces(node: Node) -> Iterator[Node]:
    if node.kind == "NamespaceDecl":
        yield node
        for child in node.children:
            yield from _namespaces(child)


def _is_own(node: Node) -> bool:
    position = _POSITION.search(node.text)
    file = position[1] if position else "line"
    return not (file == "line" or file.startswith(("<", str(OPENCL_HEADERS))))
