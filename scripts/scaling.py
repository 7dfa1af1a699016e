"""How a decode step grows with the live tokens, and with the waiting requests.

Engines with different numbers of rows and tokens take turns in one process.

    python -m scripts.scaling --rows 8 16 32 --contexts 256 512 1024 --plot scaling.png
"""

import argparse
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import mlx.nn as nn
import numpy as np

from bench.command import add_model, make_parser, print_result, table
from bench.host_cost.silent_engine import decoding_engine
from bench.machine import check_machine, machine_text
from bench.models import named_model, vocab_size
from bench.pairs import turns
from mlx_paged import Engine
from mlx_paged.cli import COUNT

WAITING_TOKENS = 64  # of each waiting request


@dataclass
class Point:
    """An engine that decodes `rows` requests of `context` tokens."""

    rows: int
    context: int
    engine: Engine
    waiting: int = 0
    step_ms: list[float] = field(default_factory=list)

    @property
    def live_tokens(self) -> int:
        return self.rows * self.context

    @property
    def quiet_ms(self) -> float:
        """The quietest tenth of the steps; other processes only make steps longer."""
        return float(np.quantile(self.step_ms, 0.1))

    def run(self, num_steps: int) -> None:
        """Time some more steps."""
        for _ in range(num_steps):
            start = time.perf_counter()
            outputs = self.engine.step()
            self.step_ms.append(1000 * (time.perf_counter() - start))
            assert len(outputs) == self.rows, "a step that is not a decode of all rows"

    def as_dict(self) -> dict[str, Any]:
        times = {"step_ms": round(median(self.step_ms), 3), "quiet_ms": round(self.quiet_ms, 3)}
        sizes = {"rows": self.rows, "context": self.context, "live_tokens": self.live_tokens}
        return sizes | {"waiting": self.waiting} | times


