"""What scripts.publish measures, and the tables that it makes of it.

A page has each table between the marks `<!-- published: NAME -->` and `<!-- end -->`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "benchmarks.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
BEGIN, END = "<!-- published: {} -->\n", "<!-- end -->"

HEADLINE = "chat-4bit", "short-4bit", "chat-float32", "reference", "joins"
"""The parts that README's table has figures of."""

CHAT = "bench.serving --preset long-tail-chat --requests 24 --target-active 16 --no-static"
FLOAT32 = "--model smollm2-float32 --engines mlx_paged,llama_cpp,llama_cpp_no_flash"
FOUR_BITS = "--model smollm2-4bit --engines mlx_paged,llama_cpp_gguf"
RATE, STEADY = "output_tokens_per_sec", "continuous_steady_tokens_per_sec"
FIRST, NEXT = "ttft_ms", "tpot_ms"
KIB = 1024

Record = dict[str, Any]
Lines = Iterable[str]


@dataclass(frozen=True)
class Part:
    """Commands that are measured together, and the lines that a page gets of their results."""

    commands: tuple[str, ...]
    lines: Callable[..., Lines]  # of the last line of each command


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cells)} |"


def figures(value: float) -> str:
    """Three figures, but all of a whole number."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def over(record: Record, other: str, key: str = RATE) -> str:
    """mlx_paged over another engine: the ratio of medians, and of the rounds' ratios the range."""
    ours, theirs = (record["engines"][n]["each_round"][key] for n in ("mlx_paged", other))
    return times(ours, theirs)


def times(more: Sequence[float], less: Sequence[float]) -> str:
    """The ratio of medians, and of the rounds' ratios the range."""
    each = [a / b for a, b in zip(more, less, strict=True)]
    spread = f" ({figures(min(each))} to {figures(max(each))})" if len(each) > 1 else ""
    return f"{figures(median(more) / median(less))}x{spread}"


def percentiles(row: Record, key: str, names: Sequence[str], unit_ms: float, form: str) -> str:
    return " / ".join(f"{row[key][name] / unit_ms:{form}}" for name in names)


def served(record: Record) -> Lines:
    """Engines beside each other on one trace."""
    engines: dict[str, Record] = record["engines"]
    others = [name for name in engines if name != "mlx_paged"]

    def row(text: str, cell: Callable[[Record], str]) -> list[str]:
        return [text, *map(cell, engines.values())]

    rows = []
    for text, key in (("output tokens/s", RATE), ("the same in the steady phase", STEADY)):
        rows.append([text, *(figures(engine[key]) for engine in engines.values())])
        ratios = [over(record, name, key) for name in others]
        rows.append(["mlx_paged over it: medians (rounds)", "", *ratios])
    for text, key, names, unit_ms, form in (
        ("time to first token p50 / p99, s", "ttft_ms", ("p50", "p99"), 1000, ".2f"),
        ("between tokens p50 / p99 / max, ms", "itl_ms", ("p50", "p99", "max"), 1, ".0f"),
        ("step p50 / p99 / max, ms", "tick_ms", ("p50", "p99", "max"), 1, ".0f"),
    ):
        made = (percentiles(engine, key, names, unit_ms, form) for engine in engines.values())
        rows.append([text, *made])
    rows.append(row("K/V memory reserved / used, mean", lambda x: f"{x['kv_held_over_live']:.2f}"))
    rows.append(row("K/V memory reserved at peak, MiB", lambda x: f"{x['kv_held_peak_mib']:.1f}"))
    same = "streams with mlx_paged's tokens"
    rows.append(row(same, lambda x: f"{x['streams_as_first']} of {x['streams']}"))
    yield from markdown(["", *engines], rows)


def chat_4bit(record: Record, bounded: Record) -> Lines:
    yield from served(record)
    longest, bound = (each["engines"]["mlx_paged"] for each in (record, bounded))
    yield ""
    yield (
        f"With `--max-stall-ms {bounded['max_stall_ms']:g}` the longest time between two tokens of"
        f" a stream is {bound['itl_ms']['max']:.0f} ms instead of {longest['itl_ms']['max']:.0f} ms"
        f" (p99 {bound['itl_ms']['p99']:.0f} ms), at {bound[RATE]:.0f} output tokens/s. Steps in"
        " which no stream decodes are not bounded."
    )


