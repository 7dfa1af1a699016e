"""How mlx-lm's `shard` methods divide layers is known, or known to be unknown."""

from importlib import import_module
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.nn.layers.distributed import shard_linear

from mlx_paged.runner.layer_cuts import INPUTS, OUTPUTS, Cut, cuts_of, noting_cuts
from mlx_paged.runner.low_rank_places import Place, places_of
from mlx_paged.runner.ranks import why_whole
from tests.support.models.architectures import ARCHITECTURES, NOT_ON_A_CPU, build

NOT_DIVISIBLE = {"prism_hadamard_qwen35"}
"""mlx-lm's `shard` fails: MLX has no divided layer with these parameters."""


def divisible() -> list[str]:
    """Architectures of which two processes can each have a part."""
    names = ARCHITECTURES.keys() - NOT_ON_A_CPU.keys() - NOT_DIVISIBLE
    return [name for name in sorted(names) if why_whole(build(name), 2) is None]


def weights_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {
        path: np.array(module["weight"].astype(mx.float32))
        for path, module in model.named_modules()
        if isinstance(module.get("weight"), mx.array)
    }


def divided(model: nn.Module, number: int, count: int = 2) -> nn.Module:
    """The model as one of the processes has it."""
    group = SimpleNamespace(rank=lambda: number, size=lambda: count)
    with noting_cuts(model, group):
        model.shard(group)
    return model


def test_every_layer_of_every_architecture_has_the_columns_that_its_cut_says():
    """Or is whole. Each architecture has layers of both kinds."""
    names = divisible()
    assert len(names) > 20 and {"llama", "kimi_k3", "qwen3_5", "gpt_oss"} <= set(names)
    for name in names:
        whole = weights_of(build(name))
        for number in (0, 1):
            model = divided(build(name), number)
            cuts, places = cuts_of(model), places_of(model)
            assert cuts.own == number
            assert {cut.axis for cut in cuts.by_path.values()} == {INPUTS, OUTPUTS}, name
            for path, part in weights_of(model).items():
                cut, before = cuts.by_path.get(path), whole.get(path)
                if path in cuts.unknown:
                    assert path not in places
                    continue
                if cut is not None:
                    before = np.take(before, columns(cut, before.shape[cut.axis], number), cut.axis)
                assert (before == part).all(), (name, path)
            for path, place in places.items():
                *_, outputs, inputs = whole[path].shape
                assert (place.inputs, place.outputs) == (inputs, outputs), (name, path)
                assert place.cut == cuts.by_path.get(path)


def columns(cut: Cut, size: int, number: int) -> list[int]:
    return [i for start, stop in cut.ranges(size, number) for i in range(start, stop)]


def linear_cuts_of(model: nn.Module) -> dict[str, Cut]:
    return {path.split(".", 3)[-1]: cut for path, cut in cuts_of(model).by_path.items()}


def test_segments_of_fused_layers_are_cut_each():
    kimi, qwen = (linear_cuts_of(divided(build(n), 1)) for n in ("kimi_k3", "qwen3_5"))
    fused = next(cut for path, cut in kimi.items() if path.endswith("qkv_proj"))
    assert fused == Cut(OUTPUTS, 3, 2)
    assert columns(fused, 12, 1) == [2, 3, 6, 7, 10, 11]
    fused = next(cut for path, cut in qwen.items() if path.endswith("in_proj_qkv"))
    assert fused == Cut(OUTPUTS, [16, 32], 2)
    assert columns(fused, 64, 0) == [*range(8), *range(16, 24), *range(32, 48)]
    assert columns(Cut(OUTPUTS, [0.5], 2), 8, 1) == [2, 3, 6, 7]


def test_layers_that_a_model_changes_before_it_divides_them_are_unknown():
    """Heads of K and V, which mlx-lm repeats for more ranks than heads."""
    model = divided(build("qwen3_5", num_key_value_heads=1), 1)
    unknown = {path.rpartition(".")[2] for path in cuts_of(model).unknown}
    assert unknown == {"k_proj", "v_proj", "conv1d"}
    assert not any(path.endswith(("k_proj", "v_proj")) for path in places_of(model))


def test_a_part_of_a_quantized_layer_is_of_the_whole_layer():
    model = build("llama", hidden_size=128, intermediate_size=256, head_dim=32)
    nn.quantize(model, 32, 4)
    places = places_of(divided(model, 1))
    own = {path.rpartition(".")[2]: (p.inputs, p.outputs) for path, p in places.items()}
    assert own["gate_proj"] == (128, 256) and own["down_proj"] == (256, 128)
    down = next(p for path, p in places.items() if path.endswith("down_proj"))
    assert down.shapes(4) == ((4, 256), (4, 128))
    assert down.own_shapes(4) == ((4, 128), (4, 128))


def test_the_functions_of_the_model_are_restored_and_whole_models_have_no_cuts():
    llama = build("llama")
    home = import_module(type(llama).__module__)
    divided(llama, 0)
    assert home.shard_linear is shard_linear
    with pytest.raises(ValueError, match="planted"), noting_cuts(build("llama"), None):
        assert home.shard_linear is not shard_linear
        raise ValueError("planted")
    assert home.shard_linear is shard_linear
    assert cuts_of(build("llama")).by_path == {}
    assert all(place.cut is None for place in places_of(build("llama")).values())


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_parts_of_factors_are_the_columns_of_the_parts(dtype):
    a, b = (mx.random.normal((3, size)).astype(dtype) for size in (8, 12))
    for axis in (INPUTS, OUTPUTS):
        for number in (0, 1):
            cut = Cut(axis, 2, 2)
            place = Place("layer", 8, 12, dtype, cut=cut)
            own_a, own_b = place.pair_of(place.part((a, b), number), 3)
            assert (own_a.shape, own_b.shape) == place.own_shapes(3)
            own = mx.array(columns(cut, 8 if axis == INPUTS else 12, number))
            if axis == INPUTS:
                assert mx.array_equal(own_a, a[:, own]) and mx.array_equal(own_b, b)
            else:
                assert mx.array_equal(own_b, b[:, own]) and mx.array_equal(own_a, a)
