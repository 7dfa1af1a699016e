"""A model of how long a decode kernel would take: a roofline over published figures.

It knows nothing of caches, latency and clocks; docs/metal-counts.md says what it is made of.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scripts.metal.launches import KV_HEADS, TILE, Row

LANES = 32
REGISTERS = 208 * 1024
"""Bytes, of a core's threads together."""
THREADGROUP_MEMORY = 60 * 1024
THREADS = 3072
"""Of a core, at most."""
CLOCK = 1.278e9
SCHEDULERS = 4
"""Of a core. Each issues an instruction of a simdgroup in a cycle."""
OTHER_WORK = 1.6
"""Cycles of all instructions but products of matrices, over those that are counted: what Mesa's
compiler for the M1 needs for the decode kernels, this package's and MLX's in two passes."""
SHUFFLE, REDUCTION, EXPONENTIAL, MULTIPLY_64, MATRIX_PRODUCT = 2, 15, 4, 16, 20
"""Cycles that other instructions would have of the same scheduler."""


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU as its maker describes it: cores of the largest configuration, bandwidth in GB/s.
    `size` is the one of anchors.SIZES."""

    name: str
    size: str
    cores: int
    bandwidth: float
    source: str


CHIPS = (
    Chip("M1", "base, Pro", 8, 68, "cores [1], bandwidth [2]"),
    Chip("M2, M3", "base, Pro", 10, 100, "[3]"),
    Chip("M4", "base, Pro", 10, 120, "[4]"),
    Chip("M5", "base, Pro", 10, 153, "[5]"),
    Chip("M4 Pro", "base, Pro", 20, 273, "[6]"),
    Chip("M1 Max", "Max", 32, 400, "[7]"),
    Chip("M4 Max", "Max", 40, 546, "[8]"),
    Chip("M5 Max", "Max", 40, 614, "[9]"),
    Chip("M3 Ultra", "Ultra", 80, 819, "cores [10], bandwidth [11]"),
)


def cycles(row: Row) -> float:
    """Of schedulers, for the whole call: what instructions of simdgroups take."""
    c, work = row.counts, row.work
    products = 0.0 if c.matrix_products else 2 * work.head_dim * work.group * TILE / LANES
    counted = (
        c.accesses
        + products
        + SHUFFLE * (c.shuffles + c.matrix_accesses)
        + REDUCTION * c.reductions
        + EXPONENTIAL * c.exponentials
        + MULTIPLY_64 * c.multiplies_64
    )
    of_tile = MATRIX_PRODUCT * c.matrix_products + OTHER_WORK * counted
    return of_tile * work.tiles * KV_HEADS


def occupancy(row: Row) -> str:
    """Share of a core's threads that its threadgroups have, and what keeps it from more."""
    limits = {
        "threads": THREADS // row.threads,
        "registers": REGISTERS // (4 * row.code.registers * row.threads),
        "memory": THREADGROUP_MEMORY // max(1, row.threadgroup_bytes),
    }
    limit, resident = min(limits.items(), key=lambda item: item[1])
    share = f"{max(1, resident) * row.threads / THREADS:.0%}"
    return share if limit == "threads" else f"{share}, {limit}"


def cell(row: Row, chip: Chip) -> str:
    """Microseconds: the larger of memory's and the instructions', at best and at worst."""
    if row.sizes and chip.size not in row.sizes:
        return ""
    compute = cycles(row) / (min(chip.cores, row.threadgroups) * SCHEDULERS * CLOCK)
    scale = row.work.tiles * KV_HEADS / (chip.bandwidth * 1e9)
    least, most = (each * scale for each in (row.counts.least, row.counts.moved))
    low, high = (f"{max(memory, compute) * 1e6:,.0f}" for memory in (least, most))
    return (low if low == high else f"{low}..{high}") + ("" if most >= compute else "*")


