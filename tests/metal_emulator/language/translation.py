"""Preprocessed Metal to C++ that the emulator compiles."""

import re
from dataclasses import dataclass
from functools import lru_cache

from . import constants, kernels, threadgroup_variables
from .attributes import Attributes
from .constants import FunctionConstant
from .declarations import Declaration, parse
from .kernels import Instantiation, KernelFunction, Parameter
from .overloads import drop_address_space_overloads, erase_member_qualifiers
from .tokens import TokenList

_DECIMAL_DOUBLE = re.compile(r"(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
_HEXADECIMAL_DOUBLE = re.compile(r"0[xX][\da-fA-F]*\.?[\da-fA-F]*[pP][+-]?\d+")


@dataclass(frozen=True, slots=True)
class KernelSignature:
    """A kernel as the host sees it."""

    host_name: str
    parameters: tuple[Parameter, ...]
    constants: tuple[FunctionConstant, ...]  # those that it may read


@dataclass(frozen=True, slots=True)
class Translation:
    """C++ source, and the kernels that it registers by host name."""

    code: str
    kernels: dict[str, KernelSignature]


@lru_cache(maxsize=16)
def host_names(source: str) -> tuple[str, ...]:
    """The host names of all kernels of a preprocessed source."""
    tokens = TokenList(source)
    attributes = Attributes(tokens)
    declarations = parse(tokens)
    instantiations = kernels.find_instantiations(tokens, attributes, declarations)
    functions = kernels.find_functions(tokens, attributes, declarations)
    plain = [f.name for f in functions if not f.declaration.is_template]
    return (*plain, *(i.host_name for i in instantiations))


@lru_cache(maxsize=16)
def translate(source: str, only: frozenset[str] | None = None) -> Translation:
    """C++ that behaves like the preprocessed Metal `source`.

    only: the kernels to register, by host name; the others are not compiled. All if None.
    """
    tokens = TokenList(source)
    _make_doubles_floats(tokens)
    attributes = Attributes(tokens)
    declarations = parse(tokens)
    drop_address_space_overloads(tokens, declarations)
    erase_member_qualifiers(tokens, declarations)
    registry = _Registry(tokens, attributes, declarations, only)
    _define_constants(tokens, registry.constants)
    functions = kernels.find_functions(tokens, attributes, declarations)
    instantiations = kernels.find_instantiations(tokens, attributes, declarations)
    threadgroup_variables.replace_all(tokens, declarations, address_space="")
    for function in functions:
        text = _parameter_table(function)
        if not function.declaration.is_template:
            text += " " + registry.register(function.name, function, function.name)
        tokens.append(function.declaration.stop - 1, text)
    for instantiation in instantiations:
        template = _template_of(tokens, instantiation, functions)
        text = registry.register(instantiation.host_name, template, instantiation.expression)
        declaration = instantiation.declaration
        tokens.replace(declaration.start, declaration.stop, text)
    return Translation(tokens.text(), registry.signatures)


class _Registry:
    """The kernels that a library offers, and the function constants that they may read."""

    def __init__(
        self,
        tokens: TokenList,
        attributes: Attributes,
        declarations: list[Declaration],
        only: frozenset[str] | None,
    ) -> None:
        self._only = only
        self._dependencies = constants.Dependencies(tokens, attributes, declarations)
        self.constants = constants.find(tokens, attributes, declarations)
        self.signatures: dict[str, KernelSignature] = {}

    def register(self, host_name: str, function: KernelFunction, expression: str) -> str:
        """The C++ that registers `expression` (f or f<...>), or nothing if it is not wanted."""
        if self._only is not None and host_name not in self._only:
            return ""
        mentioned = self._dependencies.of(function.name)
        used = tuple(constant for constant in self.constants if constant.name in mentioned)
        self.signatures[host_name] = KernelSignature(host_name, function.parameters, used)
        namespace, colons, name = expression.partition("<")[0].replace(" ", "").rpartition("::")
        table = f"{namespace}{colons}emulator_parameters_{name}"
        return f'EMULATOR_KERNEL({len(self.signatures)}, "{host_name}", (&{expression}), {table})'


def _define_constants(tokens: TokenList, declared: dict[FunctionConstant, Declaration]) -> None:
    for constant, declaration in declared.items():
        value = f"emulator::function_constant<{constant.type}>({constant.index})"
        text = f"static const {constant.type} {constant.name} = {value};"
        tokens.replace(declaration.start, declaration.stop, text)


def _make_doubles_floats(tokens: TokenList) -> None:
    """Metal has no double: an unsuffixed literal is a float."""
    for index in tokens.present(0, len(tokens)):
        token = tokens[index]
        if token.kind == "number" and (
            _DECIMAL_DOUBLE.fullmatch(token.text) or _HEXADECIMAL_DOUBLE.fullmatch(token.text)
        ):
            token.text += "f"


def _parameter_table(function: KernelFunction) -> str:
    rows = []
    for parameter in function.parameters:
        index = parameter.index
        if parameter.kind == "builtin":
            index = f"emulator::{index}"
        condition = parameter.condition
        present = f"[]() -> bool {{ return bool({condition}); }}" if condition else "nullptr"
        rows.append(f"{{emulator::ParameterKind::{parameter.kind}, {index}, {present}}}")
    rows.append("{}")  # an array cannot be empty
    name = f"emulator_parameters_{function.name}"
    return (
        f"template <int> struct {name}; "
        f"template <> struct {name}<{len(function.parameters)}> {{ "
        f"static const emulator::Parameter* rows() {{ "
        f"static const emulator::Parameter table[] = {{{', '.join(rows)}}}; return table; }} }};"
    )


def _template_of(
    tokens: TokenList, instantiation: Instantiation, functions: list[KernelFunction]
) -> KernelFunction:
    name = instantiation.function.rpartition("::")[2]
    for function in functions:
        if function.name == name:
            return function
    tokens.fail(f"no kernel template {name}", instantiation.declaration.head)
