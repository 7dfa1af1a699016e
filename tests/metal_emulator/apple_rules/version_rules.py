"""What one version of Metal takes and another refuses, or takes with another meaning.

MLX asks for Metal 3.1 on macOS 14, 3.2 on 15, 4.0 on 26 and 4.1 on 27 (`get_metal_version` of its
mlx/backend/metal/device.cpp). Up to 4.0 each pointer and reference names its address space. Since
4.1 those without one are generic, and so is `this`: a member function that hands out a `thread`
pointer or reference to a part of its object has to be `thread` itself (MLX's pull request 3963).
"""

from collections.abc import Iterator

from ..language import metal_rules
from ..language.declarations import Declaration, Kind
from ..language.tokens import ADDRESS_SPACES
from .source import MetalSource

Found = Iterator[tuple[str, str]]

LANGUAGES = ("3.1", "3.2", "4.0", "4.1")
"""The versions that MLX asks for."""

GENERIC_SINCE = "4.1"


def bare_pointers(source: MetalSource) -> Found:
    """Before Metal 4.1 there is no generic address space."""
    for index in metal_rules.bare(source.tokens, source.declarations):
        message = f"a pointer or reference without an address space: Metal {GENERIC_SINCE} has them"
        yield source.place(index), message


def generic_this(source: MetalSource) -> Found:
    """Since Metal 4.1 `this` of a member function without an address space is generic, and nothing
    `thread` can be bound to what it points to."""
    for owner in source.walk():
        if owner.kind is not Kind.CLASS:
            continue
        for member in owner.members:
            if _has_bare_this(source, member, owner.name) and _takes_thread(source, member):
                message = f"`this` of {member.name or 'a member function'} is generic, not thread"
                yield source.place(member.head), message


def names_of_bfloat(source: MetalSource) -> Found:
    """`bfloat16` is reserved by Apple's header metal_extended_vector; `bfloat` is the type."""
    for index in source.tokens.present(0, len(source.tokens)):
        if source.tokens[index].text == "bfloat16":
            yield source.place(index), "bfloat16 is a reserved name of Metal: bfloat is the type"


def _has_bare_this(source: MetalSource, member: Declaration, owner: str) -> bool:
    if member.kind is not Kind.FUNCTION or member.parameters is None or member.body is None:
        return False
    before = source.tokens.words(member.head, member.parameters)
    behind = source.tokens.words(source.tokens.closing(member.parameters) + 1, member.body)
    is_without_object = bool({"static", "friend"} & set(before)) or before[-1:] == [owner]
    return not is_without_object and not ADDRESS_SPACES & set(behind)


def _takes_thread(source: MetalSource, member: Declaration) -> bool:
    """Whether the function returns a `thread` pointer or reference, or declares one in its body."""
    tokens = source.tokens
    assert member.parameters is not None and member.body is not None
    returned = tokens.words(member.head, member.parameters)
    return "thread" in returned or "thread" in tokens.words(member.body, member.stop)