def lone_prompts(*records: Record) -> Lines:
    """One stream at a time: its first token, and the time of each further one."""

    def cells(rounds: Record, key: str, unit_ms: float, own: Record) -> list[str]:
        text = figures(median(rounds[key]) / unit_ms)
        return [text, "" if rounds is own else times(rounds[key], own[key])]

    rows = []
    for record in records:
        own = record["engines"]["mlx_paged"]["each_round"]
        for name, engine in record["engines"].items():
            rounds = engine["each_round"]
            first, later = cells(rounds, FIRST, 1000, own), cells(rounds, NEXT, 1, own)
            same = f"{engine['streams_as_first']} of {engine['streams']}"
            rows.append([record["model"], name, *first, *later, same])
    over_ours = "mlx_paged over it"
    head = ["model", "", "first token, s", over_ours, "a further token, ms", over_ours]
    yield from markdown([*head, "streams with mlx_paged's tokens"], rows)


def chats(*records: Record) -> Lines:
    """Streams that begin together: tokens a second, in the steady phase and in the whole run."""
    rows = []
    for record in records:
        for name, engine in record["engines"].items():
            cells = [f"{record['work']['requests']}", record["model"], name]
            for key in (STEADY, RATE):
                ratio = "" if name == "mlx_paged" else over(record, name, key)
                cells += [figures(engine[key]), ratio]
            rows.append(cells)
    over_ours = "mlx_paged over it"
    head = ["chats", "model", "", "tokens/s, steady phase", over_ours, "tokens/s, whole run"]
    yield from markdown([*head, over_ours], rows)


def quantized_kv(record: Record) -> Lines:
    """Attention of decodes over quantized K/V beside the same op over bfloat16."""
    rows = []
    for case in record["cases"]:
        paged, plain = (case["ways"][way] for way in ("paged", "plain"))
        cells = [case["heads"], *(f"{case[key]}" for key in ("kv_bits", "batch"))]
        cells += [f"{way['ms']:.3f}" for way in (paged, plain)]
        rows.append([*cells, f"{plain['speedup']:.2f}x"])
    head = ["heads", "bits", "sequences", "quantized, ms", "bfloat16, ms"]
    yield from markdown([*head, "faster than bfloat16"], rows)


def stalls(record: Record) -> Lines:
    bound = record["max_stall_ms"]
    rows = [
        [
            name,
            *(f"{row[key]:.0f}" for key in ("gap_p50_ms", "gap_max_ms")),
            f"{row['gaps_above_bound']} of {row['gaps']}",
            f"{row['ttft_s']:.1f}",
        ]
        for name, row in record["engines"].items()
    ]
    head = ["", "gap p50, ms", "largest gap, ms", f"gaps above {bound:g} ms"]
    yield from markdown([*head, "first token of the prompt, s"], rows)
    yield ""
    yield f"A step of the decodes alone takes {record['floor_decode_ms']:.0f} ms."


def samples(record: Record) -> Lines:
    names = {"forked": "samples", "separate": "separate requests", "mlx_lm": "mlx-lm, copies"}
    rows = [
        [text, f"{record[f'{name}_wall_s']:.2f}", f"{record[f'{name}_kv_mib']:.1f}"]
        for name, text in names.items()
    ]
    yield from markdown(["", "s", "K/V at peak, MiB"], rows)
    yield ""
    yield (
        f"The samples hold {record['ratio']:.3f} times the blocks of their different content."
        f" {record['same_samples']} of {record['n']} have the tokens of separate requests."
    )


JOINS = {
    "admission": "a sequence joins (merge, extend)",
    "completion": "one leaves (filter)",
    "fork": "a copy is made and gets a token (deepcopy)",
    "decode": "one token of every row",
    "growth": "growth",
}


def joins(record: Record) -> Lines:
    rows = []
    for call, text in JOINS.items():
        cells = [text]
        for engine in ("mlx_lm", "mlx_paged"):
            cost = record[call][engine]
            cells += [f"{cost['ms']:.1f}", f"{cost['peak_mib']:.0f}"]
        rows.append(cells)
    head = ["", "mlx-lm's caches, ms", "MiB more", "paged caches, ms", "MiB more"]
    yield from markdown(head, rows)
    yield ""
    yield f"One copy of the {record['live_mib']:.0f} MiB takes {record['copy_ms']:.0f} ms here."


WAYS = {"gather": "gather + MLX", "contiguous": "MLX, contiguous", "ggml": "llama.cpp, flash"}


