"""The swizzles of Metal's vectors (v.xy, v.bgr, ...), as C++ that device/vector.h includes."""

from itertools import product

_ALPHABETS = ("xyzw", "rgba")
_HALVES = {2: {}, 3: {}, 4: {"lo": (0, 1), "hi": (2, 3), "even": (0, 2), "odd": (1, 3)}}


def members(size: int) -> str:
    """The properties of a vector of `size` elements d[0], d[1], ..."""
    swizzles: dict[str, tuple[int, ...]] = {}
    for alphabet in _ALPHABETS:
        for length in (2, 3, 4):
            for elements in product(range(size), repeat=length):
                swizzles["".join(alphabet[i] for i in elements)] = elements
    swizzles |= _HALVES[size]
    return "\n".join(_member(name, elements) for name, elements in swizzles.items()) + "\n"


def _member(name: str, elements: tuple[int, ...]) -> str:
    vector = f"vec<T, {len(elements)}>"
    values = ", ".join(f"d[{i}]" for i in elements)
    function = "EMULATOR_INLINE constexpr"
    getter = f"{function} {vector} get_{name}() const {{ return {vector}({values}); }}"
    if len(set(elements)) < len(elements):  # v.xx cannot be assigned to
        return f"{getter} __declspec(property(get = get_{name})) {vector} {name};"
    stores = " ".join(f"d[{i}] = v.d[{n}];" for n, i in enumerate(elements))
    setter = f"{function} void put_{name}({vector} v) {{ {stores} }}"
    declare = f"__declspec(property(get = get_{name}, put = put_{name})) {vector} {name};"
    return f"{getter} {setter} {declare}"
