"""The model's books of an encoder are those that encode.cpp fills in ``mlx_encoder/``."""

import itertools
import random
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged import _ext
from tests.gpu_order.encode_cpp import Encoded, EncoderScript
from tests.gpu_order.model.backend import Backend
from tests.gpu_order.model.trace import Binding, Eval, Op, Role
from tests.support.ops.paged_cases import random_case

CASE = random_case([45, 7])
POOLS = CASE.k_cache, CASE.v_cache
ROWS = (mx.zeros((3, POOLS[0].shape[0], POOLS[0].shape[3])),) * 2
CALLS = {
    "attention": (_ext.metal.plan_attention(*CASE.arrays, scale=1.0, **CASE.options), (1, 2)),
    "write": (_ext.metal.plan_write_kv(*ROWS, *POOLS, mx.arange(3)), (2, 3)),
    "copy": (_ext.metal.plan_copy_blocks(*POOLS, mx.array([[0, 1]])), (0, 1)),
}
"""Calls of each pool op, and which of their inputs are the pool's."""


class BothBooks:
    """Random pool ops of a few layers in several encoders."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._names = itertools.count(1000)
        self.script = EncoderScript()
        self.evals: list[Eval] = []
        for i in range(5):
            if i > 0:
                self.script.end()
            ops = [self._op() for _ in range(self._rng.randint(1, 6))]
            self.evals.append(Eval(tuple(ops), ""))

    def _op(self) -> Op:
        layer = self._rng.randint(1, 3)
        name = self._rng.choice((*CALLS, "read"))
        if name == "read":
            self.script.read(layer, 100)
            return Op(name, bindings=(Binding(layer, Role.POOL_READ, 100),))
        call, places = CALLS[name]
        pools = dict(zip(places, (layer, layer + 10), strict=True))
        self.script.op(call, pools)
        return Op(name, bindings=tuple(self._bindings(call, pools)))

    def _bindings(self, call: dict[str, Any], pools: dict[int, int]) -> list[Binding]:
        arrays = [pools.get(i) or next(self._names) for i in range(len(call["inputs"]))]
        (launch,) = call["launches"]
        bindings = []
        for _, role, which in launch["buffers"]:
            is_input = role in ("input", "pool_read")
            source = which if is_input else call["outputs"][which]
            if isinstance(source, int):
                binding = Binding(arrays[source], Role(role), call["inputs"][source].size)
            else:
                binding = Binding(next(self._names), Role(role), 1)
            bindings.append(binding)
        return bindings


def before(encoded: list[Encoded]) -> list[set[int]]:
    """For each encoder those that it waits for, directly or not."""
    found: list[set[int]] = []
    for encoder in encoded:
        direct = set(encoder.waits_for)
        found.append(direct.union(*(found[i] for i in direct)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_the_model_waits_and_counts_as_encode_cpp_makes_mlx_wait_and_count(seed, monkeypatch):
    both, backend, ended = BothBooks(seed), Backend(), []
    end = Backend._end_encoding

    def watched(self: Backend, queue: Any) -> None:
        ended.extend([queue.encoder] if queue.encoder else [])
        end(self, queue)

    monkeypatch.setattr(Backend, "_end_encoding", watched)
    for event in both.evals:
        backend.encode(event)
    encoded = both.script.run()
    assert [e.events.count("barrier") for e in encoded] == [e.epoch for e in ended]
    assert [e.counted for e in encoded] == [e.counted for e in ended]
    bits = [backend._ordering._before[e.index] for e in ended]
    assert before(encoded) == [{i for i in range(len(bits)) if mask >> i & 1} for mask in bits]
    assert any(before(encoded)) and any(e.epoch for e in ended)
