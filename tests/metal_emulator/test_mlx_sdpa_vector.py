"""MLX's own decode kernels give MLX's numbers, in every order and without a finding."""

import functools
from typing import Any

import pytest
from numpy.typing import NDArray

from .attention_cases import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    PRECISIONS,
    Case,
    Problem,
    raw,
    relative_rms,
    to_float64,
)
from .library import Library
from .mlx_headers import mlx_include_dir
from .mlx_sdpa_vector import SOURCE, run_one_pass, run_two_pass
from .modes import Mode

ONE_PASS = [
    *(Case(precision, 1, 8, 2, 1, 77) for precision in PRECISIONS),
    Case(FLOAT32, 2, 4, 4, 1, 200, head_dim=64),
    Case(FLOAT32, 1, 8, 2, 4, 77, causal=True),
    Case(FLOAT32, 1, 8, 2, 4, 77, mask="bool"),
    Case(FLOAT32, 1, 8, 2, 4, 77, mask="float"),
    Case(BFLOAT16, 1, 8, 2, 2, 40, mask="float"),
    Case(FLOAT32, 1, 8, 2, 1, 77, sinks=True),
    Case(FLOAT16, 1, 4, 1, 1, 1),
]
TWO_PASS = [
    *(Case(precision, 1, 8, 2, 1, 300) for precision in PRECISIONS),
    Case(BFLOAT16, 1, 8, 2, 2, 300, causal=True),
    Case(FLOAT32, 1, 8, 2, 2, 150, mask="bool"),
    Case(FLOAT32, 2, 8, 2, 1, 150, sinks=True),
    Case(FLOAT32, 1, 4, 2, 1, 100, head_dim=64),
]
GROUPED = {  # and how many query heads one simdgroup serves
    Case(FLOAT32, 1, 16, 2, 1, 300): 4,
    Case(FLOAT16, 2, 8, 1, 1, 190): 4,
    Case(BFLOAT16, 1, 8, 2, 1, 300): 2,
}

every_order = pytest.mark.parametrize(
    ("mode", "seed"),
    [(Mode.FAST, None), (Mode.FAST, 1), (Mode.FAST, 2), (Mode.RACE, None), (Mode.UBSAN, None)],
    ids=["in order", "seed 1", "seed 2", "race", "ubsan"],
)


@functools.cache
def library(mode: Mode) -> Library:
    return Library.from_file(SOURCE, [mlx_include_dir()], mode)


def assert_right(problem: Problem, out: NDArray[Any]) -> None:
    precision = problem.case.precision
    actual = to_float64(out, precision)
    assert relative_rms(actual, problem.in_float64()) < precision.tolerance
    assert relative_rms(actual, problem.by_mlx()) < 2 * precision.tolerance  # MLX rounds too


@pytest.mark.heavy
@pytest.mark.sampled(27)
@every_order
@pytest.mark.parametrize("case", ONE_PASS, ids=str)
def test_one_pass(case: Case, mode: Mode, seed: int | None) -> None:
    problem = Problem(case)
    out, _ = run_one_pass(problem, library(mode), seed)
    assert_right(problem, out)


@pytest.mark.heavy
@pytest.mark.sampled(16)
@every_order
@pytest.mark.parametrize("case", TWO_PASS, ids=str)
def test_two_pass(case: Case, mode: Mode, seed: int | None) -> None:
    problem = Problem(case)
    out, _ = run_two_pass(problem, library(mode), seed)
    assert_right(problem, out)


@pytest.mark.sampled(4)
@every_order
@pytest.mark.parametrize("case", GROUPED, ids=str)
def test_grouped_heads(case: Case, mode: Mode, seed: int | None) -> None:
    problem = Problem(case)
    out, _ = run_two_pass(problem, library(mode), seed, GROUPED[case])
    assert_right(problem, out)


@pytest.mark.slow
def test_bytes_of_keys() -> None:
    """Each kernel loads the keys as often as its algorithm says."""
    case = Case(FLOAT16, 2, 8, 1, 1, 190)
    problem = Problem(case)
    once = raw(problem.k).nbytes
    _, one_pass = run_one_pass(problem, library(Mode.RACE))
    _, (two_pass, _) = run_two_pass(problem, library(Mode.RACE))
    _, (grouped, _) = run_two_pass(problem, library(Mode.RACE), heads_per_simdgroup=4)
    # One threadgroup per query head: every head of the group of 8 loads its keys again.
    assert one_pass.loaded_bytes[1] == 8 * once
    assert one_pass.unique_loaded_bytes[1].per_threadgroup == 8 * once
    assert one_pass.unique_loaded_bytes[1].per_launch == once
    # One threadgroup per group, one simdgroup per head: loaded 8 times, by one threadgroup.
    assert two_pass.loaded_bytes[1] == 8 * once
    assert two_pass.unique_loaded_bytes[1].per_simdgroup == 8 * once
    assert two_pass.unique_loaded_bytes[1].per_threadgroup == once
    # Four heads per simdgroup: loaded 8 / 4 times.
    assert grouped.loaded_bytes[1] == 2 * once
    assert grouped.unique_loaded_bytes[1].per_threadgroup == once


def test_threadgroup_bytes() -> None:
    _, stats = run_one_pass(Problem(ONE_PASS[0]), library(Mode.FAST))
    assert stats.threadgroup_bytes == 4 * (32 * 32 + 32 + 32)
    assert stats.threads == 8 * 1024
