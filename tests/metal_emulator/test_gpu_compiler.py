"""What is read from a GPU's code, where the source says what it has to be."""

from pathlib import Path

import pytest

from . import mlx_sdpa_vector
from .attention_cases import FLOAT16, Case
from .gpu_compiler import gpu_code
from .mlx_headers import mlx_include_dir

SOURCE = Path(__file__).with_name("gpu_compiler.metal").read_text()
LANES = 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "chain"), [("gather_0", 1), ("gather_1", 2), ("gather_2", 3), ("ahead", 1)]
)
def test_loads_that_wait_for_loads(kernel: str, chain: int) -> None:
    assert gpu_code(SOURCE, kernel, LANES, {0: 1}).dependent_loads == chain


@pytest.mark.slow
def test_registers_hold_what_a_lane_keeps() -> None:
    few, many = (gpu_code(SOURCE, f"keep_{kept}", LANES, {0: 3}) for kept in (8, 40))
    assert few.registers >= 8
    assert 32 <= many.registers - few.registers <= 48
    assert (few.spilled, many.spilled) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "threads", "vectors"),
    [("sdpa_vector", 1024, 2), ("sdpa_vector_2pass_1", 128, 2 * 4)],
)
def test_bytes_in_flight(kernel: str, threads: int, vectors: int) -> None:
    """MLX's first of two passes asks for four keys and values before it uses one; one pass for a
    key and its value. A lane has four halfs of each."""
    constants = mlx_sdpa_vector.function_constants(Case(FLOAT16, 1, 4, 1, 1, 512))
    source = mlx_sdpa_vector.SOURCE.read_text()
    name = f"{kernel}_float16_t_128"
    code = gpu_code(source, name, threads, constants, [mlx_include_dir()])
    assert code.bytes_in_flight == vectors * 8 * LANES
    assert code.dependent_loads == 1


def test_a_function_constant_is_missing() -> None:
    with pytest.raises(ValueError, match=r"keep_8: function constant 0 \(MULTIPLES\)"):
        gpu_code(SOURCE, "keep_8", LANES, {})
