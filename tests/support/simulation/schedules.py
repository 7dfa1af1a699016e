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
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

from mlx_paged import Engine
from mlx_paged.cli import COUNT, Parser, number
from mlx_paged.engine.core import EngineCore
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv.layer_groups import ONE_GROUP
from mlx_paged.kv.states import StateIds
from mlx_paged.metrics.stats import EngineStats
from mlx_paged.options import KVBits
from mlx_paged.scheduler.ngram import NgramDrafter
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.speculation import Speculation
from tests.support.models import architectures, mtp_checkpoints, tiny_models
from tests.support.models.eagle3_files import random_head
from tests.support.models.mtp_checkpoints import random_mtp_head
from tests.support.ops.numpy_quantization import BITS
from tests.support.simulation import hash_model, structured_calls
from tests.support.simulation.disk_lives import Disk, DiskLives, Life
from tests.support.simulation.fake_model import FakeClock, FakeRunner
from tests.support.simulation.fault_injection import FaultyRunner
from tests.support.simulation.hash_model import VOCAB
from tests.support.simulation.injected_drafts import (
    HeadWithRightDrafts,
    InjectedDrafter,
    take_every_guess,
)
from tests.support.simulation.planned_runner import PlannedRunner
from tests.support.simulation.random_calls import TINY_GROUPS, Setting
from tests.support.simulation.resizing import RandomSizes
from tests.support.simulation.simulated_engine import Simulation, TurnWatch
from tests.support.simulation.solo_runs import FakeSolo, MlxLmSolo, SoloModel
from tests.support.simulation.structured_calls import structured_setting, structured_solo

COUNTED = (
    *("schedules", "requests", "tokens", "steps", "preemptions", "forks", "samples", "beams"),
    *("aborts", "releases", "refused", "faults", "errors", "cow_clones", "cached_tokens"),
    *("drafts", "accepted_drafts", "restored", "overtakes", "near_ties", "shared_keys"),
    *("lives", "stored", "fetched", "dropped", "valid", "plans", "shrinks", "growths"),
    *("mismatches", "violations", "leaked_blocks", "failures"),
)


RECURRENT = ("jamba", "qwen3_5", "lfm2", "kimi_linear", "rwkv7")
OF_MTP = ["qwen3_next", "qwen3_5"], ("mimo", "deepseek_v3", "glm4_moe", "ernie4_5_moe")
"""Models with an MTP head: recurrent ones and others."""
HEADS: dict[str, Callable[[Any], str]] = {"eagle3": random_head, "mtp": random_mtp_head}
LATENTS = ("kimi_linear",)  # are not quantized

EVIDENCE = {
    **{"kv_bits": "quantized", "drafts": "drafts", "grammars": "constrained"},
    **{"windows": "windowed", "states": "recurrent", "disk": "fetched", "forks": "forks"},
    **{"beams": "beams", "cascade": "shared_keys", "images": "pictures", "ranks": "plans"},
    **{"compiled": "compiled", "sizes": "shrinks"},
}
"""What a schedule counted if a feature was at work in it."""


