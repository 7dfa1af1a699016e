"""Heads are taken out of checkpoints. What is not as the configuration says is refused by name."""

import json
import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_paged.heads.__main__ import main
from mlx_paged.heads.mtp_files import extract, open_mtp
from tests.support.models.architectures import build
from tests.support.models.mtp_checkpoints import (
    HEADS,
    head_config,
    head_tensors,
    in_fp8,
    write_checkpoint,
    write_file,
)

WIDE = {"hidden_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
"""Sizes of which a group of 64 numbers can be quantized."""


def checkpoint(folder: Path, model_type: str, leave_out: str = "", **changes: object) -> Path:
    config = head_config(model_type, **changes)
    tensors = head_tensors(config)
    kept = {name: v for name, v in tensors.items() if not leave_out or leave_out not in name}
    assert (len(kept) < len(tensors)) == bool(leave_out)
    return write_checkpoint(folder / "checkpoint", config, kept)


def parameters(head: nn.Module) -> dict[str, mx.array]:
    found: dict[str, mx.array] = tree_flatten(head.parameters(), destination={})
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model_type", sorted(HEADS))
def test_a_file_has_the_numbers_of_the_checkpoint(model_type, tmp_path):
    folder = checkpoint(tmp_path, model_type)
    extract(folder, tmp_path / "out.safetensors")
    written = parameters(open_mtp(tmp_path / "out.safetensors"))
    read = parameters(open_mtp(folder))
    assert written.keys() == read.keys()
    assert all(mx.array_equal(written[name], read[name]) for name in read)
    assert {array.dtype for array in written.values()} == {mx.bfloat16}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.safetensors"]


def test_norms_that_are_stored_less_1_get_it_back(tmp_path):
    config = head_config("qwen3_next")
    tensors = head_tensors(config)
    found = parameters(open_mtp(write_checkpoint(tmp_path, config, tensors)))
    expected = {
        "embedding_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "norm": "mtp.norm",
    }
    inner = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    expected |= {f"layers.0.{name}": f"mtp.layers.0.{name}" for name in inner}
    for own, name in expected.items():
        weight = np.array(found[f"{own}.weight"].astype(mx.float32))
        assert (weight == tensors[f"{name}.weight"] + 1).all(), name
    fc = np.array(found["projection.weight"].astype(mx.float32))
    assert (fc == tensors["mtp.fc.weight"]).all()


def test_only_files_that_hold_the_head_are_read(tmp_path):
    """The other file is no safetensors file."""
    folder = checkpoint(tmp_path, "deepseek_v3")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.self_attn.o_proj.weight"] = "other.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "other.safetensors").write_bytes(b"nothing")
    assert open_mtp(folder).model_type == "deepseek_v3"


def test_a_checkpoint_in_one_file_has_no_index(tmp_path):
    config = head_config("mimo")
    folder = write_checkpoint(tmp_path, config, head_tensors(config), shards=1)
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]
    assert open_mtp(folder).model_type == "mimo"


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_next"])
def test_blocks_of_fp8_are_dequantized(model_type, tmp_path):
    config = head_config(model_type)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [12, 20]}
    tensors = head_tensors(config)
    is_fp8 = re.compile(r"(experts\.\d+|shared_experts?)\.\w+_proj|(o|q_a|k)_proj|mtp\.fc|eh_proj")
    packed = {
        name: in_fp8(tensors.pop(name), (12, 20)) for name in [*filter(is_fp8.search, tensors)]
    }
    assert len(packed) > 15
    stored = {name: (values, scales) for name, (values, scales, _) in packed.items()}
    found = parameters(open_mtp(write_checkpoint(tmp_path, config, tensors, as_fp8=stored)))
    plain = write_checkpoint(
        tmp_path / "plain", config, tensors | {name: meant for name, (*_, meant) in packed.items()}
    )
    expected = parameters(open_mtp(plain))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == mx.bfloat16 and mx.array_equal(array, expected[name]), name


