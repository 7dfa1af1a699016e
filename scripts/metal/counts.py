"""Counts what the Metal decode kernels do, beside MLX's own: writes docs/metal-counts.md.

    python -m scripts.metal.counts [--llama DIR] [--context 512 ...] [--ours | --limits]

The document has llama.cpp's kernel too, whose source is in DIR: see scripts/metal/llama.py. Without
DIR or with other contexts than the document's, the text goes to stdout. `--ours` counts this
package's kernels, and keeps the rows of all others that the document has: theirs change with MLX's
version alone. `--limits` counts only what the decode kernel's limits are about. The last line on
stdout is JSON.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise, product
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from scripts.metal.anchors import SIZES, anchors
from scripts.metal.chunks import rows as chunk_rows
from scripts.metal.chunks import with_chunks
from scripts.metal.launches import ROOT, TILE, Row, Work, decode_limits, paged, ragged
from scripts.metal.llama import Llama, llama_row
from scripts.metal.model import REDUCTION, SHUFFLE, TITLE, is_modelled, model_line, model_section
from scripts.metal.second import second_text
from tests.metal_emulator import launch

DOCUMENT = ROOT / "docs" / "metal-counts.md"
CONTEXTS = (512, 4096, 32768)
BATCHES = (1, 8, 32)
HEAD_DIMS = (64, 128, 256)
GROUPS = (1, 4, 8)
RAGGED_SIZES = ("Max",)
"""Chips whose anchors are counted for batches; the others' differ in the number of blocks."""


def simd_cycles(row: Row) -> float:
    c = row.counts
    return REDUCTION * c.reductions + SHUFFLE * (c.shuffles + c.matrix_accesses)


COLUMNS: dict[str, Callable[[Row], float]] = {
    "moved": lambda row: row.counts.moved / row.work.live_bytes,
    "asked": lambda row: row.counts.asked / row.work.live_bytes,
    "lines": lambda row: row.counts.lines,
    "loads": lambda row: row.counts.loads,
    "chain": lambda row: row.code.dependent_loads,
    "in flight": lambda row: row.code.bytes_in_flight,
    "simd": lambda row: row.counts.reductions + row.counts.shuffles,
    "cycles": simd_cycles,
    "exp": lambda row: row.counts.exponentials,
    "mul64": lambda row: row.counts.multiplies_64,
    "barriers": lambda row: row.counts.barriers,
    "registers": lambda row: row.code.registers,
    "table loads": lambda row: row.counts.table_loads,
    "groups": lambda row: row.threadgroups,
    "launches": lambda row: row.launches,
}
MORE_IS_BETTER = ("in flight",)
NOT_COMPARED = ("table loads", "groups")
REASONS = {
    "moved": "partial results are float32. MLX has float16, which overflows if the 512 weighted "
    "values of a split are above 128, or none in one pass",
    "asked": "as for bytes moved; and every lane reads its key's entry of the block table",
    "lines": "those of block tables and of partial results",
    "loads": "those of block tables and of partial results",
    "chain": "the entry of the block table comes before the key",
    "in flight": "products of matrices at D 256 take 16 keys at a time. To ask for their values a "
    "phase earlier takes 143 registers; a lane of an Apple GPU has 128",
    "simd": "sums are exchanged so that each lane has one key: more shuffles, which are cheap",
    "cycles": "sums are exchanged so that each lane has one key",
    "exp": "the merge rescales partial results",
    "mul64": "a threadgroup computes the place of its rows in the pool once, and has fewer keys. "
    "In the kernel of matrices 16 are for addresses in threadgroup memory, which have 32 bits on a "
    "GPU",
    "barriers": "four simdgroups wait once for their queries and once before they merge. In the "
    "kernel of matrices they share what they stage, with four barriers a step. If each had keys of "
    "its own, 0.25 barriers a tile would remain, for 7 more registers at D 64 and 38 more at "
    "D 128. With three barriers a step they are 3 and 31 more, and threadgroup memory is 1.7 and "
    "1.8 times as much",
    "registers": "a lane keeps the outputs of up to four query heads, so that K/V is read once, "
    "and has asked for several keys; at D 128 clang can do with 70 of 114",
    "launches": "keys are split among threadgroups: in one pass MLX has 8 for all cores",
}
"""Why this package's kernels are behind in a column. What splits cost is inherent: one pass has too
few threadgroups for a GPU."""
SUMMARY = "## Where the paged kernel is behind MLX's"
FRACTIONS = {"moved": 2, "asked": 2, "barriers": 2}
"""Digits after the point that a column has."""

