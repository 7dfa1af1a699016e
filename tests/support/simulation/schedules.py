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
from functools import cache
from typing import Any

from mlx_paged import Engine
from mlx_paged.cli import COUNT, Parser, number
from mlx_paged.engine.core import EngineCore
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.kv_disk.tier import KVDiskTier
from mlx_paged.metrics.stats import EngineStats
from mlx_paged.ops.formats import KVBits
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.speculation import Speculation
from tests.support.models import architectures, tiny_models
from tests.support.ops.numpy_quantization import BITS
from tests.support.simulation.disk_lives import DiskLives
from tests.support.simulation.fake_model import FakeClock, FakeRunner
from tests.support.simulation.fault_injection import FaultyRunner
from tests.support.simulation.hash_model import VOCAB
from tests.support.simulation.injected_drafts import InjectedDrafter, take_every_guess
from tests.support.simulation.planned_runner import PlannedRunner
from tests.support.simulation.random_calls import TINY_GROUPS, ImageCalls, Setting
from tests.support.simulation.simulated_engine import Simulation, Structured, TurnWatch
from tests.support.simulation.solo_runs import FakeSolo, MlxLmSolo, SoloModel
from tests.support.simulation.structured_calls import (
    StructuredSolo,
    structured_setting,
    structured_solo,
)

COUNTED = (
    *("schedules", "requests", "tokens", "steps", "preemptions", "forks", "samples", "beams"),
    *("aborts", "releases", "refused", "faults", "errors", "cow_clones", "cached_tokens"),
    *("drafts", "accepted_drafts", "restored", "overtakes", "near_ties", "shared_keys"),
    *("lives", "stored", "fetched", "dropped", "valid", "plans"),
    *("mismatches", "violations", "leaked_blocks", "failures"),
)


RECURRENT = ("jamba", "qwen3_5", "lfm2", "kimi_linear", "rwkv7")
LATENTS = ("kimi_linear",)  # are not quantized


def fake_simulation(
    seed: int,
    index: int,
    life: str = "",
    open_tier: Callable[[BlockAllocator], KVDiskTier] | None = None,
    runner_type: type[FakeRunner] = FakeRunner,
) -> Simulation:
    """Schedule `index` of `seed` on the model of hashes; with a disk one life of it."""
    setting = Setting.drawn(random.Random(f"{seed}:{index}"), small=False)
    rng = random.Random(f"{seed}:{index}{life}")
    if open_tier is None:
        Setting.drawn(rng, small=False)  # what follows is drawn after it
    else:
        setting = replace(setting, prefix_cache=True)
    if runner_type is PlannedRunner:
        setting = replace(setting, fault_rate=0.0)  # a failed step ends all ranks
    allocator = BlockAllocator(
        setting.num_blocks, setting.block_size, setting.groups, setting.prefill_chunk
    )
    drafter = drafter_for(setting, FakeSolo(), f"{seed}:{index}")
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
        rewinds=not setting.recurrent,
        max_snapshots=setting.most_snapshots,
        drafter=drafter,
        open_tier=None if open_tier is None else lambda predict: open_tier(allocator),
        clock=clock,
    )
    inner = runner_type(allocator, clock, random.Random(index), setting.recurrent)
    runner = FaultyRunner(inner, rng, setting.fault_rate)
    if drafter is not None:
        drafter.never = runner.bad
        if setting.max_stall is None:  # else the planner decides, by the clock
            take_every_guess(scheduler.speculation)
    engine = EngineCore(
        scheduler,
        runner,
        EngineStats(setting.block_size, 1, setting.num_blocks),
        vocab_size=VOCAB,
        seed=index,
        lookahead=setting.lookahead,
    )
    turn_rng = random.Random(f"{seed}:{index}:turns")
    return Simulation(setting, engine, runner, FakeSolo(), rng, TurnWatch(turn_rng))


def tiny_simulation(seed: int, index: int) -> Simulation:
    """Schedule `index` of `seed` on a tiny llama, or on a hybrid model if a state is to be kept."""
    rng = random.Random(f"{seed}:{index}:tiny")
    return engine_simulation(rng, Setting.drawn(rng, small=True), seed, index)


