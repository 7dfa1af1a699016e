"""Every barrier of MLX's decode kernels is missed when it is deleted."""

import re

import pytest

from .attention_cases import FLOAT16, FLOAT32, Case, Problem
from .findings import EmulatorFinding, FindingKind
from .library import Library
from .mlx_headers import KERNELS, mlx_include_dir
from .mlx_sdpa_vector import SOURCE, run_one_pass, run_two_pass
from .modes import Mode

HEADER = mlx_include_dir() / KERNELS / "sdpa_vector.h"
BARRIER = re.compile(r"threadgroup_barrier\(.*?\);")
RACES = {FindingKind.RACE_IN_THREADGROUP, FindingKind.RACE_IN_SIMDGROUP}


def barriers() -> list[tuple[str, int]]:
    """The kernel template that each barrier of the header is in, and its line."""
    found = []
    kernel = ""
    for number, line in enumerate(HEADER.read_text().splitlines(), start=1):
        if match := re.search(r"\[\[kernel\]\] void (\w+)\(", line):
            kernel = match[1]
        if BARRIER.search(line):
            found.append((kernel, number))
    return found


def without_barrier(line_number: int) -> str:
    """The source of MLX's instances, with a copy of MLX's header that lacks one barrier."""
    lines = HEADER.read_text().splitlines()
    lines[line_number - 1] = BARRIER.sub("", lines[line_number - 1])
    header = "\n".join(['#line 1 "sdpa_vector.h"', *lines])
    return SOURCE.read_text().replace(f'#include "{KERNELS / HEADER.name}"', header)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "line_number"), barriers())
def test_deleted_barrier(kernel: str, line_number: int) -> None:
    only = ["sdpa_vector_float_128"]
    if kernel.startswith("sdpa_vector_2pass"):
        only = ["sdpa_vector_2pass_1_gqa_float16_t_128_8_4", "sdpa_vector_2pass_2_float16_t_128"]
    source = without_barrier(line_number)
    library = Library.from_source(source, "mutant.metal", Mode.RACE, only, [mlx_include_dir()])
    with pytest.raises(EmulatorFinding) as raised:
        if kernel.startswith("sdpa_vector_2pass"):
            run_two_pass(Problem(Case(FLOAT16, 1, 8, 1, 1, 60)), library, heads_per_simdgroup=4)
        else:
            run_one_pass(Problem(Case(FLOAT32, 1, 2, 1, 1, 60)), library)
    findings = raised.value.findings
    assert RACES & {finding.kind for finding in findings}
    lines = [int(finding.where.removeprefix("sdpa_vector.h:")) for finding in findings]
    assert all(abs(line - line_number) < 25 for line in lines)
