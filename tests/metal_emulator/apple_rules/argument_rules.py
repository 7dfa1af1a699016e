"""How a kernel is declared: its function constants, its arguments, its attributes."""

import re
from collections.abc import Iterator

from ..language import kernels
from ..language.declarations import Declaration, Kind
from ..language.kernels import KernelFunction, Parameter
from .source import MetalSource

Found = Iterator[tuple[str, str]]

_MOST_BUFFERS = 31
_OF_THREE_DIMENSIONS = ("_position_", "_per_grid", "threads_per_threadgroup")
_UNSIGNED = re.compile(r"(ushort|uint)([23]?)")
_WORD = re.compile(r"[A-Za-z0-9_]+")


def constant_indices(source: MetalSource) -> Found:
    first: dict[int, str] = {}
    for constant, declaration in source.constants.items():
        other = first.setdefault(constant.index, constant.name)
        if other != constant.name:
            message = f"function constant {constant.name} has index {constant.index} of {other}"
            yield source.place(declaration.head), message


def constant_conditions(source: MetalSource) -> Found:
    types = {constant.name: constant.type for constant in source.constants}
    for variable in source.program_variables():
        words = source.tokens.words(variable.head, variable.stop)
        if "=" in words and set(words) & types.keys():
            type_name, name = words[words.index("=") - 2 : words.index("=")]
            types[name] = type_name
    for kernel, parameter in _parameters(source):
        if parameter.condition and types.get(parameter.condition) != "bool":
            known = types.get(parameter.condition, "no function constant")
            message = f"{parameter.condition} is {known}: expected a bool"
            yield source.place(parameter.start), f"{kernel.name}: {parameter.name}: {message}"


def buffer_indices(source: MetalSource) -> Found:
    for kernel in source.kernels:
        first: dict[str, str] = {}
        for parameter in kernel.parameters:
            if parameter.kind != "buffer":
                continue
            place = source.place(parameter.start)
            if not parameter.index.isdigit() or int(parameter.index) >= _MOST_BUFFERS:
                expected = f"expected a number below {_MOST_BUFFERS}"
                yield place, f"{parameter.name} is buffer {parameter.index}: {expected}"
            other = first.setdefault(parameter.index, parameter.name)
            if other != parameter.name:
                yield place, f"{parameter.name} and {other} are both buffer {parameter.index}"


def thread_positions(source: MetalSource) -> Found:
    """Positions are ushort or uint, and all vectors of a kernel have the same size."""
    for kernel in source.kernels:
        sizes: dict[str, str] = {}
        for parameter in (p for p in kernel.parameters if p.kind == "builtin"):
            place, type_name = source.place(parameter.start), _type(parameter)
            match = _UNSIGNED.fullmatch(type_name)
            is_position = any(part in parameter.index for part in _OF_THREE_DIMENSIONS)
            if not match or (match[2] and not is_position):
                yield place, f"{parameter.name} is {type_name}: expected ushort or uint"
            elif is_position:
                sizes[parameter.name] = match[2] or "1"
                first = next(iter(sizes))
                if sizes[first] != sizes[parameter.name]:
                    message = f"{parameter.name} and {first} have different numbers of components"
                    yield place, message


def max_threads(source: MetalSource) -> Found:
    """The limit is a constant expression before any function constant has a value."""
    known = {
        word
        for variable in source.program_variables()
        if "constexpr" in (words := source.tokens.words(variable.head, variable.stop))
        for word in words[: words.index("=")]
    }
    for kernel in source.kernels:
        declaration = kernel.declaration
        assert declaration.parameters is not None
        arguments = {*known, *source.tokens.words(declaration.start, declaration.head)}
        for mark in source.attributes.between(declaration.start, declaration.parameters):
            if mark.name != "max_total_threads_per_threadgroup":
                continue
            names = [word for word in mark.arguments if word[0].isalpha() or word[0] == "_"]
            unknown = [name for name in names if name not in arguments]
            if unknown or not mark.arguments:
                message = f"{unknown[0] if unknown else 'nothing'} is not constant"
                yield source.place(declaration.head), f"{mark.name} of {kernel.name}: {message}"


def pointers_to_pointers(source: MetalSource) -> Found:
    for kernel, parameter in _parameters(source):
        if sum(word in ("*", "&", "[") for word in parameter.words) > 1:
            message = f"{kernel.name}: {parameter.name} is a pointer to pointers"
            yield source.place(parameter.start), message


def pointer_members(source: MetalSource) -> Found:
    """The host passes structs as bytes: an address in them means nothing on the GPU."""
    classes = {each.name: each for each in source.walk() if each.kind is Kind.CLASS}
    for kernel, parameter in _parameters(source):
        if parameter.kind != "buffer" or "constant" not in parameter.words:
            continue
        for name in parameter.words:
            for member in _pointers_in(source, classes, name):
                message = f"{kernel.name}: {parameter.name} holds a pointer"
                yield source.place(member.head), message


def host_names(source: MetalSource) -> Found:
    for kernel in source.kernels:
        if not _WORD.fullmatch(kernel.name):
            yield source.place(kernel.declaration.head), f"the name {kernel.name} is not a word"
    found = kernels.find_instantiations(source.tokens, source.attributes, source.declarations)
    for instance in found:
        if not _WORD.fullmatch(instance.host_name):
            place = source.place(instance.declaration.head)
            yield place, f"the host name {instance.host_name} is not of letters, digits and _"


def _parameters(source: MetalSource) -> Iterator[tuple[KernelFunction, Parameter]]:
    return ((kernel, parameter) for kernel in source.kernels for parameter in kernel.parameters)


def _type(parameter: Parameter) -> str:
    words = [word for word in parameter.words if word not in ("const", parameter.name)]
    return " ".join(words)


def _pointers_in(
    source: MetalSource, classes: dict[str, Declaration], name: str
) -> Iterator[Declaration]:
    """The members of a class, and of its members' classes, that are pointers or references."""
    for member in classes[name].members if name in classes else ():
        if member.kind is not Kind.OTHER or member.parameters is not None:
            continue
        words = source.tokens.words(member.head, member.stop)
        if {"*", "&"} & set(words):
            yield member
        for word in words[:-1]:
            if word != name:
                yield from _pointers_in(source, classes, word)