def attention(record: Record) -> Lines:
    rows = []
    for case in record["cases"]:
        ways = case["ways"]
        paged = ways["paged"]
        cells = [case["dtype"], f"{case['batch']}", f"{case['block_size']}", f"{paged['ms']:.2f}"]
        cells += [f"{paged['gb_s']:.0f}", f"{paged['percent_of_read']:.0f} %"]
        rows.append([*cells, *(f"{ways[way]['speedup']:.1f}x" for way in WAYS)])
    head = ["dtype", "sequences", "block", "paged op, ms", "GB/s", "of a read", *WAYS.values()]
    yield from markdown(head, rows)


def windows(record: Record) -> Lines:
    rows = [
        [
            row["model"],
            f"{row['window']}",
            *(f"{row[key] / KIB:.0f}" for key in ("held", "mlx_lm_held")),
            f"{row['held'] / row['mlx_lm_held']:.2f}x",
        ]
        for row in record["rows"]
    ]
    yield from markdown(["", "window", "mlx_paged, KiB", "mlx-lm, KiB", ""], rows)


PARTS = {
    "chat-4bit": Part(
        (
            f"{CHAT} --model smollm2-4bit --engines mlx_paged,llama_cpp_gguf --rounds 3",
            f"{CHAT} --model smollm2-4bit --engines mlx_paged --max-stall-ms 100 --rounds 3",
        ),
        chat_4bit,
    ),
    "short-4bit": Part(
        (
            "bench.serving --preset short-answers --model smollm2-4bit --requests 2"
            " --rounds 1 --no-static --engines mlx_paged,mlx_lm",
        ),
        served,
    ),
    "chat-float32": Part(
        (
            f"{CHAT} --model smollm2-float32 --rounds 3"
            " --engines mlx_paged,mlx_lm,llama_cpp,llama_cpp_no_flash",
        ),
        served,
    ),
    "one-stream": Part(
        tuple(
            f"bench.serving --preset one-stream --no-static {model} --rounds 5"
            for model in (FLOAT32, FOUR_BITS)
        ),
        lone_prompts,
    ),
    "prompt-7k": Part(
        tuple(
            f"bench.serving --preset prompt-7k --no-static {model} --rounds 3"
            for model in (FLOAT32, FOUR_BITS)
        ),
        lone_prompts,
    ),
    "prompt-32k": Part(
        (
            "bench.serving --preset prompt-32k --no-static --rounds 1"
            " --engines mlx_paged,mlx_lm,llama_cpp,llama_cpp_no_flash",
        ),
        lone_prompts,
    ),
    "chats": Part(
        tuple(
            f"bench.serving --preset {preset} --no-static {model} --rounds 3"
            for preset in ("few-chats", "many-chats")
            for model in (FLOAT32, FOUR_BITS)
        ),
        chats,
    ),
    "reference": Part(
        (
            "bench.serving --preset reference --prefill-chunk 96 --no-static --rounds 3"
            " --engines mlx_paged,mlx_lm,llama_cpp,llama_cpp_no_flash",
        ),
        served,
    ),
    "stalls": Part(("bench.stalls --rounds 1",), stalls),
    "samples": Part(("bench.memory --prompt-tokens 2000 --rounds 1",), samples),
    "joins": Part(("bench.admission --rounds 1",), joins),
    "attention": Part(
        (
            "bench.paged_attention --only decodes --heads 8:2:64 --dtypes float32 bfloat16"
            " --batches 8 32 --contexts 4096 --block-sizes 8 16 32 --rounds 5 --ggml",
        ),
        attention,
    ),
    "quantized-kv": Part(
        (
            "bench.paged_attention --only decodes --heads 8:2:64 32:8:128 --dtypes bfloat16"
            " --batches 8 32 --contexts 4096 --block-sizes 16 --kv-bits 8 6 4 --rounds 9"
            " --case-seconds 15",
        ),
        quantized_kv,
    ),
    "windows": Part(
        ("scripts.windowed_memory --prompt-tokens 8000 --chunks 64 --chats 0",),
        windows,
    ),
}


