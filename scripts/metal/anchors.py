"""MLX's own decode kernels on contiguous keys and values: which of them it launches, and counts."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from scripts.metal.launches import KV_HEADS, Launched, Row, Work, total
from tests.metal_emulator import GpuCode, LaunchStats, Library, Mode, gpu_code, mlx_include_dir
from tests.metal_emulator import mlx_sdpa_vector as kernels
from tests.metal_emulator.attention_cases import FLOAT16, Case, Problem, relative_rms, to_float64

SIZES = ("base, Pro", "Max", "Ultra")
"""Of chips, as far as MLX tells them apart."""
SHARED_HEADS = {64: 8, 128: 4}
"""Query heads that a simdgroup of the shared kernel computes, by D: MLX's instances for groups of
eight."""
_ONE_PASS = {0: "q", 1: "kv", 2: "kv", 3: "out", 11: "mask"}
_FIRST_PASS = {0: "q", 1: "kv", 2: "kv", 3: "partial", 4: "partial", 5: "partial", 13: "mask"}
_SECOND_PASS = {0: "partial", 1: "partial", 2: "partial", 3: "out"}


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel of MLX: in one pass if `blocks` is 0; else so many threadgroups split a KV head's
    keys, and a simdgroup shares them among `shared` query heads, if not 0."""

    blocks: int = 0
    shared: int = 0

    def __str__(self) -> str:
        if not self.blocks:
            return "MLX, one pass"
        return f"MLX, {'shared' if self.shared else 'two passes'}, {self.blocks}"


def mlx_choice(work: Work, size: str) -> Choice:
    """What MLX launches on chips of this size, for a batch padded to its longest context.

    Raises:
        ValueError: if the group is one for which MLX has rules that are not here.
    """
    if work.group not in (1, 2, 4, 8):
        raise ValueError(f"work has groups of {work.group}: expected 1, 2, 4 or 8")
    keys, is_large = max(work.contexts), size in ("Max", "Ultra")
    if not ((is_large and keys >= 1024) or (work.group > 1 and keys >= 4096)):
        return Choice()
    is_masked = len(work.contexts) > 1
    is_shared = work.group == 8 and keys >= 8192 and not is_masked
    return Choice(_blocks(work.group, keys, size), SHARED_HEADS.get(work.head_dim, 0) * is_shared)


def _blocks(group: int, keys: int, size: str) -> int:
    if size == "Max":
        if group <= 4 or keys <= 1024:
            return 64
        return next(
            (n for most, n in ((8192, 128), (32768, 256), (65536, 512)) if keys <= most), 1024
        )
    if size == "Ultra":
        if group <= 2 and keys > 8192:
            return 256
        if group >= 6 and keys >= 16384:
            return 512 if keys < 65536 else 1024
        return 128
    return 64 if group >= 4 else 32


class Padded(Problem):
    """A sequence in a batch: columns before its keys make it as long as the longest."""

    def __init__(self, case: Case, length: int) -> None:
        super().__init__(case)
        if case.mask:
            self.mask = (mx.arange(case.keys) >= case.keys - length)[None, None, None]


def contiguous(work: Work, choice: Choice, sizes: tuple[str, ...]) -> Row:
    """MLX's kernel on the work. Every sequence of a batch is as long as the longest: the others are
    padded, and the mask that hides this is read for every key."""
    keys, mask = max(work.contexts), "bool" if len(work.contexts) > 1 else ""
    case = Case(FLOAT16, 1, work.group, 1, 1, keys, work.head_dim, mask=mask)
    launched: list[Launched] = []
    for length, sequences in Counter(work.contexts).items():
        for stats, roles in _run(Padded(case, length), choice):
            present = {i: role for i, role in roles.items() if i in stats.lines}
            launched.append(Launched(stats, present, sequences))
    first = launched[0].stats
    return Row(
        work=work,
        kernel=str(choice),
        sizes=sizes,
        launches=2 if choice.blocks else 1,
        threadgroups=first.threadgroups * len(work.contexts) * KV_HEADS,
        threads=first.threads // first.threadgroups,
        threadgroup_bytes=first.threadgroup_bytes,
        code=_code(case, choice),
        counts=total(work, launched),
    )


def _run(problem: Padded, choice: Choice) -> list[tuple[LaunchStats, dict[int, str]]]:
    """The launches' statistics, and what their buffers hold."""
    case = problem.case
    library = _library(case.head_dim, case.heads, choice)
    if choice.blocks:
        out, passes = kernels.run_two_pass(
            problem, library, heads_per_simdgroup=choice.shared, num_blocks=choice.blocks
        )
        found = list(zip(passes, (_FIRST_PASS, _SECOND_PASS), strict=True))
    else:
        out, stats = kernels.run_one_pass(problem, library)
        found = [(stats, _ONE_PASS)]
    assert relative_rms(to_float64(out, FLOAT16), problem.in_float64()) < FLOAT16.tolerance
    return found


def _kernel(head_dim: int, group: int, choice: Choice) -> str:
    """The name of the kernel that reads the keys."""
    suffix = f"float16_t_{head_dim}"
    if choice.shared:
        return f"sdpa_vector_2pass_1_gqa_{suffix}_{group}_{choice.shared}"
    return f"sdpa_vector_{'2pass_1_' if choice.blocks else ''}{suffix}"


@cache
def _library(head_dim: int, group: int, choice: Choice) -> Library:
    names = {_kernel(head_dim, group, choice), f"sdpa_vector_2pass_2_float16_t_{head_dim}"}
    return Library.from_file(kernels.SOURCE, [mlx_include_dir()], Mode.RACE, names)


@cache
def _code(case: Case, choice: Choice) -> GpuCode:
    threads = 32 * case.heads if choice.blocks else 1024
    return gpu_code(
        kernels.SOURCE.read_text(),
        _kernel(case.head_dim, case.heads, choice),
        threads,
        kernels.function_constants(case, choice.blocks),
        [mlx_include_dir()],
    )


def anchors(work: Work, sizes_of_chips: Iterable[str] = SIZES) -> list[Row]:
    """Each kernel that MLX takes on chips of these sizes."""
    chosen: dict[Choice, list[str]] = {}
    for size in sizes_of_chips:
        chosen.setdefault(mlx_choice(work, size), []).append(size)
    return [contiguous(work, choice, tuple(sizes)) for choice, sizes in chosen.items()]