TITLE = "A model of occupancy and time"
TEXT = """
## {title}

**This is a model, not a measurement: nobody has seen these figures on Apple hardware.**

    resident  = min(60 KiB / threadgroup memory, 208 KiB / (threads * registers), 3,072 / threads),
                in whole threadgroups, at least 1: the threadgroups that a core holds
    occupancy = resident * threads / 3,072
    memory    = bytes / bandwidth
    compute   = cycles / (min(cores, threadgroups) * 4 * 1.278e9)
    time      = max(memory, compute)

- A core has the threadgroup memory, registers and threads of the M1 in [12]. It has four
  schedulers. Each issues one instruction of a simdgroup in a cycle of 1.278 GHz. These numbers
  agree with Apple's for the M1: 2.6 TFLOPS [1] and "nearly 25,000 threads" [13]. **The model takes
  them for all chips, because no source was found for the M3, M4 and M5.** From the M3 on, registers
  and threadgroup memory share one memory [14], so their limits are not separate.
- Bytes: at best each byte of keys and values comes from memory once. At worst it comes once for
  each threadgroup that loads it. A cell has a range if the two differ.
- Cycles: 1 for a load or a store. Scores and outputs take 2 * D * keys / 32 for each row, or
  {matrix} for a product of 8x8 matrices: a core of an M1 Max sustains 102 multiplications a cycle
  [12]. A shuffle takes {shuffle}, a reduction {reduction}, an exponential {exponential} and a
  64-bit multiplication {multiply}, as [12] found for the M1 Max. No figure was found for a matrix
  that is loaded from threadgroup memory or stored there; it is taken as a shuffle. All but products
  of matrices are multiplied by {other}, for index arithmetic, conversions and rescaling. This
  factor is that of Mesa's compiler for the M1 at D 128 and groups of four: it makes about 2,200
  cycles a tile of this package's kernel, and 7,100 of MLX's in two passes.
- Bandwidth and cores are Apple's, as the quoted pages report them. Apple's own pages were not read.

| chip | GB/s | GPU cores, at most | from |
|---|--:|--:|---|
{chips}

1. MacRumors, "Apple Announces 'M1' Chip":
   https://www.macrumors.com/2020/11/10/apple-announces-m1-chip-for-the-mac/
2. P. Turner: 68.2 is the limit of its memory. Apple named none, but put the M2's 100 "50 percent
   more". https://github.com/ggml-org/llama.cpp/pull/1642
3. Abachy, "Apple's M3 Series Chips":
   https://abachy.com/news/apples-m3-series-chips-enhanced-performance-and-advanced-gpus
4. MacTrast, on M4 Pro and M4 Max: https://mactrast.com/?p=168123
5. The Mac Observer, on the M5:
https://www.macobserver.com/news/apples-new-m5-chip-lands-with-4x-ai-gpu-boost-faster-neural-engine-and-higher-memory-bandwidth/
6. TechMoran, on M4 Pro and M4 Max:
   https://techmoran.com/2024/10/31/apple-unveils-its-most-powerful-chips-the-m4-pro-and-m4-max/
7. 9to5Mac, on M1 Pro and M1 Max:
https://9to5mac.com/2021/10/18/apple-unveils-next-generation-m1-pro-and-m1-max-chips-for-new-macs/
8. MacRumors, "Apple Announces M4 Max":
   https://www.macrumors.com/2024/10/30/apple-announces-m4-max-chip/
9. Lowyat, on M5 Pro and M5 Max: https://www.lowyat.net/2026/385170/apple-m5-pro-m5-max
10. M. Tsai, quoting Apple: https://mjtsai.com/blog/2025/03/05/apple-m3-ultra/
11. Technetbooks, where Apple said "over 800":
    https://technetbooks.com/2025/03/apple-m3-ultra-vs-m4-max-benchmarks.html
12. P. Turner, metal-benchmarks, commit dc2adc6: https://github.com/philipturner/metal-benchmarks
13. Geek Culture, on the M1:
    https://geekculture.co/meet-the-m1-chip-designed-by-apple-specially-for-the-mac/
14. AppleInsider, "What Apple's three GPU enhancements in A17 Pro and M3 actually do":
    https://appleinsider.com/articles/23/11/10/what-apples-three-gpu-enhancements-in-a17-pro-and-m3-actually-do
15. Chips and Cheese, "A Brief Look at Apple's M2 Pro iGPU":
    https://chipsandcheese.com/2023/10/31/a-brief-look-at-apples-m2-pro-igpu/

Microseconds of one call, that is of one layer; * where cycles are the larger term throughout. Each
occupancy is followed by its limit, unless that is the number of threads.
"""

MODELLED = (128, (4, 8))
"""The head dimension and the groups of the table."""


def is_modelled(row: Row) -> bool:
    """Whether the table has the row."""
    return row.work.head_dim == MODELLED[0] and row.work.group in MODELLED[1]


def model_line(row: Row) -> str:
    """The row of the table."""
    cells = " | ".join(cell(row, chip) for chip in CHIPS)
    return f"| {row.work.group} | {row.work} | {row.kernel} | {occupancy(row)} | {cells} |"


def model_section(rows: Iterable[Row]) -> str:
    """The section of the document, for some of the rows."""
    table = "\n".join(f"| {c.name} | {c.bandwidth:g} | {c.cores} | {c.source} |" for c in CHIPS)
    names = " | ".join(chip.name for chip in CHIPS)
    parts = [
        TEXT.format(
            title=TITLE,
            chips=table,
            matrix=MATRIX_PRODUCT,
            shuffle=SHUFFLE,
            reduction=REDUCTION,
            exponential=EXPONENTIAL,
            multiply=MULTIPLY_64,
            other=OTHER_WORK,
        ),
        f"| group | keys | kernel | occupancy | {names} |",
        f"|--:|---|---|---|{'--:|' * len(CHIPS)}",
    ]
    parts += [model_line(row) for row in rows if is_modelled(row)]
    return "\n".join([*parts, ""])
