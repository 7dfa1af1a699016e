"""Random lives of an engine, each checked token by token against requests that run alone.

    python -m tests.support.simulation.schedules --schedules 1000 --seed 0 [--model tiny]

Schedule i of a seed is the same wherever it runs. What fails is printed with the command that runs
it again; the last line is one JSON object with what was counted.
"""

import json
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from mlx_paged.cli import COUNT, Parser, number
from tests.support.ops.numpy_quantization import BITS
from tests.support.simulation.builders import EVIDENCE, Features
from tests.support.simulation.disk_lives import DiskLives, Life
from tests.support.simulation.simulated_engine import Simulation

COUNTED = (
    *("schedules", "requests", "tokens", "steps", "preemptions", "forks", "samples", "beams"),
    *("aborts", "releases", "refused", "faults", "errors", "cow_clones", "cached_tokens"),
    *("drafts", "accepted_drafts", "restored", "overtakes", "near_ties", "shared_keys"),
    *("lives", "stored", "fetched", "dropped", "valid", "plans"),
    *("mismatches", "violations", "leaked_blocks", "failures"),
)


FAKE, TINY = Features(), Features(is_real=True)


def tiny_simulation(seed: int, index: int) -> Simulation:
    """Schedule `index` of `seed` on a tiny llama, or on a hybrid model if a state is to be kept."""
    return TINY.build(f"{seed}:{index}:tiny")


def quantized_simulation(seed: int, index: int) -> Simulation:
    """The same with K/V quantized in one of the ways."""
    kv_bits = random.Random(f"{seed}:{index}").choice(BITS)
    return replace(TINY, kv_bits=kv_bits).build(f"{seed}:{index}:quantized")


def any_simulation(seed: int, index: int) -> Life:
    """Schedule `index` of `seed` with all features at random."""
    name = f"{seed}:{index}:all"
    features = Features.drawn(random.Random(f"{name}:features"))
    return DiskLives(features.build, name) if features.disk else features.build(name)


MODELS: dict[str, Callable[[int, int], Life]] = {
    "all": any_simulation,
    "images": lambda seed, index: replace(FAKE, images=True).build(f"{seed}:{index}"),
    "fake": lambda seed, index: FAKE.build(f"{seed}:{index}"),
    "ranks": lambda seed, index: replace(FAKE, ranks=True).build(f"{seed}:{index}"),
    "tiny": tiny_simulation,
    "quantized": quantized_simulation,
    "disk": lambda seed, index: DiskLives(FAKE.build, f"{seed}:{index}"),
    "structured": lambda seed, index: replace(TINY, grammars=True).build(
        f"{seed}:{index}:structured"
    ),
}


def run_schedule(model: str, seed: int, index: int) -> tuple[Counter[str], Exception | None]:
    """Run one schedule; what was counted, and what went wrong."""
    simulation = MODELS[model](seed, index)
    failure: Exception | None = None
    try:
        simulation.run()
    except Exception as error:
        failure = error
        simulation.counts["failures"] += 1
    return simulation.result(), failure


def _features(together: Counter[tuple[str, ...]]) -> dict[str, Any]:
    """In how many schedules each feature was at work, and which pairs seldom or never were."""
    pairs = {pair: together[pair] for pair in combinations(sorted(EVIDENCE), 2)}
    seldom = sorted((count, " ".join(pair)) for pair, count in pairs.items() if count)[:8]
    return {
        "features": {name: together[name,] for name in sorted(EVIDENCE)},
        "pairs_never": [" ".join(pair) for pair, count in pairs.items() if not count],
        "pairs_seldom": {pair: count for count, pair in seldom},
    }


def make_parser() -> Parser:
    parser = Parser(prog="schedules", description="Random lives of an engine, checked.")
    parser.add_argument("--schedules", type=COUNT, default=1000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    index = number(int, 0, 2**31, "a whole number >= 0")
    parser.add_argument("--only", type=index, metavar="I", help="run schedule I alone")
    parser.add_argument("--model", choices=sorted(MODELS), default="fake")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    totals: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
    together: Counter[tuple[str, ...]] = Counter()
    for index in range(args.schedules) if args.only is None else [args.only]:
        counts, failure = run_schedule(args.model, args.seed, index)
        totals.update(counts)
        at_work = sorted(name for name, proof in EVIDENCE.items() if counts[proof] > 0)
        together.update([*combinations(at_work, 1), *combinations(at_work, 2)])
        if failure is not None:
            if args.only is not None:
                traceback.print_exception(failure)
            print(f"schedule {index} of seed {args.seed}: {type(failure).__name__}: {failure}")
            replay = f"--seed {args.seed} --only {index} --model {args.model}"
            print(f"python -m tests.support.simulation.schedules {replay}", flush=True)
    told = {name: totals[name] for name in COUNTED}
    print(json.dumps(told | (_features(together) if args.model == "all" else {})))
    return int(totals["failures"] > 0)


if __name__ == "__main__":
    sys.exit(main())
