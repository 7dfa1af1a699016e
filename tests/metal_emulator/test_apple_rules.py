"""Each rule finds what breaks it, and right sources break none."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from .apple_mistakes import ABSENT, OPTIONAL, PRESENT, PROLOGUE, SOURCES
from .apple_rules import LANGUAGES, LAUNCH_RULES, SOURCE_RULES, check_call, check_source
from .apple_rules.source import MetalSource
from .mlx_headers import mlx_include_dir
from .preprocess import preprocess

HERE = Path(__file__).parent

MISTAKES = [
    pytest.param(rule, text, words, id=f"{rule}-{number}")
    for rule, cases in SOURCES.items()
    for number, (text, words) in enumerate(cases)
]


def find(rule: str, text: str) -> list[tuple[str, str]]:
    return list(SOURCE_RULES[rule](MetalSource(PROLOGUE + text, "bad.metal")))


def test_every_rule_has_a_mistake() -> None:
    assert {*SOURCES, "absent-argument"} == SOURCE_RULES.keys()


@pytest.mark.sampled(44)
@pytest.mark.parametrize(("rule", "text", "words"), MISTAKES)
def test_a_mistake_is_found(rule: str, text: str, words: str) -> None:
    found = find(rule, text)
    assert words in found[0][1]
    for place, _ in found:
        file, line = place.split(":")
        assert file == "bad.metal" and int(line) > PROLOGUE.count("\n")


RIGHT_IN_ALL = (
    "struct Row {\n  float v[4];\n  thread float& at(short i) thread {\n    return v[i];\n  }\n"
    "  float first() const {\n    return v[0];\n  }\n"
    "  static thread float* of(thread Row& row) {\n    return row.v;\n  }\n};\n"
    "inline bfloat sum(device const bfloat* p) {\n  return p[0] + p[1];\n}\n"
)


@pytest.mark.parametrize(
    ("rule", "languages"),
    [("bare-pointer", ["3.1", "3.2", "4.0"]), ("generic-this", ["4.1"]), ("bfloat-name", None)],
)
def test_a_rule_of_some_versions(rule: str, languages: list[str] | None) -> None:
    text = PROLOGUE + SOURCES[rule][0][0]
    found = [
        language
        for language in LANGUAGES
        if rule in {each.rule for each in check_source(text, "bad.metal", [language])}
    ]
    assert found == (languages or list(LANGUAGES))
    assert find(rule, RIGHT_IN_ALL) == []


@pytest.mark.slow
def test_a_source_without_the_standard_library() -> None:
    found = check_source("kernel void f() {}\n", "bad.metal")
    assert [str(each) for each in found] == [
        "bad.metal:1: [includes] <metal_stdlib> is not included"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("body", ABSENT)
def test_an_absent_argument_that_is_read(body: str) -> None:
    assert len(find("absent-argument", f"{OPTIONAL}  {body}\n}}\n")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("body", PRESENT)
def test_an_argument_behind_its_constant(body: str) -> None:
    assert find("absent-argument", f"{OPTIONAL}  {body}\n}}\n") == []


@pytest.mark.slow
def test_mistakes_of_all_rules_are_reported_together() -> None:
    text = SOURCES["goto"][0][0] + SOURCES["constant-index"][0][0]
    found = check_source(PROLOGUE + text, "bad.metal")
    assert [each.rule for each in found] == ["goto", "constant-index"]


SOURCE = (
    "#include <metal_stdlib>\nusing namespace metal;\nstruct Params {\n  int size;\n  long n;\n};\n"
    "constant int SIZE [[function_constant(0)]];\nconstant bool WHOLE [[function_constant(1)]];\n"
    "kernel void f(device float* out [[buffer(0)]], constant Params& p [[buffer(1)]]) {\n"
    "  out[0] = WHOLE ? SIZE : p.size;\n}\n"
)


def call(array: mx.array | None = None, **changes: Any) -> dict[str, Any]:
    """A right launch with some changes."""
    launch = {
        "kernel": "f",
        "library": "library_f",
        "pipeline": "f_0_3_1_1",
        "source": SOURCE,
        "constants": {0: 3, 1: True},
        "params": (1, bytes(16)),
        "buffers": [(0, "input", 0)],
    }
    inputs = [mx.zeros(4) if array is None else array]
    return {
        "inputs": inputs,
        "outputs": [0, ((0, 3), mx.float32)],
        "scratch_bytes": [0],
        "launches": [launch | changes],
    }


def test_a_right_launch() -> None:
    assert check_call(call()) == []


@pytest.mark.parametrize(
    ("rule", "changes", "words"),
    [
        ("launch-name", {"pipeline": "f:3"}, "pipeline f:3"),
        ("launch-name", {"library": "f 3"}, "library f 3"),
        ("launch-constants", {"constants": {0: 3}}, "WHOLE (1) is not set"),
        ("launch-constants", {"constants": {0: 3, 1: True, 2: 1}}, "2 is set"),
        ("launch-constants", {"constants": {0: True, 1: True}}, "expected int"),
        ("parameter-struct", {"params": (1, bytes(12))}, "Params is not 12 bytes"),
        ("parameter-struct", {"params": (2, bytes(4100))}, "4100 bytes"),
        ("zero-bytes", {"array": mx.zeros((0, 4))}, "buffer 0"),
        ("zero-bytes", {"buffers": [(0, "output", 1)]}, "buffer 0"),
        ("zero-bytes", {"buffers": [(0, "scratch", 0)]}, "buffer 0"),
        ("zero-bytes", {"params": (2, b"")}, "buffer 2"),
    ],
)
def test_a_wrong_launch(rule: str, changes: dict[str, Any], words: str) -> None:
    assert rule in LAUNCH_RULES
    (found,) = check_call(call(**changes))
    assert found.rule == rule and words in found.message


@pytest.mark.slow
@pytest.mark.parametrize("name", ["language", "mlx_sdpa_vector"])
def test_kernels_that_macs_run(name: str) -> None:
    """MLX's have static_assert without a message, as clang allows, and read an argument of
    `has_mask` where `bool_mask` is true, as its host sets them together."""
    path = HERE / f"{name}.metal"
    text = preprocess(path.read_text(), path.name, [mlx_include_dir()])
    source = MetalSource(text, path.name)
    rules = SOURCE_RULES.keys() - {"includes"}
    broken = {rule for rule in rules if any(SOURCE_RULES[rule](source))}
    assert broken <= {"cxx17", "absent-argument"}
