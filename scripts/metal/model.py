"""A model of how long a decode kernel would take: a roofline over published figures.

It knows nothing of caches, latency and clocks; docs/metal-counts.md says what it is made of.
"""

from collections.abc import Sequence
from dataclasses import dataclass

THREADGROUP_MEMORY = 60 * 1024
REGISTERS = 208 * 1024
"""Bytes, of a core's threads together."""
THREADS = 3072
"""Of a core, at most."""
LANES = 32
ISSUE_RATE = 4 * 1.278e9
"""Simdgroup instructions a core issues in a second: one of each of its four schedulers a cycle."""
SHUFFLE, REDUCTION, EXPONENTIAL = 2, 15, 4
"""Cycles that other instructions would have of the same scheduler."""

SIZES = ("base", "Pro", "Max", "Ultra")


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU as its maker describes it: cores of the largest configuration, bandwidth in GB/s."""

    name: str
    size: str
    cores: int
    bandwidth: float
    source: str


CHIPS = (
    Chip("M1", "base", 8, 68, "cores [1], bandwidth [2]"),
    Chip("M2, M3", "base", 10, 100, "[3]"),
    Chip("M4", "base", 10, 120, "[4]"),
    Chip("M5", "base", 10, 153, "[5]"),
    Chip("M4 Pro", "Pro", 20, 273, "[6]"),
    Chip("M1 Max", "Max", 32, 400, "[7]"),
    Chip("M4 Max", "Max", 40, 546, "[8]"),
    Chip("M5 Max", "Max", 40, 614, "[9]"),
    Chip("M3 Ultra", "Ultra", 80, 819, "cores [10], bandwidth [11]"),
)


@dataclass(frozen=True, slots=True)
class Work:
    """A call of a kernel.

    Attributes:
        label: of its row.
        sizes: of the chips that run it.
        least_bytes: of memory, if caches keep all that threadgroups share.
        most_bytes: if they keep nothing of it.
        instructions: of simdgroups, in cycles of a scheduler.
        threadgroups, threads, threadgroup_bytes: of the launch; threads and bytes of each.
        lane_bytes: of registers that a thread needs at least.
    """

    label: str
    sizes: tuple[str, ...]
    least_bytes: float
    most_bytes: float
    instructions: float
    threadgroups: int
    threads: int
    threadgroup_bytes: int
    lane_bytes: int

    @property
    def limits(self) -> dict[str, int]:
        """Threadgroups that a core can hold at a time, by what limits them."""
        return {
            "threads": THREADS // self.threads,
            "registers": REGISTERS // (self.lane_bytes * self.threads),
            "memory": THREADGROUP_MEMORY // max(1, self.threadgroup_bytes),
        }

    @property
    def occupancy(self) -> str:
        """Share of a core's threads that its threadgroups have, and what keeps it from more."""
        limit, resident = min(self.limits.items(), key=lambda item: item[1])
        share = max(1, resident) * self.threads / THREADS
        return f"{share:.0%}" if limit == "threads" else f"{share:.0%}, {limit}"

    def seconds(self, chip: Chip) -> tuple[float, float, float]:
        """By memory at best and at worst, and by instructions on the cores that have work."""
        busy = min(chip.cores, self.threadgroups)
        bandwidth = chip.bandwidth * 1e9
        return (
            self.least_bytes / bandwidth,
            self.most_bytes / bandwidth,
            self.instructions / (busy * ISSUE_RATE),
        )

    def cell(self, chip: Chip) -> str:
        """Microseconds: the larger of memory's and the instructions', at best and at worst."""
        if chip.size not in self.sizes:
            return ""
        least, most, compute = self.seconds(chip)
        low, high = (f"{max(memory, compute) * 1e6:,.0f}" for memory in (least, most))
        return (low if low == high else f"{low}..{high}") + ("" if most >= compute else "*")


TEXT = """
## A model of occupancy and time

**This is a model, not a measurement: no figure below was seen on Apple hardware.**

    resident  = min(60 KiB / threadgroup memory, 208 KiB / (threads * registers), 3,072 / threads),
                in whole threadgroups, at least 1: what a core holds at a time
    occupancy = resident * threads / 3,072
    memory    = bytes / bandwidth
    compute   = instructions / (min(cores, threadgroups) * 4 * 1.278e9)
    time      = max(memory, compute)

- threadgroup memory, registers and threads of a core, its four schedulers of one simdgroup
  instruction a cycle and the clock of 1.278 GHz are those of the M1 in [12]. They agree with what
  Apple said of it: 2.6 TFLOPS [1] and "nearly 25,000 threads" [13]. **All chips are taken to have
  them. For the M3, M4 and M5 no source was found**; from the M3 on, registers and threadgroup
  memory share what a core has [14], and the limits are no longer apart.
- registers: bytes of the arrays that a thread keeps through its loop over the keys. It is the least
  that a compiler can do with; what Apple's does is not known.
- bytes: queries, keys and values, tables, partial results and output. At best each byte of keys and
  values comes from memory once, at worst once for every threadgroup that loads it: a range where
  the two differ.
- instructions, of simdgroups: loads and stores as counted, and the multiplications of scores and
  output, 3 * context * D a row, 32 an instruction; 2 for every shuffle, 15 for every `simd_sum` or
  `simd_max` and 4 for every exponential, of which a row takes two a key: cycles that [12] found for
  the M1 Max. `simd_max` is taken to cost what `simd_sum` does. Index arithmetic is left out.
- bandwidth and cores are Apple's, as those who quoted its announcements have them; Apple's own
  pages were not at hand.

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

Microseconds of one call, that is of one layer; * where instructions are the larger term throughout.
With its occupancy goes what limits it, unless that is the number of threads.
"""


def model_table(works: Sequence[tuple[str, Work]]) -> str:
    """The section of the document. `works` are pairs of a shape and a call on it."""
    chips = "\n".join(f"| {c.name} | {c.bandwidth:g} | {c.cores} | {c.source} |" for c in CHIPS)
    parts = [TEXT.format(chips=chips)]
    names = " | ".join(chip.name for chip in CHIPS)
    for shape in dict.fromkeys(shape for shape, _ in works):
        parts.append(f"\n| {shape} | | occupancy | {names} |\n|---|---|---|{'--:|' * len(CHIPS)}\n")
        for work in (work for name, work in works if name == shape):
            cells = " | ".join(work.cell(chip) for chip in CHIPS)
            parts.append(f"| {work.label} | {work.occupancy} | {cells} |\n")
    return "".join(parts)
