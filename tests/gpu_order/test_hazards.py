"""Without the fixes that this package needs on a GPU, the model finds what they prevent."""

import re
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_paged import Engine, _ext
from tests.gpu_order.model.backend import Backend, Report
from tests.gpu_order.model.knockouts import FIXES, Change, unregistered
from tests.gpu_order.model.lives import small_model
from tests.gpu_order.model.pool_ops import ROLES
from tests.gpu_order.model.trace import Eval, Event, Role
from tests.gpu_order.model.tracer import Tracer
from tests.support.ops.numpy_quantization import BITS
from tests.support.ops.paged_cases import random_case
from tests.support.ops.quantized_cases import quantized_case

ATTENTION, GATHERS = FIXES.values()
EVERY_OP = 0
"""A command buffer for every dispatch: no two of them are ordered by luck."""


def judged(
    script: Callable[[], None], change: Change, few_queries: int = 8, max_ops: int = EVERY_OP
) -> Report:
    backend = Backend(max_ops=max_ops)
    with Tracer(lambda event: backend.encode(change(event))).installed(few_queries):
        script()
    return backend.finish()


def engine(model, **options) -> Engine:
    given = {"block_size": 2, "num_blocks": 40, "prefix_cache": False, "prewarm": False}
    return Engine(model, **(given | options))


def chunk_only_steps() -> None:
    """A long prompt alone, in chunks, whose layers let go of blocks behind their window."""
    kinds = ("full_attention", "sliding_attention") * 2
    model = small_model("llama", num_hidden_layers=4, layer_types=kinds, sliding_window=4)
    windowed = engine(model, prefill_chunk=8)
    windowed.generate([list(range(40))], max_tokens=1)


def copies_at_the_start_of_a_step() -> None:
    """Samples part from their prompt's last block when another request has just left."""
    plain = engine(small_model("llama"), prefill_chunk=16)
    plain.add_request([1, 2, 3], max_tokens=3)
    plain.step()
    plain.add_samples([4, 5, 6, 7, 8], 3, max_tokens=3)
    while plain.has_work:
        plain.step()


def freed_blocks() -> None:
    """A request comes into the blocks of one whose last token is being computed."""
    plain = engine(small_model("llama"), max_running=1)
    plain.generate([[1, 2, 3, 4, 5], [6, 7, 8, 9]], max_tokens=2)


def freed_blocks_of_a_quantized_pool() -> None:
    small = engine(small_model("llama"), max_running=1, kv_bits=4)
    small.generate([[1, 2, 3, 4, 5], [6, 7, 8, 9]], max_tokens=2)


HAZARDS = {
    chunk_only_steps: {("PagedAttention", "WriteKV")},
    copies_at_the_start_of_a_step: {("PagedAttention", "CopyBlocks")},
    freed_blocks: {("PagedAttention", "WriteKV")},
    freed_blocks_of_a_quantized_pool: {("PagedAttention", "WriteKV")},
}
"""Which reads each script's writes meet if attention only binds the pool as an input."""


def pairs(report: Report) -> set[tuple[str, str]]:
    assert {hazard.kind for hazard in report.hazards} <= {"WAR"}
    return {(hazard.first.op.name, hazard.second.op.name) for hazard in report.hazards}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("script", HAZARDS, ids=lambda script: script.__name__)
def test_attention_that_does_not_register_the_pool_is_found(script):
    report = judged(script, ATTENTION)
    assert pairs(report) == HAZARDS[script]
    told = re.search(
        r"in eval \d+ of step (\d+) .* in eval \d+ of step (\d+)", str(report.hazards[0])
    )
    assert told and int(told[1]) == int(told[2]) + 1, "the report does not say in which steps"
    assert not judged(script, unregistered()).hazards


@pytest.mark.parametrize("script", [chunk_only_steps, freed_blocks], ids=lambda s: s.__name__)
def test_gathers_that_do_not_register_the_pool_are_found(script):
    assert pairs(judged(script, GATHERS, few_queries=0)) == {("PoolRead", "WriteKV")}
    assert not judged(script, unregistered(), few_queries=0).hazards


def only_scales_registered(event: Event) -> Event:
    """Attention binds keys and values as inputs only."""
    if not isinstance(event, Eval):
        return event
    ops = []
    for op in event.ops:
        read = [i for i, b in enumerate(op.bindings) if b.role is Role.POOL_READ]
        plain = read[:2] if op.name == "PagedAttention" else []
        bindings = tuple(
            replace(b, role=Role.INPUT) if i in plain else b for i, b in enumerate(op.bindings)
        )
        ops.append(replace(op, bindings=bindings))
    return replace(event, ops=tuple(ops))


def test_scales_are_registered_as_the_pool_is():
    """A write binds keys, values and scales together: one of them orders it."""
    assert not judged(freed_blocks_of_a_quantized_pool, only_scales_registered).hazards
    assert judged(freed_blocks, only_scales_registered).hazards


@pytest.mark.parametrize("kv_bits", BITS)
def test_launch_plans_bind_scales_as_they_bind_the_pool(kv_bits):
    case, _ = quantized_case(kv_bits, [5, 9])
    pools = case.k_cache, case.v_cache
    scales = {name: arrays[0] for name, arrays in case.options.items() if "scales" in name}
    rows = (mx.zeros((1, 2, 64)),) * 2
    for plan, role, roles in (
        (_ext.metal.plan_attention(*case.arrays, scale=1.0, **scales), "pool_read", (1, 2, 5, 6)),
        (
            _ext.metal.plan_write_kv(*rows, *pools, mx.array([0]), **scales),
            "pool_write",
            (0, 1, 2, 3),
        ),
    ):
        bound = [which for _, r, which in plan["launches"][0]["buffers"] if r == role]
        assert sorted(bound) == [*roles]


def test_roles_are_those_of_the_launch_plans():
    """What the tracer takes for granted of each primitive, encode.cpp binds."""
    case = random_case([5, 9])
    pools, rows = (case.k_cache, case.v_cache), (mx.zeros((1, 2, 64)),) * 2
    plans = {
        "PagedAttention": _ext.metal.plan_attention(*case.arrays, scale=1.0),
        "WriteKV": _ext.metal.plan_write_kv(*rows, *pools, mx.array([0])),
        "CopyBlocks": _ext.metal.plan_copy_blocks(*pools, mx.array([[0, 1]])),
    }
    for primitive, plan in plans.items():
        bound = {}
        for _, role, which in plan["launches"][0]["buffers"]:
            if role.startswith("pool"):
                bound[plan["outputs"][which] if role == "pool_write" else which] = Role(role)
        assert bound == ROLES[primitive]
