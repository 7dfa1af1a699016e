"""The declarations of a source: what begins and ends where. Function bodies are not looked into."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from .tokens import TokenList

_ACCESS = frozenset({"public", "private", "protected"})
_CLASS_KEYS = frozenset({"struct", "class", "union", "enum"})
_WITH_PARENTHESES = frozenset({"__attribute__", "__declspec", "alignas", "decltype", "_Pragma"})


class Kind(Enum):
    NAMESPACE = auto()
    CLASS = auto()
    FUNCTION = auto()  # with its body
    INSTANTIATION = auto()  # template f<...>;
    OTHER = auto()  # whatever else ends in ";"


@dataclass(slots=True)
class Declaration:
    """The tokens [start, stop). `head` is the first behind template<...> and attributes."""

    kind: Kind
    start: int
    stop: int
    head: int
    is_template: bool = False
    parameters: int | None = None  # the "(" of a function
    body: int | None = None  # the "{" of a namespace, class or function
    name: str = ""
    namespace: tuple[str, ...] = ()
    members: list["Declaration"] = field(default_factory=list)

    def walk(self) -> Iterator["Declaration"]:
        yield self
        for member in self.members:
            yield from member.walk()


def parse(tokens: TokenList) -> list[Declaration]:
    """The declarations at the top of the source, with those inside of namespaces and classes."""
    return _Parser(tokens).scope(0, len(tokens), is_class=False, namespace=())


class _Parser:
    def __init__(self, tokens: TokenList) -> None:
        self._tokens = tokens

    def scope(
        self, start: int, stop: int, *, is_class: bool, namespace: tuple[str, ...]
    ) -> list[Declaration]:
        tokens = self._tokens
        found = []
        index = start
        while tokens.following(index) < stop:
            first = tokens.following(index)
            if tokens[first].text == ";":
                index = first + 1
            elif is_class and tokens[first].text in _ACCESS:
                index = first + 2
            else:
                # From `index`: attributes before a declaration belong to it.
                declaration = self._declaration(index, first, stop, namespace)
                found.append(declaration)
                index = declaration.stop
        return found

    def _declaration(
        self, start: int, first: int, stop: int, namespace: tuple[str, ...]
    ) -> Declaration:
        tokens = self._tokens
        words = tokens.words(first, min(first + 3, stop))
        if words[0] == "namespace" or words[:2] == ["inline", "namespace"]:
            return self._namespace(start, first, namespace)
        if words[0] == "extern" and words[2:] == ["{"]:
            return self._namespace(start, first, namespace)
        head = first
        while tokens[head].text == "template":
            after = tokens.following(head + 1)
            if tokens[after].text != "<":
                end = self._end_of_statement(after, stop)
                return Declaration(
                    Kind.INSTANTIATION, start, end, after, is_template=True, namespace=namespace
                )
            head = tokens.following(tokens.skip_template_arguments(after))
        declaration = Declaration(
            Kind.OTHER, start, stop, head, is_template=head != first, namespace=namespace
        )
        self._find_end(declaration, stop)
        return declaration

    def _namespace(self, start: int, first: int, namespace: tuple[str, ...]) -> Declaration:
        tokens = self._tokens
        brace = first
        while tokens[brace].text not in ("{", ";"):
            brace += 1
        if tokens[brace].text == ";":  # an alias
            return Declaration(Kind.OTHER, start, brace + 1, first, namespace=namespace)
        names = [w for w in tokens.words(first, brace) if w not in ("inline", "namespace", "::")]
        inner = namespace if tokens[first].text == "extern" else (*namespace, *names)
        stop = tokens.closing(brace) + 1
        members = self.scope(brace + 1, stop - 1, is_class=False, namespace=inner)
        return Declaration(
            Kind.NAMESPACE, start, stop, first, body=brace, namespace=namespace, members=members
        )

    def _find_end(self, declaration: Declaration, stop: int) -> None:
        """Set the end, and with it what kind of declaration this is."""
        tokens = self._tokens
        is_class = has_value = False
        index = declaration.head
        while index < stop:
            token = tokens[index]
            is_function = declaration.parameters is not None and not has_value
            if token.kind == "erased":
                index += 1
            elif token.text == ";":
                declaration.stop = index + 1
                return
            elif token.text == "operator":
                index = self._skip_operator_name(index)
                declaration.name = declaration.name or "operator"
            elif token.text in _WITH_PARENTHESES:
                index = tokens.skip(tokens.following(index + 1))
            elif token.text in _CLASS_KEYS and declaration.parameters is None:
                is_class = True
                index += 1
            elif token.text == "=":
                has_value = True
                index += 1
            elif token.text == "(" and declaration.parameters is None and not has_value:
                declaration.parameters = index
                declaration.name = declaration.name or self._name_before(index)
                index = tokens.skip(index)
            elif token.text == "<" and not has_value and self._is_name(index - 1):
                index = tokens.template_arguments_end(index) or index + 1
            elif token.text == ":" and is_function:
                index = self._skip_initialisers(index + 1)
            elif token.text == "{" and is_function:
                self._finish(declaration, Kind.FUNCTION, index, tokens.skip(index))
                return
            elif token.text == "{" and is_class and not has_value:
                end = self._end_of_statement(tokens.skip(index), stop)
                declaration.name = self._class_name(declaration.head, index)
                self._finish(declaration, Kind.CLASS, index, end)
                return
            else:
                index = tokens.skip(index)
        tokens.fail("declaration without an end", declaration.head)

    def _finish(self, declaration: Declaration, kind: Kind, body: int, stop: int) -> None:
        declaration.kind, declaration.body, declaration.stop = kind, body, stop
        if kind is Kind.CLASS and self._tokens[declaration.head].text != "enum":
            inside = (*declaration.namespace, declaration.name)
            declaration.members = self.scope(
                body + 1, self._tokens.closing(body), is_class=True, namespace=inside
            )

    def _end_of_statement(self, index: int, stop: int) -> int:
        while index < stop:
            if self._tokens[index].text == ";":
                return index + 1
            index = self._tokens.skip(index)
        self._tokens.fail("statement without an end", stop - 1)

    def _skip_operator_name(self, index: int) -> int:
        """From `operator` to the parameter list, over the "()" of operator()."""
        tokens = self._tokens
        index = tokens.following(index + 1)
        if tokens[index].text == "(":
            return tokens.skip(index)
        while tokens[index].text != "(":
            index += 1
        return index

    def _skip_initialisers(self, index: int) -> int:
        """From behind a constructor's ":" to its body."""
        tokens = self._tokens
        while True:
            while tokens[index].text not in ("(", "{"):
                is_argument_list = tokens[index].text == "<"
                index = tokens.skip_template_arguments(index) if is_argument_list else index + 1
            index = tokens.following(tokens.skip(index))
            if tokens[index].text != ",":
                return index
            index += 1

    def _is_name(self, index: int) -> bool:
        return self._tokens[self._tokens.preceding(index)].kind == "name"

    def _name_before(self, index: int) -> str:
        return self._tokens[self._tokens.preceding(index - 1)].text

    def _class_name(self, head: int, brace: int) -> str:
        words = self._tokens.words(head, brace)
        key = next(i for i, word in enumerate(words) if word in _CLASS_KEYS)
        return words[key + 1] if key + 1 < len(words) else ""
