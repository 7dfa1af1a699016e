"""docs/metal-precedents.md has every construct of the Metal kernels, and what it says is so."""

import re
from pathlib import Path

import pytest

from scripts.metal.sources import launches
from tests.metal_emulator import mlx_include_dir, require_emulator
from tests.metal_emulator.constructs import constructs
from tests.metal_emulator.mlx_headers import KERNELS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "metal-precedents.md").read_text()
SOURCES = {launch["kernel"]: launch["source"] for launch in launches()}
ROW = re.compile(
    r"^\| (?P<what>.+?) \| (?P<where>[\w.-]+)(?: `(?P<file>[^`]+)`)?.*?(?: \| `(?P<text>.+)`)? \|$"
)

FORMS = {
    "load of a vector through a cast pointer": r"reinterpret_cast<const device vec<",
    "store of a vector through a cast pointer": r"reinterpret_cast<device vec<[^;]*\) = ",
    "conversion of a vector": r"float4\(Held<T>::elements\(values",
    "struct specialised for a type": r"^struct Held<ushort> \{",
    "type that a struct names": r"typename Held<T>::type keys\[",
    "static function of a struct": r"^  static \S+ elements\(",
    "element of a vector at a variable index": r"\b(result|elements)\[i\] =",
    "private array of vectors": r"float4 weighted\[VECTORS\];",
    "private array of structs": r"QueryRow rows\[ROWS\];",
    "private array as an argument, its size deduced": r"thread float \(&\w+\)\[",
    "vector as the only argument of a type": r"const threadgroup vec<Q, VECTOR>\* queries,",
    "reference to a private variable as an argument": r"thread half& own_k,",
    "element type deduced from a vector": r"inline void note_spoiled\(thread vec<T, VECTOR>",
    "struct as a function's result": r"inline KeyRange key_range\(",
    "parameter struct by reference": r"constant \w+Params& p",
    "array of threadgroup memory in a kernel": r"threadgroup float \w+\[",
    "pointer into threadgroup memory": r"threadgroup float4\* \w+ = ",
    "constant outside of functions": r"^constant constexpr \w+ \w+ = ",
    "constexpr function in a constant": r"constexpr int K_LANES = key_lanes\(",
    "bool function constant": r"^constant bool \w+ \[\[function_constant\(",
    "integer function constant": r"^constant int \w+ \[\[function_constant\(",
    "constant made of function constants": r"^constant bool WHOLE = !SPLIT;",
    "optional argument": r"\[\[buffer\(\d+\), function_constant\(HAS_\w+\)\]\]",
    "optional argument by a constant that is made of others": r"function_constant\(WHOLE\)",
    "thread limit by a constant outside of functions": r"max_total_\w+\(THREADS\)",
    "thread limit by arguments of a template": r"max_total_\w+\(SIMDGROUPS \* LANES\)",
    "instance of a kernel template": r"\]\] \[\[kernel\]\] decltype\(",
    "loop over a halved ushort": r"for \(ushort step = TEAM / 2; step > 0; step /= 2\)",
    "private array of matrices": r"simdgroup_matrix<float, 8, 8> outputs\[",
    "element of a matrix, of those that a lane holds": r"outputs\[i\]\.thread_elements\(\)\[0\] ",
    "position of these elements in the matrix": r"matrix_row = \(lane / 4 & 4\) \+ lane / 2 % 4",
    "load of a transposed matrix": r"simdgroup_load\(keys.* ulong2\(0, 0\), true\)",
    "load of a matrix from threadgroup memory": r"simdgroup_load\(queries\[i\], query_part",
    "store of a matrix to threadgroup memory": r"simdgroup_store\(products",
    "product of matrices of different types": r"accumulate\(outputs\[i\], weights\[r\], value,",
    "zero through a pointer into threadgroup memory": r"\bvalues\[place\] = T\(0\);",
    "barrier in a branch that all threads take": r"if \(is_spoiled\) \{",
    "bits of several results in one word": r"found \|= mark_of\(",
    "threadgroup memory as another type": r"reinterpret_cast<const threadgroup T\*>\(",
    "binary search": r"while \(low < high\)",
    "shuffle over a cast distance": r"simd_shuffle_xor\([\w\[\]]+, ushort\(\w+\)\)",
    "threadgroup array of vectors": r"threadgroup float4 shared\[",
    "threadgroup pointer to vectors as an argument": r"const threadgroup float4\* weights,",
    "pragma by a macro": r'_Pragma\("clang loop unroll\(full\)"\)',
    "loop that is not unrolled": r'_Pragma\("clang loop unroll\(disable\)"\)',
    "barriers of a simdgroup around loads of matrices": r"simdgroup_barrier\(mem_flags::mem_none\)",
    "barrier of a simdgroup over threadgroup memory": r"simdgroup_barrier\(mem_flags::mem_th",
}
"""What the rows of the second table stand for in metal/."""

REFUSED = {
    "function that returns a reference": r"^inline (device|constant|thread\w*) [^=;{]*& \w+\(",
    "choice between vectors": r"\? [^:;]+ : (float4|vec<[^;]*>)\(",
    "reference to threadgroup memory": r"\bthreadgroup \w+& ",
    "pointer to a member of a parameter struct": r"\bp\.\w*strides[,)]",
}
"""Forms for which no precedent was found."""


def rows(title: str) -> list[re.Match[str]]:
    """The rows of the table under a title."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", DOCUMENT, re.DOTALL | re.MULTILINE)
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    found = [ROW.match(line) for line in lines]
    assert None not in found
    return [row for row in found if row is not None]


def named() -> dict[str, re.Match[str]]:
    return {name: row for row in rows("Names") for name in re.findall(r"`(\w+)`", row["what"])}


def header(row: re.Match[str]) -> str:
    return (mlx_include_dir() / KERNELS / row["file"]).read_text()


@pytest.fixture(scope="module")
def used() -> set[str]:
    require_emulator()
    one_each = {source.rpartition("\ntemplate")[0]: source for source in SOURCES.values()}
    found = {name for source in one_each.values() for name in constructs(source)}
    return found | {"half", "bfloat"}


def test_every_name_has_a_precedent(used):
    assert used == named().keys()


@pytest.mark.slow
def test_a_new_name_is_found():
    require_emulator()
    source = SOURCES["copy_blocks_half"].replace("bool is_valid", "static bool x = simd_any(true)")
    assert {"static", "simd_any"} <= constructs(source)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", named())
def test_the_precedent_has_the_name(name):
    row = named()[name]
    if row["where"] == "mlx":
        assert re.search(rf"\b{name}\b", header(row))


@pytest.mark.parametrize("row", rows("Forms"), ids=lambda row: row["what"])
def test_every_form_is_there_and_in_its_precedent(row):
    pattern = re.compile(FORMS[row["what"]], re.MULTILINE)
    assert any(pattern.search(source) for source in SOURCES.values())
    if row["where"] == "mlx":
        assert row["text"] in header(row)


def test_every_form_has_a_row():
    assert {row["what"] for row in rows("Forms")} == FORMS.keys()


@pytest.mark.parametrize("form", REFUSED)
def test_forms_without_a_precedent_are_not_used(form):
    pattern = re.compile(REFUSED[form], re.MULTILINE)
    assert not any(pattern.search(source) for source in SOURCES.values())
