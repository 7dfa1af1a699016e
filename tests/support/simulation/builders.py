"""Engines with the features of a schedule, for simulations."""

import random
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from mlx_paged import Engine
from mlx_paged.engine.core import EngineCore
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.metrics.stats import EngineStats
from mlx_paged.ops.formats import KVBits
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.speculation import Speculation
from tests.support.models import architectures, tiny_models
from tests.support.ops.numpy_quantization import BITS
from tests.support.simulation import hash_grammar, structured_calls
from tests.support.simulation.disk_lives import Disk
from tests.support.simulation.fake_model import FakeClock, FakeRunner
from tests.support.simulation.fault_injection import FaultyRunner
from tests.support.simulation.hash_model import VOCAB
from tests.support.simulation.injected_drafts import InjectedDrafter, take_every_guess
from tests.support.simulation.planned_runner import PlannedRunner
from tests.support.simulation.random_calls import TINY_GROUPS, Setting
from tests.support.simulation.simulated_engine import Simulation, TurnWatch
from tests.support.simulation.solo_runs import FakeSolo, MlxLmSolo, SoloModel
from tests.support.simulation.structured_calls import structured_setting, structured_solo

RECURRENT = ("jamba", "qwen3_5", "lfm2", "kimi_linear", "rwkv7")
LATENTS = ("kimi_linear",)  # are not quantized

EVIDENCE = {
    **{"kv_bits": "quantized", "drafts": "drafts", "grammars": "constrained"},
    **{"windows": "windowed", "states": "recurrent", "disk": "fetched", "forks": "forks"},
    **{"beams": "beams", "cascade": "shared_keys", "images": "pictures", "ranks": "plans"},
    **{"compiled": "compiled"},
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
        scheduler = engine.scheduler
        if (drafter := _drafter_for(solo, name)) is not None:
            drafter.never = runner.bad
            scheduler.speculation = Speculation(
                drafter, scheduler.allocator, scheduler.budget, scheduler.rewinds
            )
            if self.is_real or self.all_guesses or setting.max_stall is None:
                take_every_guess(scheduler.speculation)
        source = structured_calls if self.is_real else hash_grammar
        constraints = source.CONSTRAINTS if self.grammars else ()
        watch = TurnWatch(random.Random(f"{name}:turns"))
        calls = {"forks": self.forks, "beams": self.beams, "images": self.images}
        return Simulation(
            setting, engine, runner, solo, rng, watch, constraints=constraints, **calls
        )


def _fake_simulation(features: Features, name: str, life: str, disk: Disk | None) -> Simulation:
    setting = Setting.drawn(random.Random(name), small=False)
    rng = random.Random(f"{name}{life}")
    if disk is None:
        Setting.drawn(rng, small=False)  # what follows is drawn after it
    else:
        setting = replace(setting, prefix_cache=True)
    allocator = BlockAllocator(
        setting.num_blocks, setting.block_size, setting.groups, setting.prefill_chunk
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
        rewinds=not setting.recurrent,
        max_snapshots=setting.most_snapshots,
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
    engine.grammars = engine._make_request._grammars = hash_grammar.HashGrammars()
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
        model_type = rng.choice(kinds) if setting.recurrent else "llama"
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
    if model_type not in tiny_models.CONFIGS:
        return MlxLmSolo(architectures.build(model_type), architectures.VOCAB, kv_bits)
    return MlxLmSolo(tiny_models.tiny_model(model_type, **options), tiny_models.VOCAB, kv_bits)
