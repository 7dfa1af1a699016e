"""What Apple's compiler would refuse is refused, by line; what it takes is not."""

import re
from pathlib import Path

import pytest

from .language.tokens import TranslationError
from .library import Library
from .mlx_headers import KERNELS, mlx_include_dir
from .toolchain import CompileError
from .typecheck import parse_diagnostics, typecheck

HERE = Path(__file__).parent
MISTAKES = HERE / "type_mistakes.metal"
REQUESTED = "note: in instantiation of function template specialization 'f' requested here"


def test_every_mistake_and_nothing_else() -> None:
    found: dict[int, str] = {}
    for message in typecheck(MISTAKES):
        _, line, text = message.split(":", 2)
        found[int(line)] = found.get(int(line), "") + text
    lines = enumerate(MISTAKES.read_text().splitlines(), start=1)
    expected = {n: m[1] for n, line in lines if (m := re.search(r"// MISTAKE: (.*)", line))}
    assert found.keys() == expected.keys()
    assert {n: words for n, words in expected.items() if words not in found[n]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["language", "mlx_sdpa_vector", "seeded_bugs"])
def test_sources_that_are_right(name: str) -> None:
    assert typecheck(HERE / f"{name}.metal", [mlx_include_dir()]) == []


@pytest.mark.slow
def test_mistake_in_the_use_of_an_mlx_template() -> None:
    """Its line is in MLX's header, but the mistake is ours."""
    source = """
        #include "mlx/backend/metal/kernels/utils.h"
        kernel void wrong(device const float* p [[buffer(0)]]) { ceildiv(p, 3); }
    """
    errors = typecheck(source, [mlx_include_dir()])
    assert [error.split(":")[0] for error in errors] == ["utils.h"]


@pytest.mark.parametrize(
    ("note", "is_false_alarm"),
    [
        ("", True),
        (f"/{KERNELS}/complex.h:1:1: {REQUESTED}", True),
        (f"ours.h:1:1: {REQUESTED}", False),
    ],
    ids=["alone", "used by MLX", "used by us"],
)
def test_errors_inside_of_mlx_headers(note: str, is_false_alarm: bool) -> None:
    (diagnostic,) = parse_diagnostics(f"/{KERNELS}/utils.h:7:1: error: no such thing\n{note}\n")
    assert str(diagnostic) == "utils.h:7: no such thing"
    assert diagnostic.is_false_alarm() == is_false_alarm


def test_source_text() -> None:
    errors = typecheck("kernel void f(device float* p [[buffer(0)]]) {\n  p = 1.0f;\n}\n")
    assert [error.split(":")[:2] for error in errors] == [["source.metal", "2"]]


def test_compile_error_tells_the_line() -> None:
    with pytest.raises(CompileError, match=r"wrong\.metal:1:\d+: error: .*undeclared"):
        Library.from_source("kernel void f() { undeclared; }", "wrong.metal")


def test_overloads_that_address_spaces_tell_apart() -> None:
    source = "int f(device int* p) { return 1; }\nint f(threadgroup int* p) { return 2; }\n"
    with pytest.raises(TranslationError, match=r"wrong\.metal:2: f .* wrong\.metal:1 differ"):
        Library.from_source(source, "wrong.metal")


def test_builtin_that_the_emulator_does_not_know() -> None:
    source = "kernel void f(uint x [[amplification_id]]) {}"
    with pytest.raises(TranslationError, match=r"wrong\.metal:1: parameter x has no attribute"):
        Library.from_source(source, "wrong.metal")
