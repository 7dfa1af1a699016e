"""Another process has its parts of all factors that rank 0 has put into its stacks."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_paged.adapters.store import AdapterStore
from mlx_paged.kv.allocator import BlockAllocator
from mlx_paged.request import Request
from mlx_paged.runner.batch import Batch, Layout
from mlx_paged.runner.low_rank_layers import AdaptedLayers, LowRankTerms
from mlx_paged.runner.low_rank_places import places_of
from mlx_paged.runner.low_rank_stacks import RankStacks
from mlx_paged.runner.placed_terms import BatchTerms, Mirror
from mlx_paged.runner.plan import MirroredAllocator, PlanReader, PlanWriter
from mlx_paged.runner.row_terms import using
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.step import Span, Step
from tests.runner.test_layer_cuts import divided
from tests.support.models.adapters import random_arrays
from tests.support.models.architectures import build

RANKS = 3, 12, 8, 4, 20


def arrays_of(name, seed):
    return random_arrays(build(name), seed, rank=RANKS[seed % len(RANKS)])


def assert_mirrored(store, mirror, wanted, part):
    """Each wanted adapter's factors are the part's columns of what the store has, or zeros."""
    found = mirror._placed(wanted)
    for number, adapter in wanted.items():
        stacks, slot = found[number]
        own = store._stacks[adapter.size_class]
        assert (slot, stacks.num_slots) == (own.slots[number], own.num_slots)
        assert len(set(stacks.slots.values())) == len(stacks.slots)
        for path, pair in stacks.pairs.items():
            if path not in adapter.factors:
                assert all(mx.all(each[slot] == 0).item() for each in pair)
                continue
            place, whole = store.places[path], adapter.factors[path]
            columns = whole[0].shape[-2]
            expected = place.pair_of(place.part(whole, part), columns)
            for each, other in zip(pair, expected, strict=True):
                assert mx.array_equal(each[slot][..., :columns, :], other), path
                assert mx.all(each[slot][..., columns:, :] == 0).item()


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "kimi_k3"])
def test_a_mirror_has_its_part_of_what_rank_0_has(name, is_small):
    """For adapters that come, go and change, within a budget for all or for few of them."""
    model = divided(build(name), 0)
    largest = sum(place.num_bytes(32) for place in places_of(model).values())
    store = AdapterStore(model, largest if is_small else 100 * largest)
    mirror, rng = Mirror(divided(build(name), 1)), np.random.default_rng(0)
    for seed in range(len(RANKS)):
        store.load_arrays(f"a{seed}", arrays_of(name, seed), 2.0)
    for round in range(20):
        names = rng.choice(sorted(store.named), 2, replace=False)
        wanted = {store.named[n].number: store.named[n] for n in names}
        missing = store.read_missing(wanted)
        for put in store.put_missing(missing, wanted):
            mirror.terms._latest = object()  # of stacks as they were
            mirror.put(put.content(store.places, 1))
            assert mirror.terms._latest is None
        assert_mirrored(store, mirror, wanted, 1)
        if round % 5 == 4:
            changed = str(names[0])
            store.load_arrays(changed, arrays_of(name, int(changed[1:]) + 5), 2.0)
    assert (store.loads > 2 * len(RANKS)) == is_small
    assert len(mirror._stacks) <= len({8, 16, 32})


class Numbered:
    name, key = "one", b"16 bytes of a key"

    def __init__(self, number):
        self.number = number


def test_a_plan_has_the_variants_of_spans_and_forks():
    allocator = BlockAllocator(16, 4)
    writer, reader = PlanWriter(allocator), PlanReader(MirroredAllocator(allocator))
    made = [
        Request(i, [1, 2, 3], SamplingParams(), 0, variant=variant)
        for i, variant in enumerate([None, Numbered(7), Numbered(7)])
    ]
    for request in made[:2]:
        allocator.admit(request.id, 3)
    spans = [
        Span.of(request, 0, 3, True, allocator.advance(request.id, 0, 3), forks)
        for request, forks in ((made[0], ()), (made[1], (made[2],)))
    ]
    step, _ = reader.read(writer.write(Step(spans), False))
    plain, varied = step.spans
    assert plain.request.variant is None
    assert varied.request.variant.number == varied.forks[0].variant.number == 7


def test_a_chunk_does_not_get_the_terms_of_as_many_rows():
    """A layer may compute one token of a chunk at a time; of rows it computes all."""
    allocator = BlockAllocator(16, 4)
    request = Request(0, [1] * 6, SamplingParams(), 0, variant=Numbered(7))
    allocator.admit(0, 3)
    allocator.make_writable(0, 3, 6)
    stacks = RankStacks(8, {}, 1)
    stacks.pairs["layer"] = mx.ones((1, 8, 3)), mx.ones((1, 8, 3))
    terms = BatchTerms(lambda wanted: {7: (stacks, 0)})
    spans = [Span(request, 2, 6, samples=1)]
    of_rows = terms(Batch(spans, allocator))
    assert terms(Batch(spans, allocator)) is of_rows
    of_chunk = terms(Batch(spans, allocator, Layout.CHUNK))
    assert of_chunk.added("layer", mx.ones((1, 3)), mx.ones((1, 3))).tolist() == [[25.0] * 3]


def test_a_mirror_that_was_told_nothing_computes_nothing():
    with pytest.raises(AssertionError, match="has not sent"):
        Mirror(divided(build("llama"), 1))._placed({3: Numbered(3)})


def test_an_adapter_of_layers_that_are_divided_in_an_unknown_way_is_refused_by_name():
    sizes = {"num_key_value_heads": 1}  # which mlx-lm repeats
    store = AdapterStore(divided(build("qwen3_5", **sizes), 0), 10**9)
    arrays = random_arrays(build("qwen3_5", **sizes), 0)
    with pytest.raises(ValueError, match=r"self_attn\.k_proj\.lora_a belongs to no linear layer"):
        store.load_arrays("one", arrays, 2.0)
    arrays = {name: each for name, each in arrays.items() if ".mlp." in name}
    assert store.load_arrays("one", arrays, 2.0).num_bytes > 0


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("mode", ["", "affine", "mxfp4"])
def test_a_layer_that_sums_computes_without_terms_what_mlx_computes(mode, has_bias):
    """Between its product and its sum a layer has room for terms only if this package makes both,
    as MLX makes them."""
    mx.random.seed(3)
    layer = nn.Linear(64, 32, bias=has_bias)
    if mode:
        sizes = {"group_size": 32, "bits": 4, "mode": mode}
        layer = nn.QuantizedLinear.from_linear(layer, **sizes)
        summed = nn.QuantizedShardedToAllLinear.from_quantized_linear(layer)
    else:
        summed = nn.ShardedToAllLinear.from_linear(layer)
    x, model = mx.random.normal((3, 64)), nn.Module()
    model.layers = [summed]
    expected = summed(x)
    AdaptedLayers.of(model)
    assert type(summed).__call__ is not type(summed).__base__.__call__
    with using(LowRankTerms([])):
        found = summed(x)
    assert mx.array_equal(found, expected)
