"""How a decode step grows with the tokens that are alive, and with the requests that wait.

Engines with different numbers of rows and tokens take turns in one process.

    python -m bench.scaling --rows 8 16 32 --contexts 256 512 1024 --plot scaling.png
"""

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import mlx.nn as nn
import numpy as np
from tqdm import tqdm

from bench.host_cost.silent_engine import decoding_engine
from bench.models import SIZES, check_machine, llama_model
from mlx_paged import Engine
from mlx_paged.common_args import COUNT, Parser

WAITING_TOKENS = 64
"""Of each request that waits."""


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
    def median_ms(self) -> float:
        return median(self.step_ms)

    @property
    def quiet_ms(self) -> float:
        """Of the quietest tenth of the steps: other processes only add to them."""
        return float(np.quantile(self.step_ms, 0.1))

    def run(self, num_steps: int) -> None:
        """Time some more steps."""
        for _ in range(num_steps):
            start = time.perf_counter()
            outputs = self.engine.step()
            self.step_ms.append(1000 * (time.perf_counter() - start))
            assert len(outputs) == self.rows, "a step that is not a decode of all rows"

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "context": self.context,
            "live_tokens": self.live_tokens,
            "waiting": self.waiting,
            "step_ms": round(self.median_ms, 3),
            "quiet_ms": round(self.quiet_ms, 3),
        }


@dataclass(frozen=True)
class Growth:
    """What quiet steps take: ``fixed_ms``, and so much more for each row and each live token; and
    what doubling one of the two does to a step.

    Attributes:
        exponent: of live tokens in the power law that fits best; 1 is linear.
        doublings: ratios of steps of which one has twice the tokens, by how they came to be.
    """

    fixed_ms: float
    us_a_row: float
    us_a_token: float
    exponent: float
    doublings: dict[str, list[float]]

    @classmethod
    def of(cls, points: list[Point]) -> "Growth":
        ms = np.array([point.quiet_ms for point in points])
        rows = np.array([point.rows for point in points])
        tokens = np.array([point.live_tokens for point in points])
        features = np.stack([np.ones(len(points)), rows, tokens], axis=1)
        weighted = features / ms[:, None]  # relative errors count
        fixed, a_row, a_token = np.linalg.lstsq(weighted, np.ones(len(points)), rcond=None)[0]
        exponent = np.polyfit(np.log(tokens), np.log(ms), 1)[0] if len(points) > 1 else 0.0
        by_size = {(point.rows, point.context): point.quiet_ms for point in points}
        doublings: dict[str, list[float]] = {"rows": [], "context": []}
        for (num_rows, context), before in by_size.items():
            for name, larger in (
                ("rows", (2 * num_rows, context)),
                ("context", (num_rows, 2 * context)),
            ):
                if larger in by_size:
                    doublings[name].append(round(by_size[larger] / before, 3))
        return cls(
            float(fixed), 1000 * float(a_row), 1000 * float(a_token), float(exponent), doublings
        )

    @property
    def worst_doubling(self) -> float:
        return max((ratio for ratios in self.doublings.values() for ratio in ratios), default=0.0)


