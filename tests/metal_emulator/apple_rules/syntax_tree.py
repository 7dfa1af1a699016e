"""Clang's syntax tree of a Metal source, translated to C++ for OpenCL.

Types, overloads and templates are resolved in it, and types name their address space.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import toolchain
from ..language.opencl import to_opencl
from ..typecheck import OPENCL_FLAGS

Node = dict[str, Any]
"""As clang's -ast-dump=json has it."""

_MARKER = re.compile(r'#(?:line)?\s+(\d+)(?:\s+"([^"]*)")?')


def children(node: Node) -> list[Node]:
    return [child for child in node.get("inner", ()) if child.get("kind")]


def walk(node: Node) -> Iterator[Node]:
    """A node and all nodes in it."""
    yield node
    for child in children(node):
        yield from walk(child)


def body(function: Node) -> Node | None:
    """The statement of a function that is defined here."""
    bodies = (child for child in children(function) if child["kind"] == "CompoundStmt")
    return next(bodies, None)


def parameters(function: Node) -> list[Node]:
    return [child for child in children(function) if child["kind"] == "ParmVarDecl"]


def type_of(node: Node) -> str:
    """The type without names that only stand for it."""
    found = node.get("type", {})
    return str(found.get("desugaredQualType", found.get("qualType", "")))


def written_type(node: Node) -> str:
    """The type as the source names it, without its address space."""
    return str(node["type"]["qualType"]).removeprefix("__private ")


def referenced(node: Node) -> str:
    """The id of the declaration that a name refers to, or ""."""
    return str(node.get("referencedDecl", {}).get("id", node.get("referencedMemberDecl", "")))


def skip(node: Node, is_skipped: Callable[[Node], bool]) -> Node:
    """The innermost only child, as long as nodes are skipped."""
    while is_skipped(node) and len(children(node)) == 1:
        (node,) = children(node)
    return node


def without_implicit(node: Node) -> Node:
    """An expression as it is written: without parentheses and conversions that nobody wrote."""
    written = ("ParenExpr", "ExprWithCleanups", "MaterializeTemporaryExpr", "ConstantExpr")
    return skip(node, lambda each: each["kind"] in ("ImplicitCastExpr", *written))


def callee(call: Node) -> str:
    """The id of the function that a call calls, or ""."""
    return referenced(without_implicit(children(call)[0])) if children(call) else ""


@dataclass(frozen=True)
class SyntaxTree:
    """Attributes:
    source: the translated text.
    library: the declarations of Metal's standard library.
    own: those of the source.
    """

    source: str
    library: tuple[Node, ...]
    own: tuple[Node, ...]

    @classmethod
    def of(cls, preprocessed: str) -> "SyntaxTree":
        """What clang refuses is missing in the tree: `typecheck` reports it."""
        source = to_opencl(preprocessed)
        flags = (*OPENCL_FLAGS, "-Xclang", "-ast-dump=json", "-")
        nodes = json.loads(toolchain.clang(*flags, source=source, may_fail=True))["inner"]
        first = next((i for i, node in enumerate(nodes) if _is_from_input(node)), len(nodes))
        return cls(source, tuple(nodes[:first]), tuple(nodes[first:]))

    @cached_property
    def functions(self) -> dict[str, Node]:
        """All functions with a body, also under the ids of their earlier declarations. Of a
        template these are its instances, not the template itself."""
        found = {}
        for top in self.own:
            for node in _without_templates(top):
                if node["kind"] in ("FunctionDecl", "CXXMethodDecl") and body(node) is not None:
                    found[node["id"]] = node
                    if "previousDecl" in node:
                        found[node["previousDecl"]] = node
        return found

    @cached_property
    def variables(self) -> dict[str, Node]:
        """Variables outside of functions, by id."""
        return {node["id"]: node for node in self.own if node["kind"] == "VarDecl"}

    def library_functions(self, namespace: str) -> dict[str, Node]:
        """The functions of a namespace of the library, by id."""
        return {
            function["id"]: function
            for top in self.library
            for node in _namespaces(top)
            if node.get("name") == namespace
            for function in children(node)
        }

    def place(self, node: Node) -> str:
        """The file and line of a node."""
        offset = _offset(node.get("range", {}).get("begin", {}))
        file, line = "<source>", 1
        for text in self.source.encode()[:offset].decode(errors="replace").split("\n")[:-1]:
            marker = _MARKER.match(text)
            if marker:
                line, file = int(marker[1]), marker[2] or file
            else:
                line += 1
        return f"{Path(file).name}:{line}"


def _without_templates(node: Node) -> Iterator[Node]:
    """A node and all nodes in it, without those whose types are not known yet."""
    yield node
    for child in children(node):
        is_template = node["kind"] == "ClassTemplateDecl" and child["kind"] == "CXXRecordDecl"
        if node["kind"] == "FunctionTemplateDecl":
            is_template = all(part["kind"] != "TemplateArgument" for part in children(child))
        if not is_template:
            yield from _without_templates(child)


def _namespaces(node: Node) -> Iterator[Node]:
    if node["kind"] == "NamespaceDecl":
        yield node
        for child in children(node):
            yield from _namespaces(child)


def _is_from_input(node: Node) -> bool:
    location = node.get("loc", {})
    return "<stdin>" in (location.get("file"), location.get("expansionLoc", {}).get("file"))


def _offset(location: Node) -> int:
    return int(location.get("expansionLoc", location).get("offset", 0))
