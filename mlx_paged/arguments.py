"""Numbers that callers give. Knows no mlx."""

from numbers import Integral, Real

MAX_INT32 = 2**31 - 1


def integer(
    op: str, name: str, value: object, least: int | None = None, most: int | None = None
) -> int:
    """`value` as an int: an int or an integer of numpy's, no bool.

    Raises:
        ValueError: it is no integer, or outside ``[least, most]``.
    """
    if type(value) is int:
        number = value
    elif isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
    else:
        raise ValueError(f"[{op}] {name} is {value!r}: expected {_integers(least, most)}")
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"[{op}] {name} is {number}: expected {_integers(least, most)}")
    return number


def optional_integer(op: str, name: str, value: object, least: int) -> int | None:
    """As :func:`integer`, or None."""
    return None if value is None else integer(op, name, value, least)


def require_positive(op: str, name: str, value: object) -> None:
    """ValueError unless `value` is None or a number above 0."""
    if value is None or (
        isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0
    ):
        return
    raise ValueError(f"[{op}] {name} is {value!r}: expected a number > 0 or None")


def _integers(least: int | None, most: int | None) -> str:
    if least is None:
        return "an integer"
    return f"an integer >= {least}" if most is None else f"an integer from {least} to {most}"
