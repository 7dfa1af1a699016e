"""A Metal source as the rules see it: its text, its tokens and declarations, its syntax tree."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..language import constants, kernels
from ..language.attributes import Attributes
from ..language.constants import FunctionConstant
from ..language.declarations import Declaration, Kind, parse
from ..language.kernels import KernelFunction
from ..language.tokens import TokenList
from ..preprocess import preprocess
from .syntax_tree import SyntaxTree


@dataclass(frozen=True, order=True)
class Finding:
    """What breaks a rule, and where: in a source "file.metal:line", else a kernel."""

    place: str
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: [{self.rule}] {self.message}"


def split_instantiation(text: str) -> tuple[str, str]:
    """A source without its last line, and that line, if it only instantiates a template."""
    template, _, last = text.rstrip("\n").rpartition("\n")
    return (template, last) if last.startswith("template [[host_name(") else (text, "")


@dataclass(frozen=True)
class MetalSource:
    """The whole text that Apple's compiler gets, and what it is called in findings.

    `tokens` are without the attributes and without the keyword `kernel`.
    """

    text: str
    name: str

    @cached_property
    def preprocessed(self) -> str:
        return preprocess(self.text, self.name, [])

    @cached_property
    def written(self) -> TokenList:
        """The tokens with all attributes."""
        return TokenList(self.preprocessed)

    @cached_property
    def tokens(self) -> TokenList:
        return TokenList(self.preprocessed)

    @cached_property
    def attributes(self) -> Attributes:
        return Attributes(self.tokens)

    @cached_property
    def declarations(self) -> list[Declaration]:
        _ = self.attributes
        return parse(self.tokens)

    @cached_property
    def kernels(self) -> list[KernelFunction]:
        return kernels.find_functions(self.tokens, self.attributes, self.declarations)

    @cached_property
    def constants(self) -> dict[FunctionConstant, Declaration]:
        return constants.find(self.tokens, self.attributes, self.declarations)

    @cached_property
    def tree(self) -> SyntaxTree:
        return SyntaxTree.of(self.preprocessed)

    def walk(self) -> Iterator[Declaration]:
        """Every declaration, those in namespaces and classes too."""
        return (each for top in self.declarations for each in top.walk())

    def function_tokens(self) -> Iterator[tuple[Declaration, int]]:
        """Every token inside of a function's body, with the function."""
        for function in self.walk():
            if function.kind is Kind.FUNCTION and function.body is not None:
                for index in self.tokens.present(function.body + 1, function.stop - 1):
                    yield function, index

    def program_variables(self) -> Iterator[Declaration]:
        """Variables outside of functions, and static members of classes."""
        yield from self._variables(self.declarations, is_class=False)

    def _variables(self, scope: list[Declaration], is_class: bool) -> Iterator[Declaration]:
        for declaration in scope:
            words = self.tokens.words(declaration.head, declaration.stop)
            is_type = words[0] in ("using", "typedef", "static_assert", "friend", "enum")
            is_type |= words[0] in ("struct", "class", "union") and len(words) == 3
            is_variable = declaration.kind is Kind.OTHER and declaration.parameters is None
            if is_variable and not is_type and (not is_class or "static" in words):
                yield declaration
            yield from self._variables(declaration.members, declaration.kind is Kind.CLASS)

    def place(self, index: int) -> str:
        """Of a token."""
        return Path(self.tokens.location(index)).name