def quantized_simulation(seed: int, index: int) -> Simulation:
    """The same with K/V quantized in one of the ways."""
    rng = random.Random(f"{seed}:{index}:quantized")
    kv_bits = rng.choice(BITS)
    return engine_simulation(rng, Setting.drawn(rng, small=True), seed, index, kv_bits)


def structured_simulation(seed: int, index: int) -> Simulation:
    """Schedule `index` of `seed` on the demo model, with schemas for most of the requests."""
    rng = random.Random(f"{seed}:{index}:structured")
    setting = structured_setting(rng)
    return engine_simulation(rng, setting, seed, index, solo=structured_solo())


def engine_simulation(
    rng: random.Random,
    setting: Setting,
    seed: int,
    index: int,
    kv_bits: KVBits = None,
    solo: MlxLmSolo | None = None,
) -> Simulation:
    recurrent = [name for name in RECURRENT if kv_bits is None or name not in LATENTS]
    model_type = rng.choice(recurrent) if setting.recurrent else "llama"
    solo = solo or tiny_solo(model_type, len(setting.groups) > 1, kv_bits)
    engine = Engine(
        solo.model,
        solo.tokenizer if isinstance(solo, StructuredSolo) else None,
        kv_bits=kv_bits,
        block_size=setting.block_size,
        num_blocks=setting.num_blocks // sum(group.width for group in setting.groups),
        prefill_chunk=setting.prefill_chunk,
        max_running=setting.max_running,
        max_stall_ms=None if setting.max_stall is None else 1000 * setting.max_stall,
        policy=setting.policy,
        preempt=setting.victims,
        seed=index,
        prefix_cache=setting.prefix_cache,
        lookahead=setting.lookahead,
        prewarm=False,
    )
    runner = engine.runner = FaultyRunner(engine.runner, rng, setting.fault_rate)
    drafter = drafter_for(setting, solo, f"{seed}:{index}")
    if drafter is not None:
        drafter.never = runner.bad
        scheduler = engine.scheduler
        scheduler.speculation = Speculation(
            drafter, scheduler.allocator, scheduler.budget, scheduler.rewinds
        )
        take_every_guess(scheduler.speculation)
    turn_rng = random.Random(f"{seed}:{index}:turns")
    kind = Structured if isinstance(solo, StructuredSolo) else Simulation
    return kind(setting, engine, runner, solo, rng, TurnWatch(turn_rng))


def drafter_for(setting: Setting, solo: SoloModel, seed: str) -> InjectedDrafter | None:
    """A drafter for half of the schedules."""
    rng = random.Random(f"{seed}:drafts")
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
    if model_type not in tiny_models.CONFIGS:
        return MlxLmSolo(architectures.build(model_type), architectures.VOCAB, kv_bits)
    return MlxLmSolo(tiny_models.tiny_model(model_type, **options), tiny_models.VOCAB, kv_bits)


def disk_simulation(seed: int, index: int) -> DiskLives:
    """Schedule `index` of `seed` in several lives, with a disk between them."""
    return DiskLives(fake_simulation, seed, index)


def ranks_simulation(seed: int, index: int) -> Simulation:
    """Schedule `index` of `seed` with a second rank that reads the plan of every step."""
    return fake_simulation(seed, index, runner_type=PlannedRunner)


def image_simulation(seed: int, index: int) -> Simulation:
    """Schedule `index` of `seed` with images in most prompts."""
    simulation = fake_simulation(seed, index)
    simulation.calls = ImageCalls(simulation.setting, simulation.rng, VOCAB)
    return simulation


MODELS = {
    "images": image_simulation,
    "fake": fake_simulation,
    "ranks": ranks_simulation,
    "tiny": tiny_simulation,
    "quantized": quantized_simulation,
    "disk": disk_simulation,
    "structured": structured_simulation,
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
    for index in range(args.schedules) if args.only is None else [args.only]:
        counts, failure = run_schedule(args.model, args.seed, index)
        totals.update(counts)
        if failure is not None:
            if args.only is not None:
                traceback.print_exception(failure)
            print(f"schedule {index} of seed {args.seed}: {type(failure).__name__}: {failure}")
            replay = f"--seed {args.seed} --only {index} --model {args.model}"
            print(f"python -m tests.support.simulation.schedules {replay}", flush=True)
    print(json.dumps({name: totals[name] for name in COUNTED}))
    return int(totals["failures"] > 0)


if __name__ == "__main__":
    sys.exit(main())