HEADER = f"""# What the Metal decode kernels do

This page compares the work of three attention kernels: this package's (`paged`), MLX's and
llama.cpp's. It counts bytes, instructions and registers. An emulator on Linux
(`tests/metal_emulator`) ran the kernels. **Nothing here was measured on a GPU.**

`python -m scripts.metal.counts --llama DIR` writes this page. After a change of this package's
kernels `python -m scripts.metal.counts --ours` writes their rows. Do not edit it.
`tests/ops/test_metal_counts.py` compares some rows at a context of 512 with fresh ones.

Each sequence decodes one token, in float16, with 8 KV heads and blocks of 16 tokens in shuffled
order. `D` is the head dimension. A group is the query heads that share a KV head. This package's
kernels run with the launches that the op plans. MLX's `sdpa_vector` comes from the headers of MLX's
wheel and reads contiguous keys and values. All results agree with float64.

**All counts are per tile: {TILE} keys of one KV head, for all query heads of its group.** A count
is that of the whole call, its merge included, divided by the tiles of all sequences. A simdgroup is
32 threads that execute together; these threads are its lanes. An instruction that all lanes execute
together counts once.

| column | what |
|---|---|
| keys | keys of the sequences: "512 + 7 of 64" is one sequence of 512 keys and seven of 64 |
| moved | bytes, each counted once in a threadgroup, over the bytes of the tile's keys and values |
| asked | bytes that lanes ask for, repetitions included, over the same |
| lines | lines of 128 bytes that load and store instructions touch |
| loads | load instructions; neighbouring elements of a lane are one load of up to 16 bytes |
| chain | loads in one pass of a loop that wait for each other |
| in flight | bytes that a simdgroup asks for in a loop before it waits for the first |
| simd | `simd_sum`, `simd_max`, shuffles and others that move values from lane to lane |
| cycles | of a scheduler: {REDUCTION} a reduction, {SHUFFLE} a shuffle, load or store of a matrix |
| exp | exponentials |
| mul64 | 64-bit multiplications of optimised code, before a compiler turns some into additions |
| barriers | barriers of threadgroups, each counted once in a threadgroup |
| registers | vector registers of a lane, 4 bytes each |
| table loads | the loads that read entries of block tables |
| groups | threadgroups of the launch that reads the keys, for all KV heads |
| launches | launches of kernels in a call |

`chain`, `in flight` and `registers` are read from the code that clang makes for AMD's RDNA 2, a GPU
that also has simdgroups of 32 lanes. Apple's compiler makes other code. All kernels here go through
clang, so they can be compared. All other counts are made while the kernels run.

At D 128 and groups of four a lane of the decode kernel needs 54 floats at once, if two halves count
as one: 16 of outputs, 4 sums of weights, 4 products, and for four keys 16 of keys, 10 sums and 4 of
a query. Values take less. Maxima wait in threadgroup memory. Clang takes twice as many registers,
to ask for loads early. If 12 simdgroups have to fit on a scheduler, it takes 70 and spills none (a
spilled register is kept in memory). 54 registers would leave none for addresses and counters.

{second_text()}

Each simdgroup of a threadgroup merges through threadgroup memory of its own. At D 128 and groups of
four the four simdgroups have 9,360 bytes together, so six threadgroups fit into 60 KiB. Registers
allow fewer. A decode of fewer than 64 threadgroups has eight simdgroups in each, and 17,680 bytes:
[decodes of few rows](metal-few-rows.md) has the times of such calls with the latency of memory.

The tables have the kernels that MLX 0.32.4 launches. MLX takes two passes if there are fewer KV
heads than query heads and 4,096 keys or more. On a Max or an Ultra it always takes two passes from
1,024 keys on. Otherwise it takes one. The first of two passes splits the keys of a KV head among
threadgroups; the name of the kernel has their number. For groups of eight, D 64 or 128 and 8,192
keys or more, a simdgroup of this pass uses a key for several query heads ("shared"). These rules
are those of the source of 0.32.2. For groups of four they are also those of the machine code of the
0.32.4 library for macOS.

The sequences of a batch have contexts of different lengths. MLX pads each to the longest and hides
the padding by a mask. Only keys without padding count as tiles, so MLX's counts contain what it
moves and computes for padding. For batches MLX's kernel is the one that a Max launches.

Latents (MLA) of 512 + 64 elements are not in the tables. The kernel of 8x8 matrices takes most of
them. It asks for 0.125 of a latent for each query head: eight heads share the latent, and the value
is a part of the key that is in threadgroup memory. `tests/ops/test_metal_matrix.py` checks that no
value is loaded. The decode kernel takes latents for one query head, for float32, and with options
that the other kernel lacks. It asks for 1.89 of a latent for each query head, as key and as value.

llama.cpp's `kernel_flash_attn_ext_vec` is that of August 2025, which does not split keys among
threadgroups. It gets float32 queries, as it requires. Its lanes rely on lockstep execution,
which the emulator reports as races. Therefore it runs with more simdgroup barriers than its source.
"""


