"""A decode step of a model of many layers, with short and with long command buffers."""

from statistics import median

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.llama import Model, ModelArgs

from mlx_paged.command_buffers import MANY, OPERATIONS
from mlx_paged.doctor.apart import found_apart
from mlx_paged.doctor.findings import Findings
from mlx_paged.doctor.flags import STEP
from mlx_paged.engine.engine import Engine

SHORT = 40
"""Operations of a command buffer that MLX has by itself on a base chip."""

LAYERS, WIDTH, HEADS = 28, 1024, 8
NUM_STEPS = {True: 50, False: 300}
"""Of a quick and of a whole check."""


def compare_buffers(found: Findings, quick: bool) -> None:
    """Time the step with both lengths, and say which is faster. MLX keeps the length that it begins
    with, so each length has a process of its own."""
    steps: dict[int, float] = {}
    for operations in (SHORT, MANY):
        of_step = found_apart(Findings(STEP), quick, **{OPERATIONS: str(operations)})
        found.failures += of_step.failures
        found.unfinished = found.unfinished or of_step.unfinished
        if of_step.ok:
            steps[operations] = of_step.numbers["step_ms"]
    if len(steps) < 2:
        return
    found.numbers["step_ms_by_operations"] = {str(n): ms for n, ms in steps.items()}
    text = ", ".join(f"{ms:.2f} ms with {n:,}" for n, ms in steps.items())
    best = min(steps, key=steps.__getitem__)
    found.lines.append(f"decode of {LAYERS} layers by operations of a command buffer: {text}")
    found.lines.append(f"{OPERATIONS}={best} is the faster one here")


def check_step(found: Findings, quick: bool) -> None:
    """a decode step of one request, 28 layers"""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 2 * WIDTH}
    heads = {"num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS, "head_dim": 64}
    args = ModelArgs("llama", rms_norm_eps=1e-5, vocab_size=1024, **sizes, **heads)
    model = Model(args)
    model.update(tree_map(lambda array: array.astype(mx.bfloat16), model.parameters()))
    engine = Engine(model, num_blocks=64, max_running=1)
    engine.add_request([1] * 8, max_tokens=NUM_STEPS[quick])
    while engine.has_work:
        engine.step()
    ticks = [tick for tick in engine.ticks if not tick.has_prompt_tokens and tick.decode_tokens]
    found.numbers["step_ms"] = round(median(tick.tick_ms for tick in ticks), 4)
    found.lines.append(f"{found.numbers['step_ms']:.2f} ms")
