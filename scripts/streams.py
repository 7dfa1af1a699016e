"""README's picture: streams beside mlx-lm's while a long prompt is computed.

    python -m scripts.streams           measure, write docs/images/streams.json, draw
    python -m scripts.streams --draw    only draw docs/images/streams.svg again

The picture begins with its final frame, then moves at the speed of the run.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import stalls
from bench.flags.stalls import parse
from bench.machine import describe
from bench.models import named_model
from bench.names import REAL
from bench.pairs import in_turns
from mlx_paged.cli import COUNT, MILLISECONDS, Parser

RESULT = Path(__file__).parents[1] / "docs/images/streams.json"
BEFORE_S = 1.0  # shown of the time before the long prompt arrives
AFTER_S = 0.6  # and after the slower engine has its first token
HOLD_S = 6.0  # of the final frame, with which the picture begins
WIDTH, LEFT, RIGHT = 860, 80, 840
LABELS = 10  # on the axis of time, about
MODEL = "SmolLM2-135M-Instruct"
LEGEND = "Mark: a token of a stream. Yellow: the prompt's first token. At the run's own speed."
TOP, ROW, GAP = 66, 13, 52  # of the first stream; of a stream; between engines

STYLE = """
svg { --text: #222; --soft: #5f6368; --back: #fff; --line: #d0d4d9; --e0: #0b6e99; --e1: #c8553d }
@media (prefers-color-scheme: dark) {
  svg { --text: #ddd; --soft: #a6a6a6; --back: #1c1d20; --line: #44474c }
  svg { --e0: #5ab7e0; --e1: #f08a70 }
}
text { font: 15px system-ui, sans-serif; fill: var(--soft) }
.name { font-weight: 600; fill: var(--text) }
.back, .cover { fill: var(--back) } .line { stroke: var(--line) }
.mark { stroke-width: 2.2 } .e0 { stroke: var(--e0) } .e1 { stroke: var(--e1) }
.arrival { stroke: var(--text); stroke-width: 1.5 } .first { stroke: #d9a400; stroke-width: 3 }
.cover, .now { transform: translateX(WIDEpx); animation: run SECONDSs linear infinite }
.now { stroke: var(--soft) }
@keyframes run {
  0%, HOLD% { transform: translateX(WIDEpx); animation-timing-function: step-end }
  STARTS% { transform: none }
  100% { transform: translateX(WIDEpx) }
}
@media (prefers-reduced-motion) { .cover, .now { animation: none } }
"""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """When each stream got its tokens, in seconds after the long prompt arrived."""
    words = [f"--model={options.model}", f"--prompt-tokens={options.prompt_tokens}"]
    words += [f"--max-stall-ms={options.max_stall_ms}", "--stream-tokens=64"]
    args = parse([*words, "--warm-up-tokens=256"])
    model, scenario = named_model(args.model), stalls.Scenario(args)
    bounded, _, stock, _ = stalls.servers(args, model, scenario).values()
    makers = {"mlx_paged": bounded, "mlx-lm": stock}
    courses = {name: partial(stalls.play_new, make, scenario) for name, make in makers.items()}
    engines = {
        name: {
            "first_token_s": round(played.ttft_s, 3),
            "tokens_s": [[round(t, 3) for t in each if t > -BEFORE_S] for each in played.tokens_s],
        }
        for name, (played,) in in_turns(courses, 1).items()
    }
    given = ("model", "streams", "stream_tokens", "prompt_tokens", "max_stall_ms")
    return {**{key: getattr(args, key) for key in given}, **describe(), "engines": engines}


def longest_gap_s(engine: dict[str, Any]) -> float:
    """Between two tokens of a stream, from the arrival to the first token of the long prompt."""
    end, rows = engine["first_token_s"], engine["tokens_s"]
    pairs = (pair for times in rows for pair in pairwise(times))
    return float(max(after - before for before, after in pairs if after > 0 and before < end))


def picture(result: dict[str, Any]) -> str:
    """An SVG file: a row for each stream, a mark for each token, on the same axis of time."""
    engines = result["engines"]
    end = max(each["first_token_s"] for each in engines.values()) + AFTER_S
    shown_s, wide, high = end + BEFORE_S, RIGHT - LEFT, result["streams"] * ROW
    bottom = TOP + len(engines) * (high + GAP) - GAP
    style = STYLE.replace("WIDE", str(wide)).replace("SECONDS", f"{shown_s + HOLD_S:.2f}")
    held = 100 * HOLD_S / (shown_s + HOLD_S)
    style = style.replace("HOLD", f"{held:.2f}").replace("STARTS", f"{held + 0.01:.2f}")
    about = {
        name: f"longest gap {longest_gap_s(each):.1f} s, first token of the prompt after"
        f" {each['first_token_s']:.1f} s"
        for name, each in engines.items()
    }
    dtype = result["model"].removeprefix("smollm2-")
    title = (
        f"{result['streams']} streams of SmolLM2-135M in {dtype}; a prompt of"
        f" {result['prompt_tokens']:,} tokens arrives at 0 s ({result['cores']} CPU cores)"
    )
    about["mlx_paged"] = f"--max-stall-ms {result['max_stall_ms']:g}: {about['mlx_paged']}"
    said = "; ".join(f"{name}: {text}" for name, text in about.items())
    body = "".join(_panels(engines, about, wide / shown_s, high, end))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 58}">'
        f"<title>{title}. {said}.</title><style>{style}</style>"
        f'<rect class="back" width="{WIDTH}" height="{bottom + 58}" rx="8"/>'
        f'<text class="name" x="16" y="28">{title}</text>{body}</svg>\n'
    )


def _panels(
    engines: dict[str, Any], about: dict[str, str], scale: float, high: int, end: float
) -> Iterator[str]:
    def across(time: float) -> str:
        return f"{(time + BEFORE_S) * scale:.1f}"

    top = TOP
    for i, (name, engine) in enumerate(engines.items()):
        rows = enumerate(engine["tokens_s"])
        tokens = [(t, ROW * row) for row, times in rows for t in times if t < end]
        marks = "".join(f"M{across(time)} {at + 2}v{ROW - 4}" for time, at in tokens)
        first = across(engine["first_token_s"])
        words = f'<tspan class="name">{name}</tspan>: {about[name]}'
        yield f'<text x="16" y="{top - 10}">{words}</text>'
        yield f'<text x="16" y="{top + high / 2 + 5}">streams</text>'
        yield f'<svg x="{LEFT}" y="{top}" width="{RIGHT - LEFT}" height="{high}">'
        yield f'<path class="arrival" d="M{across(0)} 0v{high}"/>'
        yield f'<path class="mark e{i}" d="{marks}"/><path class="first" d="M{first} 0v{high}"/>'
        if (until := max(time for time, _ in tokens)) < end / 2:
            x = float(across(until)) + 10
            yield f'<text x="{x:g}" y="{high / 2 + 5}">measured until here</text>'
        yield f'<rect class="cover" width="{RIGHT - LEFT}" height="{high}"/>'
        yield f'<path class="now" d="M0 0v{high}"/></svg>'
        top += high + GAP
    bottom = top - GAP + 4
    yield f'<path class="line" d="M{LEFT} {bottom}H{RIGHT}"/>'
    for time in range(0, int(end) + 1, 1 if end < LABELS else 2):
        x = LEFT + float(across(time))
        yield f'<path class="line" d="M{x:g} {bottom}v5"/>'
        yield f'<text x="{x:g}" y="{bottom + 20}" text-anchor="middle">{time} s</text>'
    yield f'<text x="16" y="{bottom + 44}">{LEGEND}</text>'


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="scripts.streams", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--draw", action="store_true", help=f"measure nothing; draw {RESULT.name}")
    add("--model", choices=REAL, default="smollm2-float32", help="default: %(default)s")
    add("--prompt-tokens", type=COUNT, default=1500, help="of the long prompt")
    add("--max-stall-ms", type=MILLISECONDS, default=300.0, help="the bound of mlx_paged")
    args = parser.parse_args(argv)
    if not args.draw:
        RESULT.write_text(json.dumps(measure(args)) + "\n")
    picture_file = RESULT.with_suffix(".svg")
    picture_file.write_text(picture(json.loads(RESULT.read_text())))
    print(f"wrote {picture_file}")


if __name__ == "__main__":
    main()