@pytest.mark.parametrize("bits", [4, 8])
def test_matrices_are_quantized_but_no_router(bits, tmp_path):
    folder = checkpoint(tmp_path, "qwen3_next", **WIDE)
    file = tmp_path / "out.safetensors"
    extract(folder, file, bits)
    read, whole = open_mtp(file), parameters(open_mtp(folder))
    found = parameters(read)
    quantized = {name.removesuffix(".scales") for name in found if name.endswith(".scales")}
    assert "layers.0.mlp.switch_mlp.up_proj" in quantized and "projection" in quantized
    assert not {"layers.0.mlp.gate", "layers.0.mlp.shared_expert_gate"} & quantized
    for name, array in whole.items():
        module = name.removesuffix(".weight")
        if module in quantized:
            expected = mx.quantize(array, 64, bits)
            parts = ("weight", "scales", "biases")
            assert all(
                mx.array_equal(found[f"{module}.{part}"], array)
                for part, array in zip(parts, expected, strict=True)
            )
        else:
            assert array.ndim == 1 or "gate" in module or array.shape[-1] % 64
            assert mx.array_equal(found[name], array)
    assert file.stat().st_size < sum(array.nbytes for array in whole.values()) * (bits + 2) / 16
    read.bind(build("qwen3_next", **HEADS["qwen3_next"] | WIDE))
    tokens = mx.array([[1, 2, 3]])
    hidden = read(mx.ones((1, 3, 64)), read.embed(tokens), read.make_cache())
    assert mx.isfinite(read.logits(hidden)).all()


@pytest.mark.parametrize("are_equal", [True, False])
def test_copies_of_the_models_embeddings_are_not_written(are_equal, tmp_path):
    config = head_config("glm4_moe")
    tensors = head_tensors(config, own=True)
    tensors["model.embed_tokens.weight"] = tensors["model.layers.2.embed_tokens.weight"]
    tensors["lm_head.weight"] = tensors["model.layers.2.shared_head.head.weight"] + (not are_equal)
    head = open_mtp(write_checkpoint(tmp_path, config, tensors))
    assert ("embed_tokens" in head, "output" in head) == (False, not are_equal)


def test_a_folder_with_an_extracted_head_has_that_head(tmp_path):
    extract(checkpoint(tmp_path, "mimo"), tmp_path / "head.safetensors")
    assert open_mtp(tmp_path).model_type == "mimo"


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        open_mtp(folder)
    return str(caught.value)


MISSING = {
    "mtp.fc": ("qwen3_next", "mtp.fc.weight is missing"),
    "mtp.layers.0.mlp.experts.3.up": (
        "qwen3_next",
        "mtp.layers.0.mlp.experts.3.up_proj.weight is missing",
    ),
    "experts.gate_up_proj": (
        "qwen3_5_moe",
        "mtp.layers.0.mlp.experts.*.down_proj.weight is missing",
    ),
    "experts.down_proj": ("qwen3_5_moe", "mtp.layers.0.mlp.experts.down_proj is missing"),
    "layers.2.eh_proj": ("deepseek_v3", "model.layers.2.eh_proj.weight is missing"),
    "e_score": ("glm_moe_dsa", "model.layers.2.mlp.gate.e_score_correction_bias is missing"),
    "kv_b_proj": ("deepseek_v32", "model.layers.2.self_attn.kv_b_proj.weight is missing"),
    "final_layernorm": ("mimo", "model.mtp_layers.0.final_layernorm.weight is missing"),
    "emb_norm": ("ernie4_5_moe", "model.mtp_emb_norm.0.weight is missing"),
}


@pytest.mark.parametrize("left_out", MISSING)
def test_a_missing_tensor_is_named(left_out, tmp_path):
    model_type, message = MISSING[left_out]
    folder = checkpoint(tmp_path, model_type, leave_out=left_out)
    assert refusal(folder) == f"{folder}: {message}"