@dataclass(frozen=True)
class Features:
    """What a schedule has beside what its :class:`Setting` has: windows, states and drafts.

    Attributes:
        is_real: a tiny model in a whole engine; else the model of hashes, which has no
            `kv_bits` and is never `compiled`.
        images: in the model of hashes alone.
        ranks: a second rank reads the plan of every step. Ranks have no `disk`.
        compiled: None: if this is faster.
        resizes: the pool's size changes now and then. Ranks do not follow.
        heads: the kind of a random head of a real model that drafts, too: a name in :data:`HEADS`.
        all_guesses: drafts for whoever has a guess; else the planner decides, by the clock.
    """

    is_real: bool = False
    kv_bits: KVBits = None
    grammars: bool = False
    disk: bool = False
    forks: bool = True
    beams: bool = True
    cascade: bool = True
    images: bool = False
    ranks: bool = False
    compiled: bool | None = None
    all_guesses: bool = False
    resizes: bool = False
    heads: str | None = None

    @classmethod
    def drawn(cls, rng: random.Random) -> "Features":
        """All of them at random. Few schedules have a real model: these take longer."""
        is_real = rng.random() < 0.08
        ranks = rng.random() < 0.4
        return cls(
            is_real=is_real,
            kv_bits=rng.choice((None, *BITS)) if is_real else None,
            grammars=rng.random() < (0.3 if is_real else 0.5),
            disk=not ranks and rng.random() < 0.6,
            forks=rng.random() < 0.8,
            beams=rng.random() < 0.8,
            cascade=rng.random() < 0.7,
            images=not is_real and rng.random() < 0.5,
            ranks=ranks,
            compiled=is_real and rng.random() < 0.7,
            all_guesses=rng.random() < 0.8,
            resizes=not ranks and rng.random() < 0.5,
        )

    def build(self, name: str, life: str = "", disk: Disk | None = None) -> Simulation:
        """A simulation of what the random stream `name` says; with a disk one life of it."""
        make = _real_simulation if self.is_real else _fake_simulation
        simulation = make(self, name, life, disk)
        simulation.counts["quantized"] = self.kv_bits is not None
        return simulation

    def simulate(
        self, name: str, setting: Setting, engine: Any, solo: SoloModel, rng: random.Random
    ) -> Simulation:
        """Of an engine whose runner is to fail now and then."""
        if self.ranks:
            setting = replace(setting, fault_rate=0.0)  # a failed step ends all ranks
            engine.runner = PlannedRunner(engine.runner, engine.scheduler.allocator)
        runner = engine.runner = FaultyRunner(engine.runner, rng, setting.fault_rate)
        runner.is_beam = engine._beams.__contains__
        scheduler = engine.scheduler
        drafter = _drafter_for(solo, name)
        others: list[NgramDrafter] = []
        if self.heads:
            head, rng_of_drafts = scheduler.decoding.drafters[0], random.Random(f"{name}:heads")
            drafter = HeadWithRightDrafts(rng_of_drafts, solo, 0.5, head)
            others = [NgramDrafter()] if rng_of_drafts.random() < 0.5 else []
        if drafter is not None:
            drafter.never = runner.bad
            drafters = [drafter, *others]
            scheduler.decoding = Speculation(drafters, scheduler.allocator, scheduler.budget)
            if self.is_real or self.all_guesses or setting.max_stall is None:
                take_every_guess(scheduler.decoding)
        source = structured_calls if self.is_real else hash_model
        constraints = source.CONSTRAINTS if self.grammars else ()
        watch = TurnWatch(random.Random(f"{name}:turns"))
        calls = {"forks": self.forks, "beams": self.beams, "images": self.images}
        simulation = Simulation(
            setting, engine, runner, solo, rng, watch, constraints=constraints, **calls
        )
        if self.resizes:
            RandomSizes(simulation, random.Random(f"{name}:sizes"))
        return simulation


def _fake_simulation(features: Features, name: str, life: str, disk: Disk | None) -> Simulation:
    setting = Setting.drawn(random.Random(name), small=False)
    rng = random.Random(f"{name}{life}")
    if disk is None:
        Setting.drawn(rng, small=False)  # what follows is drawn after it
    else:
        setting = replace(setting, prefix_cache=True)
    allocator = BlockAllocator(
        setting.num_blocks,
        setting.block_size,
        setting.groups,
        setting.prefill_chunk,
        StateIds(setting.most_snapshots * setting.prefix_cache) if setting.recurrent else None,
    )
    clock = FakeClock()
    scheduler = Scheduler(
        allocator,
        setting.max_running,
        setting.prefill_chunk,
        prefix_cache=setting.prefix_cache,
        policy=setting.policy,
        victims=setting.victims,
        max_stall=setting.max_stall,
        watermark=setting.watermark,
        open_tier=None if disk is None else lambda predict: disk.open(allocator),
        clock=clock,
    )
    index = int(name.split(":")[1])
    device_rng = random.Random(index)
    engine = EngineCore(
        scheduler,
        FakeRunner(allocator, clock, device_rng, setting.recurrent, features.cascade),
        EngineStats(setting.block_size, 1, setting.num_blocks),
        vocab_size=VOCAB,
        seed=index,
        lookahead=setting.lookahead,
    )
    engine.constraints = hash_model.HashGrammars()
    return features.simulate(name, setting, engine, FakeSolo(), rng)


