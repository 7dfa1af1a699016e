"""What a second compiler makes of the decode kernel, and the share of the bandwidth that follows.

Its figures are kept here: that compiler is no part of this repository.
"""

from collections.abc import Iterator

from scripts.metal.model import CHIPS, CLOCK, SCHEDULERS, Chip

TEXT = """
Mesa's compiler for Apple's M1 and M2 (24.3, development) makes this of the decode kernel's LLVM
code. In cells with an arrow, the first figure is that of the kernel before: it had eight
simdgroups a threadgroup, and multiplied all keys at once that a lane had asked for. `rows` are the
query heads that a threadgroup takes. `spilled` are the registers that a lane stores, and loads
again, in the code for 128 registers. `asked` are the bytes that a simdgroup asks for before it
waits, of keys and of values. Cycles are of a scheduler, for a tile.

| type | D | rows | registers | spilled | asked | cycles |
|---|--:|--:|--:|--:|--:|--:|
| float16 | 64 | 1 | 69.5 → 73.5 | 0 | 1,024, 2,048 → 2,048, 2,048 | 546 → 531 |
| float16 | 64 | 4 | 109.5 → 95 | 0 | 2,048, 1,024 → 2,048, 2,048 | 1,304 → 1,250 |
| float16 | 128 | 1 | 69.5 → 74.5 | 0 | 1,024, 2,048 → 2,048, 2,048 | 964 → 935 |
| float16 | 128 | 4 | 112.5 → 99 | 0 | 2,048, 1,024 → 2,048, 2,048 | 2,313 → 2,227 |
| float16 | 256 | 1 | 92 → 94.5 | 0 | 2,048, 4,096 → 4,096, 4,096 | 1,302 → 1,311 |
| float16 | 256 | 2 | 95 | 0 | 2,048, 2,048 | 2,344 → 2,358 |
| bfloat16 | 64 | 1 | 70.5 → 75.5 | 0 | 1,024, 2,048 → 2,048, 2,048 | 620 → 611 |
| bfloat16 | 64 | 4 | 137.5 → 104.5 | 8 + 8 → 0 | 2,048, 1,024 → 2,048, 2,048 | 1,397 → 1,442 |
| bfloat16 | 128 | 1 | 72 → 76.5 | 0 | 1,024, 2,048 → 2,048, 2,048 | 1,109 → 1,095 |
| bfloat16 | 128 | 4 | 144.5 → 108.5 | 14 + 28 → 0 | 2,048, 1,024 → 2,048, 2,048 | 2,384 → 2,611 |
| bfloat16 | 256 | 1 | 92 → 96.5 | 0 | 2,048, 4,096 → 4,096, 4,096 | 1,594 → 1,631 |
| bfloat16 | 256 | 2 | 107 → 99 | 0 | 1,024, 2,048 → 2,048, 2,048 | 2,616 → 2,870 |
| 8 bits | 64 | 1 | 81 → 83 | 0 | 1,536, 1,024 → 2,048, 1,024 | 717 |
| 8 bits | 64 | 4 | 132.5 → 117 | 3 + 3 → 0 | 1,024, 1,024 → 2,048, 1,024 | 1,476 → 1,433 |
| 8 bits | 128 | 1 | 83 → 86 | 0 | 1,536, 1,024 → 2,048, 1,152 | 1,335 → 1,318 |
| 8 bits | 128 | 4 | 135.5 → 119 | 6 + 12 → 0 | 1,024, 1,024 → 2,048, 1,152 | 2,614 → 2,539 |
| 8 bits | 256 | 1 | 83 → 86 | 0 | 1,024, 2,048 → 2,048, 2,048 | 2,071 → 2,093 |
| 8 bits | 256 | 2 | 131 → 108 | 3 + 6 → 0 | 1,024, 2,048 → 2,048, 2,048 | 2,996 → 2,978 |

8-bit keys and values have float16 queries here. With bfloat16 queries the kernel takes at most
120.5 registers, and spills none.

Groups of eight, and of four at D 256, take the kernel of 8x8 matrices, for which no such figures
could be made. Clang takes 84, 122 and 126 registers for it at D 64, 128 and 256, and spills none if
a lane has 128. For 8-bit keys and values it takes 91, 122 and 128, and for 6 bits 90, 126 and 128,
and spills none. For keys of 6 and values of 4 bits it spills none at D 64, 22 at D 128 and 30 at
D 256. The decode kernel spills none in any of these formats, up to D 128 and groups of four.

Mesa's compiler is not Apple's. It waits at the end of every block. It computes no value a second
time to save a register. Here each function of a simdgroup is one instruction. The compiler knows
nothing of the M3 and later chips, and nothing of memory.

From these figures follows an estimate: which share of the bandwidth a decode could use at D 128,
with four rows and enough threadgroups. With up to 104 registers an M1 has room for 512 threads a
core, with up to 116 for 448, and else for 384. So a core holds four threadgroups in float16, three
in bfloat16, and held one before. Each of its simdgroups goes around. It waits for memory some times
a tile: `waits`. It queues for the tile's bytes, which take bytes / (bandwidth / cores). It queues
for its cycles on one of {schedulers} schedulers. The shares are those of an exact mean value
analysis of this closed network. The first is for waits of 400 ns: source 15 of the model below saw
"beyond 400" on an M2 Pro. The second is for 800 ns. All chips are taken to have an M1's cores. 100%
is what memory gives to any kernel: less than its nominal bandwidth.

| type | kernel | simdgroups | cycles | waits | {chips} |
|---|---|--:|--:|--:|{rule}
{shares}

Where memory gives 85% of its nominal bandwidth, which is an assumption, bfloat16 had {before} of
the nominal bandwidth of an M1 Max, and has {after} now. The last two rows are what would make room
for a fourth threadgroup in bfloat16: 99.5 and 101 registers. The kernel does neither. The first
asks for half as many bytes at a time. The second takes 14% more cycles, for at most five points.
"""

BYTES = 2 * 2 * 128 * 32
"""Of a tile's keys and values."""
WAITS = 400e-9, 800e-9
"""Seconds that a load takes if nobody queues."""
NOMINAL = 0.85
KERNELS = (
    ("float16", "before", 8, 2313, 12),
    ("float16", "now", 16, 2227, 8),
    ("bfloat16", "before", 8, 2384, 12),
    ("bfloat16", "now", 12, 2611, 8),
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
    before, after = (shares(SHOWN[0], KERNELS[n], NOMINAL) for n in (2, 3))
    return TEXT.strip().format(
        schedulers=SCHEDULERS,
        chips=" | ".join(chip.name for chip in SHOWN),
        rule="--:|" * len(SHOWN),
        shares="\n".join(share_lines()),
        before=before,
        after=after,
    )