def part_lines(name: str, part: Record) -> Lines:
    """The commands of a part, its table, and what else the machine did."""
    yield ""
    for run in part["runs"]:
        yield f"`python -m {run['command']}`  "
    yield ""
    yield from PARTS[name].lines(*(run["result"] for run in part["runs"]))
    yield ""
    first = part["runs"][0]["result"]
    facts = []
    if (gemm := first.get("ceilings", first).get("gemm_gflops")) is not None:
        facts.append(f"GEMM before it: {gemm:.0f} GFLOP/s")
    if part["others_cores"] is not None:
        facts.append(f"other processes used {part['others_cores']:.2f} cores")
    yield f"{'; '.join(facts)}."
    yield ""


def machine_lines(results: Record) -> Lines:
    machine = results["machine"]
    yield (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}; MLX {machine['mlx']}'s"
        f" CPU backend, mlx-lm {machine['mlx-lm']}, llama-cpp-python"
        f" {machine['llama-cpp-python']}. Commit `{results['commit'][:12]}`."
    )


def headline(results: Record) -> Lines:
    """README's table."""
    runs = {
        name: [run["result"] for run in each["runs"]] for name, each in results["parts"].items()
    }
    chat, bounded = runs["chat-4bit"]
    [short], [float32], [reference] = (
        runs[name] for name in ("short-4bit", "chat-float32", "reference")
    )
    rows = [
        ["SmolLM2-135M in 4 bits, 16 chats at once: output tokens/s", *rates(chat)],
        ["longest time between two tokens; with `--max-stall-ms 100`", *gaps(chat, bounded)],
        ["the same model, 2 answers of 4 tokens: output tokens/s", *rates(short)],
        ["in float32, 16 chats at once: output tokens/s", *rates(float32)],
        ["reference workload, 32 at once: output tokens/s", *rates(reference)],
        ["the same workload: K/V memory reserved / used (1 = no waste)", *held(reference)],
        [
            "drop-in caches: adding one sequence to a batch with 512 MiB of K/V",
            *joining(runs["joins"][0]),
        ],
    ]
    yield from markdown(["", "mlx_paged", "mlx-lm", "llama.cpp"], rows)


def columns(record: Record) -> tuple[str | None, str | None]:
    """The engines of the table's other columns: mlx-lm, and the fastest way of llama.cpp."""
    engines: dict[str, Record] = record["engines"]
    llamas = [name for name in engines if name.startswith("llama_cpp")]
    fastest = max(llamas, key=lambda name: float(engines[name][RATE]), default=None)
    return "mlx_lm" if "mlx_lm" in engines else None, fastest


def rates(record: Record) -> list[str]:
    engines = record["engines"]
    cells = (n and f"{figures(engines[n][RATE])}: {over(record, n)}" for n in columns(record))
    return [figures(engines["mlx_paged"][RATE]), *(cell or "" for cell in cells)]


def gaps(record: Record, bounded: Record) -> list[str]:
    longest = {name: f"{row['itl_ms']['max']:.0f} ms" for name, row in record["engines"].items()}
    bound = bounded["engines"]["mlx_paged"]["itl_ms"]["max"]
    own = f"{longest['mlx_paged']}; {bound:.0f} ms"
    return [own, *(longest[name] if name else "" for name in columns(record))]


def held(record: Record) -> list[str]:
    names = ("mlx_paged", *columns(record))
    return [f"{record['engines'][name]['kv_held_over_live']:.2f}" for name in names]


def joining(record: Record) -> list[str]:
    costs = (record["admission"][name] for name in ("mlx_paged", "mlx_lm"))
    return [*(f"{cost['ms']:.1f} ms, {cost['peak_mib']:.0f} MiB more" for cost in costs), ""]


def tables(results: Record) -> dict[str, str]:
    """The lines of each table by its name, as one text; README's needs the parts of `HEADLINE`."""
    parts = results["parts"]
    found: dict[str, Lines] = {"machine": machine_lines(results)}
    for name in PARTS:
        found[name] = part_lines(name, parts[name]) if name in parts else ("", "Not measured.", "")
    if parts.keys() >= set(HEADLINE):
        found["headline"] = headline(results)
    return {name: "\n".join(lines) + "\n" for name, lines in found.items()}


def written(results: Record) -> dict[Path, str]:
    """The pages, with these results between the marks."""
    pages = {}
    texts = tables(results)
    for page in PAGES:
        text = page.read_text()
        for name, lines in texts.items():
            mark = BEGIN.format(name)
            if mark in text:
                begin = text.index(mark) + len(mark)
                text = text[:begin] + lines + text[text.index(END, begin) :]
        pages[page] = text
    return pages
