"""A model of how long a decode kernel would take: a roofline over published figures.

It knows nothing of caches, latency and clocks; docs/metal-counts.md says what it is made of.
"""

from collections.abc import Sequence
from dataclasses import dataclass

THREADGROUP_MEMORY = 32 * 1024
"""Bytes, of a core's threadgroups together."""
THREADS = 1024
"""Of a core's threadgroups together; more may be resident on real cores."""
LANES = 32
ISSUE_RATE = 2.6e12 / 8 / (2 * LANES)
"""Simdgroup instructions a core issues in a second: the M1's 2.6 TFLOPS in multiply-adds."""


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU as its maker describes it: cores and memory bandwidth in GB/s."""

    name: str
    cores: int
    bandwidth: float


CHIPS = (
    Chip("M1", 8, 68),
    Chip("M2", 10, 100),
    Chip("M3", 10, 100),
    Chip("M4", 10, 120),
    Chip("M5", 10, 153),
    Chip("M1 Max", 32, 400),
    Chip("M4 Max", 40, 546),
    Chip("M2 Ultra", 76, 800),
)


@dataclass(frozen=True, slots=True)
class Work:
    """A call of a kernel.

    Attributes:
        label: of its row.
        least_bytes: of memory, if caches keep all that threadgroups share.
        most_bytes: if they keep nothing of it.
        instructions: of simdgroups.
        threadgroups, threads, threadgroup_bytes: of the launch; threads and bytes of each.
    """

    label: str
    least_bytes: float
    most_bytes: float
    instructions: float
    threadgroups: int
    threads: int
    threadgroup_bytes: int

    @property
    def resident(self) -> int:
        """Threadgroups that a core holds at a time."""
        by_memory = THREADGROUP_MEMORY // max(1, self.threadgroup_bytes)
        return max(1, min(by_memory, THREADS // self.threads))

    @property
    def occupancy(self) -> float:
        """Share of a core's threads that its resident threadgroups have."""
        return self.resident * self.threads / THREADS

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
        least, most, compute = self.seconds(chip)
        low, high = (f"{max(memory, compute) * 1e6:,.0f}" for memory in (least, most))
        return (low if low == high else f"{low}..{high}") + ("" if most >= compute else "*")


TEXT = """
## A model of occupancy and time

**This is a model, not a measurement: no figure below was seen on Apple hardware.**

    resident  = min(32,768 / threadgroup memory, 1,024 / threads), at least 1: threadgroups a core
                holds at a time, if a core's threadgroups share what one may have at most
    occupancy = resident * threads / 1,024
    memory    = bytes / bandwidth
    compute   = instructions / (min(cores, threadgroups) * 5.08e9)
    time      = max(memory, compute)

- bytes: keys and values, tables, partial results and output. At best each byte of keys and values
  comes from memory once, at worst once for every threadgroup that loads it: a range where the two
  differ.
- instructions, of simdgroups: loads and stores as counted, 5 for every `simd_sum` or `simd_max`, 1
  for every other simdgroup operation, and the multiply-adds of scores and output, 2 * context * D a
  row, 32 an instruction. Exponentials and index arithmetic are left out.
- 5.08e9 is what makes 8 cores the 2.6 TFLOPS that Apple gave for the M1 ("Apple unleashes M1",
  November 2020), at 64 operations an instruction. All chips are taken to have it.
- bandwidth in GB/s, and GPU cores of the largest configuration:
  {chips}.
  They are Apple's, from the announcements "M1 Pro and M1 Max" (October 2021), "Apple unveils M2"
  (June 2022; 100 GB/s, "50 percent more than M1"), "M2 Ultra" (June 2023), "M3, M3 Pro, and M3 Max"
  (October 2023), "Apple introduces M4" (May 2024), "M4 Pro and M4 Max" (October 2024) and "Apple
  unleashes M5" (October 2025), and from the technical specifications of the Macs that have them.
  The M1's 68 is that of its LPDDR4X-4266 on 128 bits. All were quoted from memory and not looked
  up again: check them before you rely on the model.

Microseconds of one call, that is of one layer; * where instructions are the larger term throughout.
"""


def model_table(works: Sequence[tuple[str, Work]]) -> str:
    """The section of the document. `works` are pairs of a shape and a call on it."""
    chips = ", ".join(f"{chip.name} {chip.bandwidth:g} ({chip.cores})" for chip in CHIPS)
    parts = [TEXT.format(chips=chips)]
    names = " | ".join(chip.name for chip in CHIPS)
    for shape in dict.fromkeys(shape for shape, _ in works):
        parts.append(f"\n| {shape} | | occupancy | {names} |\n|---|---|--:|{'--:|' * len(CHIPS)}\n")
        for work in (work for name, work in works if name == shape):
            cells = " | ".join(work.cell(chip) for chip in CHIPS)
            parts.append(f"| {work.label} | {work.occupancy:.0%} | {cells} |\n")
    return "".join(parts)