def test_tensors_that_are_not_as_the_configuration_says_are_named(tmp_path):
    config = head_config("glm4_moe")
    tensors, n = head_tensors(config, own=True), "model.layers.2"
    kinds = {
        f"{n}.mlp.experts.1.up_proj.weight": "has shape (5, 32): expected (16, 32)",
        f"{n}.embed_tokens.weight": "has shape (5, 32): expected (64, 32)",
        f"{n}.shared_head.head.weight": "has shape (5, 32): expected (64, 32)",
        f"{n}.self_attn.q_proj.scales": "is no part of the head",
        f"{n}.mlp.experts.4.up_proj.weight": "is no part of the head",
    }
    for number, (name, message) in enumerate(kinds.items()):
        wrong = tensors | {name: np.ones((5, 32))}
        folder = write_checkpoint(tmp_path / str(number), config, wrong)
        assert refusal(folder) == f"{folder}: {name} {message}"


def test_other_types_of_numbers_are_named(tmp_path):
    config = head_config("mimo")
    folder = write_checkpoint(tmp_path, config, head_tensors(config), shards=1)
    name = "model.mtp_layers.0.input_proj.weight"
    tensors = {n: ("BF16", v.astype(np.uint16)) for n, v in head_tensors(config).items()}
    for kind, values in {"I16": np.int16, "F8_E4M3": np.uint8}.items():
        tensors[name] = (kind, np.ones((32, 64), values))
        write_file(folder / "model.safetensors", tensors)
        assert f"{name} is of {kind}" in refusal(folder)
    tensors[f"{name}_scale_inv"] = ("F32", np.ones((2, 1), np.float32))
    write_file(folder / "model.safetensors", tensors)
    assert f"{name}_scale_inv has shape (2, 1): expected (1, 1)" in refusal(folder)


def test_checkpoints_without_a_head_that_can_be_read_are_named(tmp_path):
    config = head_config("qwen3_next")
    tensors = head_tensors(config)
    base = {"model.embed_tokens.weight": np.ones((64, 32))}
    folder = write_checkpoint(tmp_path / "none", config, base)
    assert refusal(folder) == (
        f"{folder}: it has no head: expected tensors mtp.fc.* and mtp.layers.0.*"
    )
    conv = {"model.layers.0.linear_attn.conv1d.weight": np.ones((64, 1, 4))}
    assert open_mtp(write_checkpoint(tmp_path / "raw", config, tensors | conv))
    conv = {name: values.swapaxes(1, 2) for name, values in conv.items()}
    folder = write_checkpoint(tmp_path / "converted", config, tensors | conv)
    assert "it is converted for mlx-lm" in refusal(folder)
    folder = write_checkpoint(tmp_path / "llama", config | {"model_type": "llama"}, tensors)
    assert refusal(folder).startswith("heads of llama are not read: expected one of deepseek_v3, ")
    folder = write_checkpoint(tmp_path / "v41", config | {"model_type": "deepseek_v41"}, tensors)
    assert "deepseek_v41 are not read: no engine can page the caches" in refusal(folder)
    folder = write_checkpoint(tmp_path / "sizes", config | {"hidden_size": "32"}, tensors)
    assert "the configuration is none of qwen3_next (" in refusal(folder)
    del config["num_hidden_layers"]
    folder = write_checkpoint(tmp_path / "count", config, tensors)
    assert refusal(folder) == f"{folder}: config.json has no num_hidden_layers"


