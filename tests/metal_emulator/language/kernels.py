"""Kernel functions: their parameters and their host names."""

import ast
from dataclasses import dataclass

from .attributes import Attribute, Attributes
from .declarations import Declaration, Kind
from .tokens import TokenList

BUILTINS = {
    name: name
    for name in (
        "thread_position_in_threadgroup",
        "thread_position_in_grid",
        "threadgroup_position_in_grid",
        "threads_per_threadgroup",
        "dispatch_threads_per_threadgroup",
        "threadgroups_per_grid",
        "threads_per_grid",
        "thread_index_in_threadgroup",
        "thread_index_in_simdgroup",
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "threads_per_simdgroup",
        "quadgroup_index_in_threadgroup",
        "thread_index_in_quadgroup",
    )
} | {
    "dispatch_simdgroups_per_threadgroup": "simdgroups_per_threadgroup",
    "grid_size": "threads_per_grid",
    "thread_execution_width": "threads_per_simdgroup",
}
"""Attributes of parameters that the GPU fills in, and what abi.h calls them."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: `kind` is "buffer", "threadgroup_memory" or "builtin"."""

    kind: str
    index: str
    name: str
    condition: str  # the expression of its function_constant(...) attribute, or ""
    words: tuple[str, ...]  # of its type and name
    start: int  # its first token


@dataclass(frozen=True, slots=True)
class KernelFunction:
    """A kernel function or function template."""

    name: str
    declaration: Declaration
    parameters: tuple[Parameter, ...]

    @property
    def qualified_name(self) -> str:
        return "::".join((*self.declaration.namespace, self.name))


@dataclass(frozen=True, slots=True)
class Instantiation:
    """A kernel template made into a kernel: `expression` is f<...>."""

    host_name: str
    expression: str
    declaration: Declaration

    @property
    def function(self) -> str:
        """The template's name, possibly qualified."""
        return self.expression.partition("<")[0].replace(" ", "")


def find_functions(
    tokens: TokenList, attributes: Attributes, declarations: list[Declaration]
) -> list[KernelFunction]:
    """The kernels that have a body. Erases the keyword `kernel`."""
    found = []
    for declaration in (d for top in declarations for d in top.walk()):
        if declaration.kind is not Kind.FUNCTION or declaration.parameters is None:
            continue
        head = range(declaration.start, declaration.parameters)
        is_kernel = any(a.name == "kernel" for a in attributes.between(head.start, head.stop))
        for index in head:
            if tokens[index].text == "kernel":
                tokens.erase(index, index + 1)
                is_kernel = True
        if is_kernel:
            parameters = _parameters(tokens, attributes, declaration.parameters)
            found.append(KernelFunction(declaration.name, declaration, parameters))
    return found


def find_instantiations(
    tokens: TokenList, attributes: Attributes, declarations: list[Declaration]
) -> list[Instantiation]:
    """The explicit instantiations that are marked as kernels or have a host name."""
    found = []
    for declaration in (d for top in declarations for d in top.walk()):
        if declaration.kind is not Kind.INSTANTIATION:
            continue
        marks = attributes.between(declaration.start, declaration.stop)
        host_names = [a.arguments for a in marks if a.name == "host_name"]
        is_kernel = "kernel" in tokens.words(declaration.head, declaration.stop)
        if not host_names and not is_kernel and all(a.name != "kernel" for a in marks):
            continue
        expression = _instantiated(tokens, declaration)
        host_name = "".join(map(ast.literal_eval, host_names[0])) if host_names else expression
        found.append(Instantiation(host_name, expression, declaration))
    return found


def _instantiated(tokens: TokenList, declaration: Declaration) -> str:
    """`f<T, 8>` of `decltype(f<T, 8>) f<T, 8>` or of `void f<T, 8>(device T* x)`."""
    index = tokens.following(declaration.head)
    while tokens[index].text in ("kernel", "void", "decltype"):
        is_decltype = tokens[index].text == "decltype"
        index = tokens.following(index + 1)
        if is_decltype:
            index = tokens.following(tokens.skip(index))
    start = index
    while tokens[index].text != "<":
        index = tokens.following(index + 1)
    return " ".join(tokens.words(start, tokens.skip_template_arguments(index)))


def _parameters(tokens: TokenList, attributes: Attributes, open_at: int) -> tuple[Parameter, ...]:
    parameters: list[Parameter] = []
    for start, stop in split_list(tokens, open_at):
        marks = attributes.between(start, stop)
        name = _parameter_name(tokens, start, stop)
        conditions = [" ".join(a.arguments) for a in marks if a.name == "function_constant"]
        condition = conditions[0] if conditions else ""
        place = _place(marks)
        if place is None:
            if not set(tokens.words(start, stop)) & {"*", "&", "["}:
                tokens.fail(f"parameter {name} has no attribute that the emulator knows", start)
            used = {p.index for p in parameters if p.kind == "buffer"}
            place = ("buffer", next(str(i) for i in range(len(used) + 1) if str(i) not in used))
        words = tuple(tokens.words(start, stop))
        parameters.append(Parameter(*place, name, condition, words, tokens.following(start)))
    return tuple(parameters)


def _place(marks: list[Attribute]) -> tuple[str, str] | None:
    for mark in marks:
        if mark.name == "buffer":
            return "buffer", "".join(mark.arguments)
        if mark.name == "threadgroup":
            return "threadgroup_memory", "".join(mark.arguments)
        if mark.name in BUILTINS:
            return "builtin", BUILTINS[mark.name]
    return None


def _parameter_name(tokens: TokenList, start: int, stop: int) -> str:
    name = ""
    for index in tokens.present(start, stop):
        if tokens[index].text in ("[", "="):
            break
        if tokens[index].kind == "name":
            name = tokens[index].text
    return name


def split_list(tokens: TokenList, open_at: int) -> list[tuple[int, int]]:
    """The ranges between the commas of the list that opens at `open_at`."""
    ranges = []
    start = index = open_at + 1
    close = tokens.closing(open_at)
    while index <= close:
        text = tokens[index].text
        if index == close or text == ",":
            if tokens.present(start, index):
                ranges.append((start, index))
            start = index = index + 1
        elif text == "<":
            index = tokens.skip_template_arguments(index)
        else:
            index = tokens.skip(index)
    return ranges
