"""Which names of Metal a source uses: keywords, attributes, types, functions, headers."""

import re
from collections.abc import Iterator
from functools import cache

from .apple_rules.source import MetalSource
from .apple_rules.syntax_tree import Node, SyntaxTree, walk
from .language.attributes import Attributes
from .language.tokens import TokenList

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DIRECTIVE = re.compile(r"^\s*#.*$", re.MULTILINE)
_INCLUDE = re.compile(r"#\s*include\s*<(metal_\w+)>")

_KEYWORDS = """
alignas alignof auto bool break case char class const const_cast constant constexpr continue
decltype default delete device do double else enum explicit extern false float for friend goto half
bfloat if inline int kernel long mutable namespace new noexcept nullptr operator private protected
public register reinterpret_cast return short signed sizeof static static_assert static_cast struct
switch template this thread threadgroup true typedef typename uchar uint ulong union unsigned ushort
using virtual void volatile while INFINITY NAN HUGE_VALF MAXFLOAT __METAL_VERSION__
"""
KEYWORDS = frozenset(_KEYWORDS.split())
"""Of C++ and of Metal, and names that are macros in the emulator."""


def constructs(text: str) -> set[str]:
    """The names that a source uses and does not declare."""
    plain = _COMMENT.sub("", text)
    tokens = TokenList(_DIRECTIVE.sub("", plain))
    attributes = {mark.name for mark in Attributes(tokens).between(0, len(tokens))}
    words = {tokens[i].text for i in tokens.present(0, len(tokens)) if tokens[i].kind == "name"}
    words |= {"__METAL_VERSION__"} & set(re.findall(r"\w+", plain))
    declared = set(_declared(MetalSource(text, "source.metal").tree))
    known = (words & library_names()) - declared | words & KEYWORDS
    return known | attributes | set(_INCLUDE.findall(plain))


@cache
def library_names() -> frozenset[str]:
    """All names of the standard library that the emulator knows."""
    tree = SyntaxTree.of("constant int nothing = 0;\n")
    return frozenset(name for node in tree.library for name in _library(node))


def _library(node: Node) -> Iterator[str]:
    if node.name:
        yield node.name
    if node.kind in ("NamespaceDecl", "LinkageSpecDecl", "EnumDecl", "CXXRecordDecl"):
        for child in node.children:
            yield from _library(child)


def _declared(tree: SyntaxTree) -> Iterator[str]:
    for top in tree.own:
        for node in walk(top):
            if node.kind.endswith("Decl") and node.name:
                yield node.name