def works(contexts: Iterable[int] = CONTEXTS) -> list[Work]:
    """All that is counted, in the document's order."""
    cases = product(HEAD_DIMS, GROUPS, BATCHES, contexts)
    return [Work(dim, group, ragged(context, batch)) for dim, group, batch, context in cases]


def rows(work: Work, llama: Llama | None = None) -> list[Row]:
    """This package's kernel, MLX's, and for single sequences llama.cpp's if there is one."""
    if len(work.contexts) > 1:
        return [paged(work), *anchors(work, RAGGED_SIZES)]
    of_llama = [llama_row(llama, work)] if llama else []
    return [paged(work), *anchors(work, SIZES), *of_llama]


def _number(name: str, value: float) -> str:
    return f"{value:,.{FRACTIONS.get(name, 0)}f}"


def line(row: Row) -> str:
    """The row of a table."""
    sizes = f" ({', '.join(row.sizes)})" if row.sizes else ""
    cells = [_number(name, column(row)) for name, column in COLUMNS.items()]
    return f"| {row.work} | {row.kernel}{sizes} | {' | '.join(cells)} |"


def tables(found: Sequence[Row]) -> Iterator[str]:
    """One for each head dimension and group."""
    for (head_dim, group), those in groupby(found, lambda row: (row.work.head_dim, row.work.group)):
        yield f"\n## D {head_dim}, groups of {group}\n"
        yield f"| keys | kernel | {' | '.join(COLUMNS)} |"
        yield f"|---|---|{'--:|' * len(COLUMNS)}"
        yield from map(line, those)


def ratio(name: str, ours: float, theirs: float) -> float:
    """How far ours is behind: 1 if as good, more if worse."""
    if name in MORE_IS_BETTER:
        ours, theirs = theirs, ours
    return ours / theirs if theirs else (1.0 if ours == 0 else float("inf"))


@dataclass(frozen=True, slots=True)
class Printed:
    """A row of the document: where it is, whose it is, and its numbers as they are printed."""

    place: str
    kernel: str
    cells: dict[str, str]

    def number(self, name: str) -> float:
        return float(self.cells[name].replace(",", ""))


def printed(lines: Iterable[str]) -> Iterator[Printed]:
    """The rows of the tables of a document."""
    section = ""
    for text in lines:
        if text.startswith("## "):
            section = text.removeprefix("## ")
        cells = [cell.strip() for cell in text.strip("|").split("|")]
        if section.startswith("D ") and len(cells) == 2 + len(COLUMNS) and "," in "".join(cells):
            place = f"{section}, {cells[0]}"
            yield Printed(place, cells[1], dict(zip(COLUMNS, cells[2:], strict=True)))


def behind(found: Sequence[Printed]) -> Iterator[tuple[str, Printed, Printed, float]]:
    """The columns in which ours is behind the kernel of MLX that comes next in the tables: that of
    the smallest chips, or for batches of a Max. Numbers are compared as the tables have them."""
    for ours, theirs in pairwise(found):
        if ours.kernel != "paged":
            continue
        for name in COLUMNS:
            distance = ratio(name, ours.number(name), theirs.number(name))
            if name not in NOT_COMPARED and distance > 1.0:
                yield name, ours, theirs, distance


