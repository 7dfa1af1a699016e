"""Compares the memory that an engine takes with what it promises."""

from random import Random

import mlx.core as mx

from mlx_paged import ops
from mlx_paged.doctor.findings import Findings
from mlx_paged.engine.engine import Engine
from mlx_paged.loading import load_model

MB = 1e6
MOST_TOKENS = 400  # of a prompt
NUM_BLOCKS = 512


def check_memory(found: Findings, quick: bool) -> None:
    """memory before, during and after mixed steps, against the promised budget"""
    mx.synchronize()
    mx.clear_cache()
    before = held()
    rng, steps = Random(0), 20 if quick else 100
    model, _ = load_model()
    engine = Engine(model, num_blocks=NUM_BLOCKS, max_running=8, prefix_cache=False)
    promised = engine.memory_budget
    during = 0
    for _ in found.progress(range(steps), "step"):
        while not engine.levels().waiting:
            prompt = [rng.randrange(1, 1000) for _ in range(rng.randint(1, MOST_TOKENS))]
            engine.add_request(prompt, max_tokens=rng.randint(4, 40), ignore_eos=True)
        engine.step()
        during = max(during, held())
    engine.close()
    del engine, model
    mx.synchronize()
    after = held()
    most = sum(promised.parts.values())
    sizes = {"before": before, "during": during, "after": after}
    found.numbers |= {"bytes": sizes, "promised": promised.parts, "steps": steps}
    text = ", ".join(f"{name} {size / MB:.1f}" for name, size in sizes.items())
    found.lines.append(f"MB that MLX holds, {steps} mixed steps, demo model: {text}")
    parts = ", ".join(f"{name} {size / MB:.1f}" for name, size in promised.parts.items())
    found.lines.append(f"promised: {parts}; together {most / MB:.1f}")
    if during - before > most:
        found.failures.append(
            f"the engine holds {(during - before) / MB:.1f} MB: expected at most {most / MB:.1f} MB"
        )


def held() -> int:
    """Bytes of MLX's arrays, of buffers that it keeps, and of pools that it does not count."""
    return mx.get_active_memory() + mx.get_cache_memory() + ops.reserved_bytes()