def growth_of(points: list[Point]) -> dict[str, Any]:
    """The time of quiet steps: a fixed time, plus a time for each row and for each live token.

    Returns:
        "fixed_ms", "us_a_row", "us_a_token"; "exponent" of live tokens in the power law that fits
        best (1 is linear); "doublings", ratios of two steps, one with twice the "rows" or twice the
        "context"; "worst_doubling", the highest of these ratios.
    """
    ms = np.array([point.quiet_ms for point in points])
    rows = np.array([point.rows for point in points])
    tokens = np.array([point.live_tokens for point in points])
    features = np.stack([np.ones(len(points)), rows, tokens], axis=1)
    weighted = features / ms[:, None]  # relative errors count
    fixed, a_row, a_token = np.linalg.lstsq(weighted, np.ones(len(points)), rcond=None)[0]
    exponent = np.polyfit(np.log(tokens), np.log(ms), 1)[0] if len(points) > 1 else 0.0
    by_size = {(point.rows, point.context): point.quiet_ms for point in points}

    def doubled(by: tuple[int, int]) -> list[float]:
        pairs = [((n * by[0], c * by[1]), before) for (n, c), before in by_size.items()]
        return [round(by_size[size] / before, 3) for size, before in pairs if size in by_size]

    doublings = {"rows": doubled((2, 1)), "context": doubled((1, 2))}
    return {
        "fixed_ms": round(float(fixed), 3),
        "us_a_row": round(1000 * float(a_row), 2),
        "us_a_token": round(1000 * float(a_token), 4),
        "exponent": round(float(exponent), 3),
        "doublings": doublings,
        "worst_doubling": max((r for ratios in doublings.values() for r in ratios), default=0.0),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("scaling", __doc__, "scripts")
    parser.prog = "scripts.scaling"
    add, contexts = parser.add_argument, [256, 512, 1024]
    add("--rows", type=COUNT, nargs="+", default=[8, 16, 32], help="that decode")
    add("--contexts", type=COUNT, nargs="+", default=contexts, help="tokens of each row")
    add("--waiting", type=COUNT, default=4096, help="requests that wait")
    add("--steps", type=COUNT, default=10, help="of each engine in a round")
    add("--rounds", type=COUNT, default=6)
    add_model(parser)
    add("--plot", type=Path, help="write a picture there (needs matplotlib)")
    return parser.parse_args(argv)


def make_point(model: nn.Module, vocab: int, rows: int, context: int, waiting: int = 0) -> Point:
    engine = decoding_engine(model, vocab, rows, context, lookahead=False)
    rng = np.random.default_rng(1)
    for _ in range(waiting):
        engine.add_request(rng.integers(vocab, size=WAITING_TOKENS).tolist(), max_tokens=8)
    return Point(rows, context, engine, waiting)


def point_table(points: list[Point]) -> str:
    form = "{rows} {context} {live_tokens} {step_ms:.2f} {quiet_ms:.2f}"
    rows = [form.format(**point.as_dict()).split() for point in points]
    return table([["rows", "context", "live tokens", "step ms", "quiet ms"], *rows])


def plot(path: Path, points: list[Point], growth: dict[str, Any], crowd: list[Point]) -> None:
    """Steps against live tokens, and the smallest point without and with waiting requests."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(8.4, 4), width_ratios=(3, 1), layout="constrained"
    )
    for rows in dict.fromkeys(point.rows for point in points):
        of_rows = sorted((p for p in points if p.rows == rows), key=lambda p: p.live_tokens)
        tokens = np.array([point.live_tokens for point in of_rows])
        (dots,) = left.plot(tokens, [p.quiet_ms for p in of_rows], "o", label=f"{rows} rows")
        line = (
            growth["fixed_ms"] + (rows * growth["us_a_row"] + tokens * growth["us_a_token"]) / 1000
        )
        left.plot(tokens, line, color=dots.get_color(), linewidth=1)
    left.set(xlabel="live tokens", ylabel="time of a decode step (ms)")
    left.set(xlim=(0, None), ylim=(0, None))
    left.xaxis.set_major_formatter("{x:,.0f}")
    left.set_title(
        "Quietest tenth. Lines: {fixed_ms:.1f} ms + {us_a_row:.0f} µs a row + {us_a_token:.2f} µs a"
        " live token".format(**growth),
        fontsize=10,
    )
    right.boxplot([point.step_ms for point in crowd], showfliers=False, widths=0.5)
    right.set_xticks([1, 2], [f"{point.waiting:,}" for point in crowd])
    right.set(xlabel="requests waiting", ylabel="all steps (ms)", ylim=(0, None))
    right.set_title(f"{crowd[0].rows} rows", fontsize=10)
    figure.legend(loc="outside lower left", ncols=len(points), frameon=False)
    figure.savefig(path, dpi=200)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    machine = check_machine()
    model, vocab = named_model(args.model), vocab_size(args.model)
    points = [make_point(model, vocab, *size) for size in product(args.rows, args.contexts)]
    smallest = (min(args.rows), min(args.contexts))
    crowd = [make_point(model, vocab, *smallest, waiting) for waiting in (0, args.waiting)]
    print(
        "Ceiling: twice the live tokens, twice the step; waiting requests add nothing."
        f" {machine_text(machine)}"
    )
    for _, point in turns(points + crowd, args.rounds, title="rounds"):
        point.run(args.steps)

    growth = growth_of(points)
    print(point_table(points))
    print(
        "{fixed_ms:.2f} ms + {us_a_row:.1f} us a row + {us_a_token:.3f} us a live token; as a power"
        " of live tokens: {exponent:.2f}\n"
        "Twice the tokens multiply a step by at most {worst_doubling:.2f}".format(**growth)
    )
    empty, crowded = crowd
    ratio = crowded.quiet_ms / empty.quiet_ms
    print(
        f"{crowded.waiting} waiting requests multiply a step by {ratio:.3f}:"
        f" {empty.quiet_ms:.3f} ms, {crowded.quiet_ms:.3f} ms"
    )
    if args.plot is not None:
        plot(args.plot, points, growth, crowd)
    result = {
        **machine,
        "model": args.model,
        "points": [point.as_dict() for point in points],
        **growth,
        "crowd": [point.as_dict() for point in crowd],
        "waiting_ratio": round(ratio, 3),
    }
    print_result("scaling", result)


if __name__ == "__main__":
    main()