def _real_simulation(features: Features, name: str, life: str, disk: Disk | None) -> Simulation:
    rng, kv_bits = random.Random(name), features.kv_bits
    solo: MlxLmSolo
    if features.grammars:
        setting = structured_setting(rng)
        model_type, solo = "llama", structured_solo(kv_bits)
    else:
        setting = Setting.drawn(rng, small=True)
        kinds = [each for each in RECURRENT if kv_bits is None or each not in LATENTS]
        plain: tuple[str, ...] = ("llama",)
        if features.heads == "mtp":
            kinds, plain = OF_MTP
            width = sum(group.width for group in setting.groups)
            one = {"groups": ONE_GROUP, "num_blocks": setting.num_blocks // width}
            setting = replace(setting, **one)
        model_type = rng.choice(kinds if setting.recurrent else plain)
        solo = tiny_solo(model_type, len(setting.groups) > 1, kv_bits)
    if disk is not None:
        setting, rng = replace(setting, prefix_cache=True), random.Random(f"{name}{life}")
    seed, index, *_ = name.split(":")
    with nullcontext() if disk is None else disk.for_engines():
        engine = Engine(
            solo.model,
            getattr(solo, "tokenizer", None),
            kv_bits=kv_bits,
            block_size=setting.block_size,
            num_blocks=setting.num_blocks // sum(group.width for group in setting.groups),
            prefill_chunk=setting.prefill_chunk,
            max_running=setting.max_running,
            max_stall_ms=None if setting.max_stall is None else 1000 * setting.max_stall,
            policy=setting.policy,
            preempt=setting.victims,
            seed=int(index),
            prefix_cache=setting.prefix_cache,
            lookahead=setting.lookahead,
            prewarm=False,
            compile=features.compiled,
            cascade=features.cascade,
            kv_disk=None if disk is None else disk.directory,
            draft_head=HEADS[features.heads](solo.model) if features.heads else None,
        )
    return features.simulate(f"{seed}:{index}", setting, engine, solo, rng)


def _drafter_for(solo: SoloModel, name: str) -> InjectedDrafter | None:
    """A drafter for half of the schedules."""
    rng = random.Random(f"{name}:drafts")
    takes = rng.random() < 0.5
    return InjectedDrafter(rng, solo, rng.choice((0.0, 0.7, 1.0))) if takes else None


@cache
def tiny_solo(model_type: str, windowed: bool = False, kv_bits: KVBits = None) -> MlxLmSolo:
    """A tiny model of an architecture of mlx-lm; a windowed one has the groups TINY_GROUPS."""
    full, windowed_group = TINY_GROUPS
    options: dict[str, Any] = {}
    if windowed:
        kinds = ["sliding_attention"] * windowed_group.members + ["full_attention"] * full.members
        options = {
            "layer_types": kinds,
            "sliding_window": windowed_group.window,
            "num_hidden_layers": len(kinds),
        }
    if model_type in mtp_checkpoints.HEADS:
        changes = mtp_checkpoints.HEADS[model_type]
        return MlxLmSolo(architectures.build(model_type, **changes), architectures.VOCAB, kv_bits)
    if model_type not in tiny_models.CONFIGS:
        return MlxLmSolo(architectures.build(model_type), architectures.VOCAB, kv_bits)
    return MlxLmSolo(tiny_models.tiny_model(model_type, **options), tiny_models.VOCAB, kv_bits)


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


def headed_life(heads: str, name: str) -> Life:
    """A schedule with a head, half of them with n-grams beside it, some with a disk or grammars."""
    rng = random.Random(f"{name}:features")
    structured = heads == "eagle3" and rng.random() < 0.2
    features = replace(TINY, heads=heads, grammars=structured)
    has_disk = not structured and rng.random() < 0.2
    return DiskLives(features.build, name) if has_disk else features.build(name)


MODELS: dict[str, Callable[[int, int], Life]] = {
    "all": any_simulation,
    "images": lambda seed, index: replace(FAKE, images=True).build(f"{seed}:{index}"),
    "fake": lambda seed, index: FAKE.build(f"{seed}:{index}"),
    "ranks": lambda seed, index: replace(FAKE, ranks=True).build(f"{seed}:{index}"),
    "tiny": tiny_simulation,
    "quantized": quantized_simulation,
    "heads": lambda seed, index: headed_life("eagle3", f"{seed}:{index}:heads"),
    "mtp heads": lambda seed, index: headed_life("mtp", f"{seed}:{index}:mtp"),
    "disk": lambda seed, index: DiskLives(FAKE.build, f"{seed}:{index}"),
    "sizes": lambda seed, index: replace(FAKE, resizes=True).build(f"{seed}:{index}"),
    "sizes of real pools": lambda seed, index: replace(TINY, resizes=True).build(
        f"{seed}:{index}:tiny"
    ),
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
