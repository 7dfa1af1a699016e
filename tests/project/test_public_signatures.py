"""The signatures of what users import stay: names, order, kinds and defaults of parameters."""

import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import mlx_paged

RECORDED = Path(__file__).with_name("public_signatures.txt")


def signatures() -> Iterator[str]:
    """A line for each exported function, and for each public method, property and constructor of
    an exported class that this package defines."""
    for name in sorted(mlx_paged.__all__):
        exported = getattr(mlx_paged, name)
        yield _line(name, exported)
        if isinstance(exported, type):
            for member in sorted(dir(exported)):
                value = inspect.getattr_static(exported, member)
                if member.startswith("_") or not _is_ours(exported, member):
                    continue
                if isinstance(value, property):
                    yield f"{name}.{member}"
                elif callable(getattr(exported, member)):
                    yield _line(f"{name}.{member}", getattr(exported, member))


def _is_ours(exported: type, member: str) -> bool:
    owner = next(each for each in exported.__mro__ if member in vars(each))
    return owner.__module__.startswith("mlx_paged")


def _line(name: str, function: object) -> str:
    """A signature without its types, which may be told in other words."""
    if isinstance(function, type) and issubclass(function, Exception | Enum):
        return name  # of Python
    signature = inspect.signature(function)
    parameters = [
        each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()
    ]
    plain = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    return f"{name}{plain}"


def test_public_signatures_are_those_that_were_recorded():
    """Whoever changes one for a reason changes its line, and says so in CHANGELOG.md."""
    assert [*signatures()] == RECORDED.read_text().splitlines()
