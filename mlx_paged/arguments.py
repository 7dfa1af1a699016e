"""Checks of arguments that callers give, and of installed versions. Knows no mlx."""

import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import cache, wraps
from numbers import Integral, Real
from os import PathLike
from typing import Any, TypeGuard, TypeVar, cast

MAX_INT32 = 2**31 - 1
GB = 10**9
MLX_LM_SERIES = "0.32"  # others lack what this package imports, or have changed it
TESTED_MLX_LM = ("0.32.2",)
ANY_MLX = "MLX_PAGED_ANY_MLX"  # 1: any mlx and mlx-lm, for builds against other releases of MLX
_EXTRA = "[cpu]" if sys.platform == "linux" else ""  # of mlx, as in pyproject.toml
_SEVERAL = " (several completions of a prompt: Engine.sample(prompts, n))"
ELSEWHERE = dict.fromkeys(("n", "best_of", "num_samples", "num_return_sequences"), _SEVERAL)
"""What does the work of keyword arguments that other libraries have in the place of a call."""
_Choice = TypeVar("_Choice", bound=StrEnum)
_T = TypeVar("_T")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class UntestedVersionError(RuntimeError):
    """This package does not run with the installed mlx, or was not tested with its mlx-lm."""


def require_versions() -> None:
    """Raise UntestedVersionError, with the pip command that mends it, if the compiled module is not
    for the installed mlx, or if mlx-lm is of another series. One line of the log names an mlx-lm
    that was not tested. The variable MLX_PAGED_ANY_MLX=1 lets all versions pass, with one line."""
    from importlib.metadata import requires, version  # slow to import

    mlx, mlx_lm = version("mlx"), version("mlx-lm")
    needs = "\n".join(requires("mlx_paged") or ())
    pins = re.findall(r"^mlx(?:\[\w+\])?==([\d.]+)", needs, re.M)
    is_known = mlx_lm in TESTED_MLX_LM
    problem = ""
    # A development build of mlx has a suffix after these three numbers.
    if pins and mlx.split(".")[:3] != pins[0].split("."):
        problem = f"mlx {mlx} is installed: expected {pins[0]}, for which mlx_paged is built"
    elif mlx_lm.split(".")[:2] != MLX_LM_SERIES.split("."):
        problem = f"mlx-lm {mlx_lm} is installed: expected {MLX_LM_SERIES}"
    if problem and os.environ.get(ANY_MLX) != "1":
        wanted = [f"'mlx{_EXTRA}=={pins[0]}'"] * bool(pins)
        wanted += [f"'mlx-lm=={TESTED_MLX_LM[-1]}'"] * (not is_known)
        raise UntestedVersionError(f"{problem}: pip install {' '.join(wanted)}")
    if problem or not is_known:
        tested = f"{' and '.join(TESTED_MLX_LM)} is tested"
        _warn_once(problem or f"mlx-lm {mlx_lm} is untested: {tested}")


@cache
def _warn_once(text: str) -> None:
    """Log one line in a process."""
    logging.getLogger("mlx_paged").warning(text)


def one_line(error: BaseException) -> str:
    """The message of an error for a command's user, without the name of the Python call."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return re.sub(r"^\[\w+\] ", "", " ".join(str(error).split()))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question that names the known word that is most like `word`; "" if none is like it. A word
    that begins or ends another one is like it. The dashes of flags do not count."""
    from difflib import get_close_matches

    names = {name.strip("-").replace("_", "-"): name for name in known}
    word = word.strip("-").replace("_", "-")
    likely = get_close_matches(word, names, n=1, cutoff=0.75)
    if not likely and len(word) > 2:
        likely = [name for name in names if name.startswith(word) or name.endswith(f"-{word}")]
    likely = likely or get_close_matches(word, names, n=1)
    return f" (did you mean {names[likely[0]]}?)" if likely else ""


def suggesting(constructor: _Function) -> _Function:
    """An ``__init__`` whose TypeError for an unknown keyword argument names the argument that is
    most like it."""
    from inspect import signature  # slow to import

    known = [*signature(constructor).parameters][1:]

    @wraps(constructor)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        if unknown := options.keys() - known:
            raise TypeError(unexpected(type(self).__name__, min(unknown), known))
        return constructor(self, *args, **options)

    return cast(_Function, checked)


def suggesting_fields(cls: type[_T]) -> type[_T]:
    """A dataclass with a :func:`suggesting` constructor."""
    cls.__init__ = suggesting(cls.__init__)  # type: ignore[method-assign]
    return cls


def unexpected(function: str, name: str, known: Iterable[str]) -> str:
    """What Python says of an unknown keyword argument, and the argument that is most like it."""
    hint = ELSEWHERE.get(name) or did_you_mean(name, known)
    return f"{function}() got an unexpected keyword argument {name!r}{hint}"


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
        raise ValueError(f"[{op}] {name} is {shown(value)}: expected {_integers(minimum, maximum)}")
    if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
        raise ValueError(f"[{op}] {name} is {number}: expected {_integers(minimum, maximum)}")
    return number


def memory(num_bytes: int) -> str:
    """A size for a message: its bytes and, if there are many, the same in GB."""
    in_gb = f" ({num_bytes / GB:.3f} GB)" if num_bytes >= 10**6 else ""
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
        raise ValueError(f"[{op}] {name} is {shown(value)}: expected {expected}")


def require_text(op: str, name: str, value: object) -> None:
    """Raise ValueError unless `value` is a string of characters that UTF-8 can encode."""
    is_text = isinstance(value, str)
    require(is_text, op, name, value, "a string")
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"[{op}] {name} has a lone surrogate at {error.start}: expected text that UTF-8 can "
            "encode"
        ) from None


def require_flags(op: str, **values: object) -> None:
    """Raise ValueError unless each value is True or False."""
    for name, value in values.items():
        require(isinstance(value, bool), op, name, value, "True or False")


def require_choices(op: str, **values: object) -> None:
    """Raise ValueError unless each value is True, False or None, which leaves it to the callee."""
    for name, value in values.items():
        require(isinstance(value, bool | None), op, name, value, "True, False or None")


def require_paths(op: str, **values: object) -> None:
    """Raise ValueError unless each value is None, a string or a path."""
    for name, value in values.items():
        require(isinstance(value, str | PathLike | None), op, name, value, "a path or None")


def choice(op: str, name: str, kind: type[_Choice], value: object) -> _Choice:
    """The member of `kind` that `value` is or names. Raise ValueError if there is none."""
    require(isinstance(value, str) and value in [*kind], op, name, value, one_of(kind))
    return kind(str(value))


def one_of(names: Iterable[str]) -> str:
    return f"one of {', '.join(names)}"


def shown(value: object) -> str:
    """A value in an error message: the beginning of its repr, in one line."""
    return f"{' '.join(repr(value).split()):.80}"


def is_count(value: object, minimum: int = 0) -> bool:
    """Whether `value` is an int, not a bool, and at least `minimum`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def is_whole(value: object, minimum: int = 0) -> bool:
    """As :func:`is_count`, but NumPy's integers count too."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum


def is_real(value: object) -> TypeGuard[float]:
    """Whether `value` is a number and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether `value` is a number that a float can be, and neither NaN nor infinity."""
    try:
        return is_real(value) and math.isfinite(value)
    except OverflowError:
        return False


def _integers(minimum: int | None, maximum: int | None) -> str:
    if minimum is None:
        return "an integer"
    if maximum is None:
        return f"an integer >= {minimum}"
    return f"an integer from {minimum} to {maximum}"