def summary(found: Sequence[Printed]) -> Iterator[str]:
    """How often ours is behind, by column, and where most."""
    cells = list(behind(found))
    total = sum(row.kernel == "paged" for row in found)
    yield f"\n{SUMMARY}\n"
    yield f"The tables above have {total} works (cases). In each, this package's kernel is compared"
    yield "with the first of MLX's kernels below it. `works` says in how many of them it is behind."
    yield "Less is better; only of `in flight` more is better. Table loads and threadgroups are not"
    yield "compared: MLX has no tables, and more threadgroups help only while cores are idle. In"
    yield "the works of `both split` MLX, too, splits the keys of a head among threadgroups, in"
    yield "two passes. In the others it takes one pass and writes no partial results. There paged"
    yield "attention is behind because it splits the keys, so that every core has some of them.\n"
    yield "| column | works | both split | most, at | ours | MLX's | because |"
    yield "|---|--:|--:|---|--:|--:|---|"
    for name in COLUMNS:
        those = [cell for cell in cells if cell[0] == name]
        if not those:
            continue
        _, ours, theirs, _ = max(those, key=lambda cell: cell[3])
        split = sum(theirs.number("launches") > 1 for _, _, theirs, _ in those)
        numbers = str(len(those)), str(split)
        values = ours.cells[name], theirs.cells[name]
        yield f"| {' | '.join([name, *numbers, ours.place, *values, REASONS[name]])} |"


def document(found: Sequence[Row]) -> str:
    """The whole file."""
    lines = [*tables(found)]
    lines += summary([*printed("\n".join(lines).splitlines())])
    text = "\n".join([HEADER.rstrip("\n"), *lines, model_section(found)])
    return with_chunks(text, [*chunk_rows()])


def with_ours(text: str, found: Sequence[Row]) -> str:
    """A document with new rows of this package's kernels."""
    new = {}
    for row in found:
        new[f"D {row.work.head_dim}, groups of {row.work.group}", f"| {row.work} | paged"] = line(
            row
        )
        if is_modelled(row):
            new[TITLE, f"| {row.work.group} | {row.work} | paged"] = model_line(row)
    section, lines = "", []
    for old in text.splitlines():
        section = old.removeprefix("## ") if old.startswith("## ") else section
        start, paged, _ = old.partition("| paged |")
        lines.append(new.pop((section, f"{start}| paged"), old) if paged else old)
    assert not new, f"the document has no rows for {list(new)}"
    tables_end = lines.index(SUMMARY)
    model = model_section([]).splitlines()
    model_end = lines.index(model[-1], tables_end) + 1
    those = [*printed(lines)]
    rest = "\n".join([*lines[: tables_end - 1], *summary(those), *model, *lines[model_end:], ""])
    return HEADER + rest[rest.index("\n## ") :]


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts.metal.counts", description=__doc__)
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS, metavar="KEYS")
    parser.add_argument("--ours", action="store_true", help="keep the document's other rows")
    parser.add_argument("--limits", action="store_true", help="of the decode kernel only")
    parser.add_argument("--llama", type=Path, metavar="DIR")
    args = parser.parse_args()
    mx.set_default_device(mx.Device(mx.cpu))
    launch.CPU_SECONDS = 3600.0  # long contexts take minutes
    if args.limits:
        print(json.dumps(decode_limits()))
        return
    if args.ours:
        found = [paged(work) for work in tqdm(works(), disable=None)]
        DOCUMENT.write_text(with_ours(DOCUMENT.read_text(), found))
        print(json.dumps([asdict(row) for row in found]))
        return
    llama = Llama(args.llama) if args.llama else None
    found = [row for work in tqdm(works(args.context), disable=None) for row in rows(work, llama)]
    if llama and tuple(args.context) == CONTEXTS:
        DOCUMENT.write_text(document(found))
    else:
        print(document(found))
    print(json.dumps([asdict(row) for row in found]))


if __name__ == "__main__":
    main()