def make_parser() -> Parser:
    parser = Parser(prog="bench.scaling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=COUNT, nargs="+", default=[8, 16, 32], help="that decode")
    parser.add_argument(
        "--contexts", type=COUNT, nargs="+", default=[256, 512, 1024], help="tokens of each row"
    )
    parser.add_argument("--waiting", type=COUNT, default=4096, help="requests that wait")
    parser.add_argument("--steps", type=COUNT, default=10, help="of each engine in a round")
    parser.add_argument("--rounds", type=COUNT, default=6)
    parser.add_argument("--model", choices=SIZES, default="reference", help="shape of the model")
    parser.add_argument("--plot", type=Path, help="write a picture there (needs matplotlib)")
    return parser


def make_points(args: argparse.Namespace, model: nn.Module) -> list[Point]:
    vocab = SIZES[args.model]["vocab_size"]
    return [
        Point(rows, context, decoding_engine(model, vocab, rows, context, lookahead=False))
        for rows in args.rows
        for context in args.contexts
    ]


def make_crowd(args: argparse.Namespace, model: nn.Module) -> list[Point]:
    """The smallest point twice, with nobody waiting and with many."""
    vocab = SIZES[args.model]["vocab_size"]
    rows, context = min(args.rows), min(args.contexts)
    points = [
        Point(rows, context, decoding_engine(model, vocab, rows, context, lookahead=False), waiting)
        for waiting in (0, args.waiting)
    ]
    rng = np.random.default_rng(1)
    for point in points:
        for _ in range(point.waiting):
            prompt = rng.integers(vocab, size=WAITING_TOKENS).tolist()
            point.engine.add_request(prompt, max_tokens=8)
    return points


def plot(path: Path, points: list[Point], growth: Growth, crowd: list[Point]) -> None:
    """Steps against live tokens, and the two crowds."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(10, 4.2), width_ratios=(3, 1), layout="constrained"
    )
    for rows in dict.fromkeys(point.rows for point in points):
        of_rows = sorted((p for p in points if p.rows == rows), key=lambda p: p.live_tokens)
        tokens = np.array([point.live_tokens for point in of_rows])
        (dots,) = left.plot(tokens, [p.quiet_ms for p in of_rows], "o", label=f"{rows} rows")
        line = growth.fixed_ms + (rows * growth.us_a_row + tokens * growth.us_a_token) / 1000
        left.plot(tokens, line, color=dots.get_color(), linewidth=1)
    left.set(
        xlabel="live tokens",
        ylabel="decode step (quietest tenth), ms",
        xlim=(0, None),
        ylim=(0, None),
    )
    left.set_title(
        f"{growth.fixed_ms:.1f} ms + {growth.us_a_row:.0f} us a row"
        f" + {growth.us_a_token:.2f} us a live token"
    )
    left.legend()
    right.boxplot([point.step_ms for point in crowd], showfliers=False)
    right.set_xticks([1, 2], [f"{point.waiting}" for point in crowd])
    right.set(xlabel="requests waiting", ylim=(0, None), title=f"{crowd[0].rows} rows")
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    machine = check_machine()
    model = llama_model(args.model)
    points, crowd = make_points(args, model), make_crowd(args, model)
    for _ in tqdm(range(args.rounds), desc="rounds", disable=None):
        for point in points + crowd:
            point.run(args.steps)

    growth = Growth.of(points)
    print("Ceiling: twice the tokens alive, twice the step; a step that waits for nothing else.")
    print(f"{'rows':>6}{'context':>9}{'live tokens':>13}{'step ms':>10}{'quiet ms':>10}")
    for point in points:
        print(f"{point.rows:6}{point.context:9}{point.live_tokens:13}", end="")
        print(f"{point.median_ms:10.2f}{point.quiet_ms:10.2f}")
    print(
        f"{growth.fixed_ms:.2f} ms + {growth.us_a_row:.1f} us a row + {growth.us_a_token:.3f} us a"
        f" live token; as a power of live tokens: {growth.exponent:.2f}"
    )
    print(f"Twice the tokens multiply a step by at most {growth.worst_doubling:.2f}")
    empty, crowded = crowd
    ratio = crowded.quiet_ms / empty.quiet_ms
    print(
        f"{crowded.waiting} waiting requests multiply a step by {ratio:.3f}:"
        f" {empty.quiet_ms:.3f} ms, {crowded.quiet_ms:.3f} ms"
    )
    if args.plot is not None:
        plot(args.plot, points, growth, crowd)
    result = {
        "bench": "scaling",
        **machine,
        "model": args.model,
        "points": [point.as_dict() for point in points],
        "fixed_ms": round(growth.fixed_ms, 3),
        "us_a_row": round(growth.us_a_row, 2),
        "us_a_token": round(growth.us_a_token, 4),
        "exponent": round(growth.exponent, 3),
        "doublings": growth.doublings,
        "worst_doubling": growth.worst_doubling,
        "crowd": [point.as_dict() for point in crowd],
        "waiting_ratio": round(ratio, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
