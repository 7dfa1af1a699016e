"""Checks of arguments that callers give. Knows no mlx."""

from numbers import Integral, Real
from typing import TypeGuard

MAX_INT32 = 2**31 - 1


def missing(packages: str, extra: str) -> str:
    """What to do if the packages of an optional extra are not installed."""
    return f"{packages} is missing: expected pip install '.[{extra}]' in a clone of mlx_paged"


def integer(
    op: str, name: str, value: object, minimum: int | None = None, maximum: int | None = None
) -> int:
    """`value` as an int. Raise ValueError if it is not an int or a numpy integer, if it is a bool,
    or if it lies outside ``[minimum, maximum]``."""
    if type(value) is int:
        number = value
    elif isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
    else:
        raise ValueError(f"[{op}] {name} is {value!r}: expected {_integers(minimum, maximum)}")
    if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
        raise ValueError(f"[{op}] {name} is {number}: expected {_integers(minimum, maximum)}")
    return number


def memory(num_bytes: int) -> str:
    """A size for a message: its bytes and, if there are many, the same in GB."""
    in_gb = f" ({num_bytes / 10**9:.3f} GB)" if num_bytes >= 10**6 else ""
    return f"{num_bytes} bytes{in_gb}"


def optional_integer(op: str, name: str, value: object, minimum: int) -> int | None:
    """As :func:`integer`; None stays None."""
    return None if value is None else integer(op, name, value, minimum)


def require_positive(op: str, name: str, value: object) -> None:
    """Raise ValueError unless `value` is None or a number above 0."""
    is_positive = is_real(value) and float(value) > 0
    require(value is None or is_positive, op, name, value, "a number > 0 or None")


def require(condition: bool, op: str, name: str, value: object, expected: str) -> None:
    """Raise ValueError unless `condition` holds."""
    if not condition:
        raise ValueError(f"[{op}] {name} is {value!r:.80}: expected {expected}")


def is_count(value: object, minimum: int = 0) -> bool:
    """Whether `value` is an int, not a bool, and at least `minimum`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_whole(value: object, minimum: int = 0) -> bool:
    """As :func:`is_count`, but NumPy's integers count too."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum


def is_real(value: object) -> TypeGuard[float]:
    """Whether `value` is a number and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _integers(minimum: int | None, maximum: int | None) -> str:
    if minimum is None:
        return "an integer"
    if maximum is None:
        return f"an integer >= {minimum}"
    return f"an integer from {minimum} to {maximum}"
