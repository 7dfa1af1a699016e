"""What engines can reach of the Metal kernels breaks no rule of Apple's compiler."""

from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_paged import _ext
from scripts.metal.check import check_reachable, joined
from scripts.metal.reachable import architectures, calls_of, in_dtype
from scripts.metal.sources import launches
from tests.metal_emulator import require_emulator
from tests.metal_emulator.apple_rules import check_call
from tests.support.ops.paged_cases import OPTIONS, random_case

MOST_PIPELINES = 41
"""Tenths of a second each: an engine's start takes seconds. Of a model with two kinds of layers:
decode kernels of four and of eight simdgroups, and every number of rows that may share keys."""


@pytest.mark.sampled(2)
def test_every_architecture():
    """In one dtype; scripts/metal/check.py takes all."""
    require_emulator()
    findings, size = check_reachable([mx.float16], [16])
    assert findings == []
    print(size)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("context", [5, 500], ids=["whole", "split"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_attention(option, context):
    require_emulator()
    case = random_case([context], num_tokens=2, options=[option])
    assert check_call(_ext.metal.plan_attention(*case.arrays, scale=1.0, **case.options)) == []


def test_sources_that_are_checked_together_are_all_there():
    sources = {launch["kernel"]: launch["source"] for launch in launches()}
    texts = dict(joined(sources))
    assert len(texts) < len(sources)
    for kernel, source in sources.items():
        instantiation = source.rstrip("\n").rpartition("\n")[2]
        assert f'"{kernel}"' in instantiation
        assert sum(instantiation in text for text in texts.values()) == 1


@pytest.mark.slow
def test_an_engine_compiles_few_pipelines_at_its_start():
    """With the heads of the tiny models, and with heads 8 and 16 times as wide."""
    most = 0
    for served in architectures():
        plan = served.pool_plan(block_size=16)
        for factor in (1, 8, 16):
            kinds = []
            for kind in served.profile.attentions:
                head_dims = kind.shape.head_dim * factor, kind.shape.v_head_dim * factor
                shape = replace(kind.shape, head_dim=head_dims[0], v_head_dim=head_dims[1])
                kinds.append(in_dtype(replace(kind, shape=shape), mx.float16))
            calls = calls_of(kinds, 16, plan if factor == 1 else None)
            pipelines = {launch["pipeline"] for call in calls for launch in call["launches"]}
            assert len(pipelines) <= MOST_PIPELINES, served.name
            most = max(most, len(pipelines))
    assert most > 0
