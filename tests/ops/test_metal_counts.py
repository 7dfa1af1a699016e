"""docs/metal-counts.md says what the emulator counts, and paging adds reads of the tables only."""

from math import prod

import mlx.core as mx
import pytest

from mlx_paged import _ext
from scripts.metal import chunks
from scripts.metal.anchors import Choice, contiguous, mlx_choice
from scripts.metal.counts import DOCUMENT, line, rows, with_ours
from scripts.metal.launches import Work, decode_limits, paged, ragged
from tests.metal_emulator import gpu_code, require_emulator

CONTEXT = 512
SAMPLES = (
    Work(64, 1, ragged(CONTEXT, 1)),
    Work(128, 4, ragged(CONTEXT, 1)),
    Work(128, 8, ragged(CONTEXT, 8)),
    Work(256, 4, ragged(CONTEXT, 1)),
)
LIMITS = {
    "table_loads": 2,
    "simd_operations": 150,
    "exponentials": 10,
    "kv_bytes": 1.0,
    "registers": 48,
}
"""Of the decode kernel, for 32 keys and four rows at D 128."""
OVER_LIMITS = {"registers"}
"""Those that the kernel does not keep: clang counts addresses and loads under way as well."""


@pytest.fixture(autouse=True, scope="module")
def emulator() -> None:
    require_emulator()


@pytest.mark.slow
@pytest.mark.parametrize("work", SAMPLES, ids=str)
def test_the_document_has_the_counts(work: Work) -> None:
    document = DOCUMENT.read_text().splitlines()
    for row in rows(work):
        assert line(row) in document, "run python -m scripts.metal.counts"


def test_the_document_compares_the_rows_that_it_has() -> None:
    """And has nothing that the script would not write."""
    text = DOCUMENT.read_text()
    assert with_ours(text, []) == text


@pytest.mark.sampled(12)
@pytest.mark.parametrize("shared", [False, True], ids=["chunks", "shared keys"])
@pytest.mark.parametrize("dtype", chunks.DTYPES)
@pytest.mark.parametrize("head_dim", chunks.HEAD_DIMS)
def test_the_document_has_the_counts_of_chunks(head_dim: int, dtype: str, shared: bool) -> None:
    """And in no case a lane needs more registers than it has."""
    row = chunks.ours(head_dim, dtype, shared)
    assert str(row) in DOCUMENT.read_text().splitlines(), "run python -m scripts.metal.chunks"
    assert row.spills == 0


@pytest.mark.slow
@pytest.mark.parametrize("work", [Work(128, 4, (1024,)), Work(64, 4, (1024,))], ids=str)
def test_keys_and_values_come_once_for_a_group(work: Work) -> None:
    """As in a contiguous kernel that computes the heads of a group together."""
    ours, theirs = paged(work), contiguous(work, Choice(blocks=64), ())
    assert ours.counts.kv_moved == ours.counts.kv_least == work.live_bytes
    assert theirs.counts.kv_moved == work.live_bytes


@pytest.mark.slow
def test_the_limits_that_the_decode_kernel_is_over() -> None:
    found = decode_limits()
    assert {name for name, limit in LIMITS.items() if found[name] > limit} == OVER_LIMITS
    assert found["fewest_registers"] <= 70


def registers(dtype: mx.Dtype, head_dim: int) -> int:
    """Of the decode kernel for groups of four, if a lane has 128."""
    q = mx.zeros((1, 4, 1, head_dim), dtype)
    caches = (mx.zeros((1, 1, 16, head_dim), dtype) for _ in range(2))
    tables, lens = mx.zeros((1, 16), mx.int32), mx.ones((1,), mx.int32)
    (launch,) = _ext.metal.plan_attention(q, *caches, tables, lens, scale=1.0)["launches"]
    names = launch["source"], launch["kernel"], prod(launch["threadgroup"]), launch["constants"]
    code = gpu_code(*names, simdgroups=chunks.FULL_LANE)
    assert code.spilled == 0
    return code.registers


@pytest.mark.heavy
@pytest.mark.sampled(2)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bfloat16_takes_few_more_registers_than_float16(head_dim: int) -> None:
    """It has no conversion of its own: a compiler may keep all queries as floats."""
    assert registers(mx.bfloat16, head_dim) <= 1.15 * registers(mx.float16, head_dim)


@pytest.mark.parametrize(
    ("size", "group", "contexts", "choice"),
    [
        ("base, Pro", 4, (4095,), Choice()),
        ("base, Pro", 4, (4096,), Choice(64)),
        ("base, Pro", 1, (32768,), Choice()),
        ("base, Pro", 2, (4096,), Choice(32)),
        ("Max", 4, (1023,), Choice()),
        ("Max", 4, (1024,), Choice(64)),
        ("Max", 8, (4096,), Choice(128)),
        ("Max", 8, (8192,), Choice(128, 4)),
        ("Max", 8, (8192, 512), Choice(128)),
        ("Ultra", 4, (1023,), Choice()),
        ("Ultra", 4, (32768,), Choice(128)),
        ("Ultra", 8, (32768,), Choice(512, 4)),
        ("Ultra", 1, (8193,), Choice(256)),
    ],
)
def test_what_mlx_launches(
    size: str, group: int, contexts: tuple[int, ...], choice: Choice
) -> None:
    """By the comparisons in its host code."""
    assert mlx_choice(Work(128, group, contexts), size) == choice


def test_groups_without_a_rule_are_refused() -> None:
    with pytest.raises(ValueError, match=r"groups of 16: expected 1, 2, 4 or 8"):
        mlx_choice(Work(128, 16, (512,)), "Max")
