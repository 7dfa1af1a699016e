"""What a second compiler makes of the decode kernel, and the share of the bandwidth that follows.

Its figures are kept here: that compiler is no part of this repository.
"""

from collections.abc import Iterator

from scripts.metal.model import CHIPS, CLOCK, SCHEDULERS, Chip

TEXT = """
Mesa has a compiler for Apple's M1 and M2. The next table has what it (24.3, development) makes of
the decode kernel's LLVM code. `rows` are the query heads that a threadgroup takes. `spilled` are
the registers that a lane stores and loads again, in the code for 128 registers. `asked` are the
bytes of keys and of values that a simdgroup asks for before it waits. `cycles` are those of a
scheduler for a tile.

| type | D | rows | registers | spilled | asked | cycles |
|---|--:|--:|--:|--:|--:|--:|
| float16 | 64 | 1 | 73.5 | 0 | 2,048, 2,048 | 531 |
| float16 | 64 | 4 | 95 | 0 | 2,048, 2,048 | 1,250 |
| float16 | 128 | 1 | 74.5 | 0 | 2,048, 2,048 | 935 |
| float16 | 128 | 4 | 99 | 0 | 2,048, 2,048 | 2,227 |
| float16 | 256 | 1 | 94.5 | 0 | 4,096, 4,096 | 1,311 |
| float16 | 256 | 2 | 95 | 0 | 2,048, 2,048 | 2,358 |
| bfloat16 | 64 | 1 | 75.5 | 0 | 2,048, 2,048 | 611 |
| bfloat16 | 64 | 4 | 104.5 | 0 | 2,048, 2,048 | 1,442 |
| bfloat16 | 128 | 1 | 76.5 | 0 | 2,048, 2,048 | 1,095 |
| bfloat16 | 128 | 4 | 108.5 | 0 | 2,048, 2,048 | 2,611 |
| bfloat16 | 256 | 1 | 96.5 | 0 | 4,096, 4,096 | 1,631 |
| bfloat16 | 256 | 2 | 99 | 0 | 2,048, 2,048 | 2,870 |
| 8 bits | 64 | 1 | 83 | 0 | 2,048, 1,024 | 717 |
| 8 bits | 64 | 4 | 117 | 0 | 2,048, 1,024 | 1,433 |
| 8 bits | 128 | 1 | 86 | 0 | 2,048, 1,152 | 1,318 |
| 8 bits | 128 | 4 | 119 | 0 | 2,048, 1,152 | 2,539 |
| 8 bits | 256 | 1 | 86 | 0 | 2,048, 2,048 | 2,093 |
| 8 bits | 256 | 2 | 108 | 0 | 2,048, 2,048 | 2,978 |

8-bit keys and values have float16 queries in this table. With bfloat16 queries the kernel takes at
most 120.5 registers, and spills none.

Groups of eight, and groups of four at D 256, take the kernel of 8x8 matrices. There are no figures
of Mesa's compiler for it. Clang takes 84, 122 and 126 registers for it at D 64, 128 and 256. For
8-bit keys and values it takes 91, 122 and 128, and for 6 bits 90, 126 and 128. It spills none of
these if a lane has 128. For keys of 6 and values of 4 bits it spills none at D 64, 22 at D 128 and
30 at D 256. The decode kernel spills none in any of these formats, up to D 128 and groups of four.

Mesa's compiler is not Apple's. It waits at the end of every block. It computes no value a second
time to save a register. Each function of a simdgroup is one instruction for it. It does not
model the M3 and later chips, or memory.

These figures lead to an estimate of the share of the bandwidth that a decode could use at D 128,
with four rows and enough threadgroups. A core of an M1 has room for 512 threads with up to 104
registers each, for 448 with up to 116, and else for 384. So a core holds four threadgroups in
float16 and three in bfloat16. For each tile a simdgroup does three things. It waits for memory
several times: `waits`. It queues for the tile's bytes, which take bytes / (bandwidth / cores). It
queues for its cycles on one of {schedulers} schedulers. The shares are those of an exact mean value
analysis of this closed network. The first share is for waits of 400 ns: source 15 of the model
below saw "beyond 400" on an M2 Pro. The second is for 800 ns. All chips are taken to have an M1's
cores. 100% is what memory gives to any kernel, which is less than its nominal bandwidth.

| type | kernel | simdgroups | cycles | waits | {chips} |
|---|---|--:|--:|--:|{rule}
{shares}

If memory gives 85% of its nominal bandwidth, which is an assumption, a decode in bfloat16 uses
{after} of the nominal bandwidth of an M1 Max. The last two rows are two other ways to compute,
which make room for a fourth threadgroup in bfloat16: they take 99.5 and 101 registers. The kernel
has neither. The first asks for half as many bytes at a time. The second takes 14% more cycles and
gains at most five points.
"""

BYTES = 2 * 2 * 128 * 32
"""Of a tile's keys and values."""
WAITS = 400e-9, 800e-9
"""Seconds that a load takes if nobody queues."""
NOMINAL = 0.85
KERNELS = (
    ("float16", "paged", 16, 2227, 8),
    ("bfloat16", "paged", 12, 2611, 8),
    ("bfloat16", "two keys at a time", 16, 2759, 12),
    ("bfloat16", "32 lanes a key", 16, 2968, 8),
)
"""Type, name, simdgroups that a core has room for, cycles and waits of a tile."""
SHOWN = [chip for chip in CHIPS if chip.name in ("M1 Max", "M4", "M5")]
SHOWN.sort(key=lambda chip: chip.name)


def share(chip: Chip, simdgroups: int, cycles: int, waits: int, wait: float) -> float:
    """Of the bandwidth. The schedulers are a queue for their share of the cycles, and a delay for
    the rest."""
    memory = BYTES / (chip.bandwidth / chip.cores * 1e9) * CLOCK
    demands = memory, cycles / SCHEDULERS
    delay = waits * wait * CLOCK + cycles * (1 - 1 / SCHEDULERS)
    queues, rate = [0.0, 0.0], 0.0
    for n in range(1, simdgroups + 1):
        times = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        rate = n / (delay + sum(times))
        queues = [rate * time for time in times]
    return rate * memory


def shares(chip: Chip, kernel: tuple[str, str, int, int, int], scale: float = 1.0) -> str:
    return " to ".join(f"{scale * share(chip, *kernel[2:], wait):.0%}" for wait in WAITS)


def share_lines() -> Iterator[str]:
    """The rows of the second table."""
    for kernel in KERNELS:
        cells = [*kernel[:2], *(f"{n:,}" for n in kernel[2:]), *(shares(c, kernel) for c in SHOWN)]
        yield f"| {' | '.join(cells)} |"


def second_text() -> str:
    """The paragraphs and tables of the document."""
    return TEXT.strip().format(
        schedulers=SCHEDULERS,
        chips=" | ".join(chip.name for chip in SHOWN),
        rule="--:|" * len(SHOWN),
        shares="\n".join(share_lines()),
        after=shares(SHOWN[0], KERNELS[1], NOMINAL),
    )
