"""Steps of compiled graphs under the model of MLX's Metal encoder: the order that they run in."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged import Engine
from mlx_paged.attention import shared_prefixes
from mlx_paged.runner.buckets import Buckets
from tests.gpu_order.model.backend import Backend, Report
from tests.gpu_order.model.knockouts import FIXES, Change, unregistered
from tests.gpu_order.model.lives import small_model
from tests.gpu_order.model.trace import Eval, Op
from tests.gpu_order.model.tracer import Tracer

ATTENTION = FIXES["attention registers the pool"]
EVERY_OP = 0
"""A command buffer for every dispatch: no two of them are ordered by luck."""


def engine(model_type: str, **options) -> Engine:
    layers = options.pop("layers", {})
    given = {"block_size": 2, "num_blocks": 40, "prefix_cache": False, "prewarm": False}
    return Engine(small_model(model_type, **layers), compile=True, **(given | options))


def freed_blocks(**options) -> Engine:
    """Requests come into the blocks of others whose last token is being computed."""
    made = engine(options.pop("model_type", "llama"), max_running=2, **options)
    made.generate([[1, 2, 3, 4, 5], [6, 7, 8, 9], [1, 2, 3]], max_tokens=4)
    return made


WINDOWS = {
    "num_hidden_layers": 4,
    "layer_types": ("full_attention", "sliding_attention") * 2,
    "sliding_window": 4,
}


def windows() -> Engine:
    return freed_blocks(layers=WINDOWS, num_blocks=12)


def latents() -> Engine:
    return freed_blocks(model_type="deepseek_v3")


def quantized() -> Engine:
    return freed_blocks(kv_bits=4)


def with_gpu_buckets() -> Engine:
    """Tables become twice as wide, and requests with the same first blocks have other graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buckets, "of_device", lambda _: Buckets(2, 2, False, False, 4))
        patch.setattr(shared_prefixes, "FEWEST_SHARED", 4)
        freed_blocks()
        made = engine("llama", max_running=2, prefix_cache=True)
        made.generate([[1, 2, 3, 4, 5, 6]], max_tokens=2)
        made.generate([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5], [7, 8, 9], [7]], max_tokens=8)
    graphs = made.runner.compiled._graphs
    assert {key[4] for key in graphs} >= {2, 4, 8} and {key[5] for key in graphs} == {0, 2}
    return made


SCRIPTS = [freed_blocks, windows, latents, quantized, with_gpu_buckets]


def judged(script: Callable[[], Engine], change: Change) -> tuple[Report, Counter[str]]:
    backend = Backend(max_ops=EVERY_OP)
    tracer = Tracer(lambda event: backend.encode(change(event)))
    with tracer.installed():
        assert script().runner.compiled is not None
    return backend.finish(), tracer.counts


@pytest.mark.sampled(2)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_compiled_steps_are_ordered(script):
    report, counts = judged(script, unregistered())
    assert not report.hazards
    assert counts["compiled steps"] > 5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_attention_that_does_not_register_the_pool_is_found(script):
    report, _ = judged(script, ATTENTION)
    assert {(h.kind, h.first.op.name, h.second.op.name) for h in report.hazards} == {
        ("WAR", "PagedAttention", "WriteKV")
    }


def pool_ops(is_compiled: bool, layers: dict[str, Any]) -> list[Op]:
    """The pool ops of each eval of an engine, in the order of their evaluation."""
    found: list[Op] = []

    def sink(event) -> None:
        if isinstance(event, Eval):
            found.extend(op for op in event.ops if op.name in ("PagedAttention", "WriteKV"))

    with Tracer(sink).installed():
        options = {"block_size": 2, "num_blocks": 40, "prewarm": False, "lookahead": False}
        made = Engine(small_model("llama", **layers), compile=is_compiled, **options)
        mx.synchronize()
        found.clear()
        made.generate([[1, 2, 3, 4, 5], [4, 5]], max_tokens=8)
    return found


def buffers_of_a_decode(is_compiled: bool, max_ops: int) -> Counter[str]:
    """Why the command buffers of an engine's last decode ended."""
    backend = Backend(max_ops=max_ops)
    with Tracer(backend.encode).installed():
        made = Engine(small_model("llama"), compile=is_compiled, num_blocks=8, prewarm=False)
        made.generate([[1, 2, 3]], max_tokens=5)
    return backend.finish().commits[-1]


@pytest.mark.parametrize("max_ops", [2, 7])
def test_a_compiled_decode_has_no_more_command_buffers_than_a_plain_one(max_ops):
    plain, compiled = (buffers_of_a_decode(flag, max_ops) for flag in (False, True))
    assert compiled == plain and plain["operations"] > 0


@pytest.mark.parametrize("layers", [{}, WINDOWS], ids=["full", "windows"])
def test_a_compiled_step_touches_what_the_plain_one_does_in_the_same_order(layers):
    touched = [
        [(op.name, [(a.is_write, a.units) for a in op.all_accesses() if a.units]) for op in ops]
        for ops in (pool_ops(flag, layers) for flag in (False, True))
    ]
    assert touched[0] == touched[1]
    assert len(touched[0]) > 20
