"""scripts.experts: what its limits count, and the model that llama.cpp gets."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from scripts import experts

SMALL = experts.CONFIG | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 96,
}
EXPERT = 3 * 64 * 32
DENSE = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 8 * 64) + 96 * 64
NORMS = 2 * (2 * 64 + 2 * 32) + 64


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(experts, "CONFIG", SMALL)


def test_bytes_are_of_chosen_experts_and_operations_of_each_tokens():
    num_bytes, operations = experts.costs(experts.build(SMALL, "float32"), 4, 1, distinct=5)
    assert num_bytes == 4 * (DENSE + NORMS + 2 * 5 * EXPERT)
    products = 4 * (DENSE - 96 * 64 + 2 * 2 * EXPERT) + 96 * 64
    assert operations == pytest.approx(2 * (products + 4 * NORMS), rel=1e-9)


def test_chosen_experts_are_counted_in_steps_of_an_engine():
    model = experts.build(SMALL, "float32")
    assert experts.distinct_experts(model, 1, prompt=0) == 2
    assert 2 < experts.distinct_experts(model, 4, prompt=0) <= 8
    assert experts.distinct_experts(model, 1, prompt=64) > 7


def test_a_format_is_measured_beside_another_engine(small, capsys):
    words = ["--rows", "1", "--prompt", "20", "--steps", "1", "--rounds", "1", "--layers", "2"]
    experts.main(words)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["rows"], row["prompt"]) for row in found["results"]] == [(1, 0), (1, 20)]
    assert [row["experts"] > 2 for row in found["results"]] == [False, True]
    assert all(row["mlx_paged ms"] > 0 and row["mlx_lm ms"] > 0 for row in found["results"])


def test_llama_cpp_gets_the_same_numbers_in_4_bits(tmp_path):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    from bench.serving.gguf_file import write_gguf

    model = experts.build(SMALL, "4bit")
    write_gguf(model, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.get_field("qwen3moe.expert_count").contents() == 8
    assert reader.get_field("qwen3moe.expert_used_count").contents() == 2
    assert reader.get_field("qwen3moe.expert_feed_forward_length").contents() == 32
    written = {each.name: each for each in reader.tensors}
    assert len(written) == sum(
        name.endswith("weight") for name, _ in tree_flatten(model.parameters())
    )
    down = model.layers[1].mlp.switch_mlp.down_proj
    for name, layer in (
        ("blk.1.ffn_down_exps.weight", down),
        ("token_embd.weight", model.model.embed_tokens),
    ):
        tensor = written[name]
        assert tensor.tensor_type == gguf.GGMLQuantizationType.Q4_0
        numbers = (each.astype(mx.float32) for each in (layer.scales, layer.biases))
        expected = np.array(mx.dequantize(layer.weight, *numbers, group_size=32, bits=4))
        assert np.array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), expected)
    router = written["blk.0.ffn_gate_inp.weight"]
    assert np.array_equal(router.data, np.array(model.layers[0].mlp.gate.weight.astype(mx.float32)))
    for name, text in (("scales", "groups of 32"), ("biases", "biases of -8 scales")):
        setattr(down, name, down.scales[..., :0] if name == "scales" else down.scales)
        with pytest.raises(ValueError, match=text):
            write_gguf(model, tmp_path / "other.gguf")
        down.scales = model.layers[0].mlp.switch_mlp.down_proj.scales


def test_experts_that_llama_cpp_would_weigh_otherwise_are_refused(tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed")
    from bench.serving.gguf_file import write_gguf

    model = experts.build(SMALL | {"norm_topk_prob": False}, "float32")
    with pytest.raises(ValueError, match="expected experts in all layers, whose weights add up"):
        write_gguf(model, tmp_path / "model.gguf")