def test_hostile_folders_are_refused(tmp_path):
    folder = checkpoint(tmp_path, "mimo")
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = "model.mtp_layers.0.input_proj.weight"
    place = index["weight_map"][name]
    (tmp_path / "outside.safetensors").write_bytes((folder / place).read_bytes())
    for wrong in ("../outside.safetensors", "nowhere.safetensors", 3):
        file.write_text(json.dumps({"weight_map": index["weight_map"] | {name: wrong}}))
        assert f"names {wrong}, which is no file of it" in refusal(folder)
    for text in ("[]", "{", "[" * 100_000, '{"weight_map": []}'):
        file.write_text(text)
        assert "is no JSON object" in refusal(folder)
    others = {f for f in index["weight_map"].values() if f != place}
    file.write_text(json.dumps({"weight_map": index["weight_map"] | {name: min(others)}}))
    assert f"has no {name}, which the index names" in refusal(folder)
    file.write_text(json.dumps(index))
    (folder / place).write_bytes((folder / place).read_bytes()[:-1])
    assert f"{place} has " in refusal(folder)
    (folder / place).write_bytes(b"\xff" * 100)
    assert refusal(folder) == f"{folder}: {place} is no file of safetensors"
    (folder / "config.json").unlink()
    assert refusal(folder) == f"{folder}: it has no config.json"


def test_a_head_of_another_model_is_refused_by_name(tmp_path):
    head = open_mtp(checkpoint(tmp_path, "glm4_moe"))
    head.bind(build("glm4_moe", **HEADS["glm4_moe"]))
    for model_type, changes, message in (
        ("mimo", {}, "the head is of a glm4_moe: the model is a mimo"),
        ("glm4_moe", {"vocab_size": 80}, "the head has vocab_size 64: the model has 80"),
        ("glm4_moe", {"hidden_size": 64}, "the head has hidden_size 32: the model has 64"),
        ("glm4_moe", {"num_hidden_layers": 3}, "has num_hidden_layers 2: the model has 3"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            head.bind(build(model_type, **changes))


def test_files_that_are_no_extracted_heads_are_refused(tmp_path):
    file = tmp_path / "out.safetensors"
    assert refusal(file) == f"{file}: no such file or directory"
    head = extract(checkpoint(tmp_path, "mimo"), file)
    weights, about = (
        parameters(head),
        json.loads(mx.load(str(file), return_metadata=True)[1]["mlx_paged.mtp"]),
    )
    for field, value, message in (
        ("bits", 3, "it has bits 3: expected 4 or 8"),
        ("config", 3, "it is no file of `mlx_paged head extract`"),
        ("model_type", "llama", "heads of llama are not read"),
        ("config", {}, "the configuration is none of mimo"),
    ):
        metadata = {"mlx_paged.mtp": json.dumps(about | {field: value})}
        mx.save_safetensors(str(file), weights, metadata)
        assert message in refusal(file)
    weights["projection.weight"] = mx.ones((3, 3))
    mx.save_safetensors(str(file), weights, {"mlx_paged.mtp": json.dumps(about)})
    assert "projection.weight has shape (3, 3): expected (32, 64)" in refusal(file)
    mx.save_safetensors(str(file), weights)
    assert "it is no file of `mlx_paged head extract`" in refusal(file)


def test_the_command_writes_a_head(tmp_path, capsys):
    folder, out = checkpoint(tmp_path, "deepseek_v32", **WIDE), tmp_path / "head.safetensors"
    assert main(["extract", str(folder), str(out), "--bits", "4"]) == 0
    assert capsys.readouterr().out == f"{out}: the head of a deepseek_v32, 0.000 GB\n"
    assert "projection.scales" in parameters(open_mtp(out))


def test_mistakes_are_one_line(tmp_path, capsys):
    folder = checkpoint(tmp_path, "mimo", leave_out="input_proj")
    for arguments, message in {
        (str(folder), str(tmp_path / "x.safetensors")): "input_proj.weight is missing",
        (str(folder), str(tmp_path / "x")): "x: expected a name that ends with .safetensors",
        (str(folder), "/nowhere/x.safetensors"): "/nowhere: no such directory",
        ("nowhere", "x.safetensors"): "nowhere: no such directory",
        (str(folder), "x.safetensors", "--bits", "3"): "argument --bits: invalid choice: 3",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(["extract", *arguments])
        told = capsys.readouterr().err
        assert ended.value.code == 2 and told.count("\n") == 1 and message in told
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
