"""What folders of adapters have is computed as mlx-lm and PEFT define it, or refused by name."""

import json
import struct

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine, tensor_files
from mlx_paged.adapters.formats import read_adapter
from mlx_paged.runner.low_rank_places import places_of
from tests.support.models.adapters import greedy, parameters, random_arrays, write_adapter
from tests.support.models.architectures import build

PROMPT = [5, 9, 2, 41, 7]
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base():
    return build("llama")


def peft_of(arrays, scale_of=lambda path: 1.0):
    """PEFT's tensors of mlx-lm's factors; B is divided by a scale."""
    tensors = {}
    for name, value in arrays.items():
        path, _, factor = name.rpartition(".lora_")
        own = value.T if factor == "a" else value.T / scale_of(path)
        tensors[f"base_model.model.{path}.lora_{factor.upper()}.weight"] = mx.contiguous(own)
    return tensors


def write_peft(folder, tensors, **config):
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    known = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_dora": False}
    known |= {"target_modules": ["q_proj"], "modules_to_save": None, "lora_dropout": 0.1}
    (folder / "adapter_config.json").write_text(json.dumps(known | config))
    return folder


@pytest.mark.parametrize("root", [False, True])
def test_adapters_of_peft_have_their_scales(base, tmp_path, root):
    arrays = random_arrays(build("llama"), 1)
    other = "model.layers.1.mlp.up_proj"

    def scale_of(path):
        alpha = {Q: 3, other: 5}.get(path, 8)
        return alpha / (4**0.5 if root else 4)

    tensors = peft_of(arrays, lambda path: scale_of(path) / 4.0)  # mlx-lm multiplies by 4
    alphas = {"alpha_pattern": {"0.self_attn.q_proj": 3, other: 5}, "use_rslora": root}
    peft = read_adapter(write_peft(tmp_path / "p", tensors, **alphas), places_of(base)).factors
    mlx = read_adapter(write_adapter(tmp_path / "m", arrays), places_of(base)).factors
    assert peft.keys() == mlx.keys()
    for path in mlx:
        for ours, theirs in zip(peft[path], mlx[path], strict=True):
            assert np.allclose(np.array(ours), np.array(theirs), rtol=1e-5)


def test_a_model_within_another_one_has_the_same_layers(base, tmp_path):
    tensors = peft_of(random_arrays(build("llama"), 1))
    within = {
        name.replace(".model.model.", ".model.language_model.", 1): t for name, t in tensors.items()
    }
    found = read_adapter(write_peft(tmp_path / "p", within), places_of(base)).factors
    assert len(found) * 2 == len(tensors)


PEFT_REFUSALS = {
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "target_parameters": ["experts.w"],
    "trainable_token_indices": [1],
    "peft_type": "LOHA",
    "init_lora_weights": "pissa",
    "alpha_pattern": {"(a+)+$": 3},
    "rank_pattern": {"q_proj": 8},
    "r": 8,
    "lora_alpha": float("nan"),
    "use_rslora": "yes",
    "lora_bias": True,
    "a_new_field": 1,
}


LARGE = {
    "lora_alpha": 10**400,
    "alpha_pattern": {"q_proj": 10**400},
    "rank_pattern": {"q_proj": -(10**400)},
}


@pytest.mark.parametrize("name", LARGE)
def test_numbers_of_peft_that_no_float_can_be_are_refused(base, tmp_path, name):
    tensors = peft_of(random_arrays(build("llama"), 1))
    folder = write_peft(tmp_path / "p", tensors, **{name: LARGE[name]})
    with pytest.raises(ValueError, match=f"has {name}"):
        read_adapter(folder, places_of(base))


@pytest.mark.parametrize("name", PEFT_REFUSALS)
def test_fields_of_peft_that_cannot_be_followed_are_refused(base, tmp_path, name):
    tensors = peft_of(random_arrays(build("llama"), 1))
    folder = write_peft(tmp_path / "p", tensors, **{name: PEFT_REFUSALS[name]})
    expected = "factors of rank 4" if name in ("r", "rank_pattern") else name
    with pytest.raises(ValueError, match=expected):
        read_adapter(folder, places_of(base))


MLX_REFUSALS = {
    "fine_tune_type": {"fine_tune_type": "dora"},
    "--adapter-path": {"fine_tune_type": "full"},
    "lora_parameters": {"lora_parameters": None},
    "alpha": {"lora_parameters": parameters(alpha=3)},
    "has scale": {"lora_parameters": {"rank": 4}},
    "has scale nan": {"lora_parameters": parameters(scale=float("nan"))},
    "has scale inf": {"lora_parameters": parameters(scale=float("inf"))},
    "has scale 1000": {"lora_parameters": parameters(scale=10**400)},
    "NaN or infinity": {"lora_parameters": parameters(scale=1e300)},
    "has rank -4": {"lora_parameters": parameters(rank=-4)},
    "has rank 4.0": {"lora_parameters": parameters(rank=4.0)},
    "rank '4'": {"lora_parameters": parameters(rank="4")},
    "factors of rank 4: expected 5": {"lora_parameters": parameters(rank=5)},
}


@pytest.mark.parametrize("message", MLX_REFUSALS)
def test_fields_of_mlx_lm_that_cannot_be_followed_are_refused(base, tmp_path, message):
    folder = write_adapter(tmp_path / "m", random_arrays(build("llama"), 1))
    config = json.loads((folder / "adapter_config.json").read_text()) | MLX_REFUSALS[message]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_adapter(folder, places_of(base))


def nan_in(arrays):
    return arrays | {f"{Q}.lora_a": mx.full(arrays[f"{Q}.lora_a"].shape, float("nan"))}


def zeros_of(rank):
    return {f"{Q}.lora_a": mx.zeros((32, rank)), f"{Q}.lora_b": mx.zeros((rank, 32))}


TENSORS = {
    "belongs to no linear layer": lambda a: a | {f"{Q}x.lora_a": a[f"{Q}.lora_a"]},
    "embed_tokens": lambda a: a | {"model.embed_tokens.lora_a": mx.zeros((64, 4))},
    "q_proj.m belongs": lambda a: a | {f"{Q}.m": mx.zeros(32)},
    "one factor": lambda a: {f"{Q}.lora_a": a[f"{Q}.lora_a"]},
    "for another model": lambda a: a | {f"{Q}.lora_b": mx.zeros((4, 31))},
    "from 1 to 512": lambda a: a | zeros_of(513),
    "factors of shapes": lambda a: a | zeros_of(0),
    "NaN or infinity": nan_in,
    "no tensors": lambda a: {},
    "type 'I32'": lambda a: a | {f"{Q}.lora_a": mx.zeros((32, 4), mx.int32)},
}  # fmt: skip


@pytest.mark.parametrize("message", TENSORS)
def test_tensors_that_do_not_fit_are_refused(base, tmp_path, message):
    arrays = TENSORS[message](random_arrays(build("llama"), 1))
    folder = write_adapter(tmp_path / "m", arrays)
    with pytest.raises(ValueError, match=message):
        read_adapter(folder, places_of(base))


def header(**of):
    entry = {"dtype": "F32", "shape": [32, 4], "data_offsets": [0, 512]} | of
    return json.dumps({f"{Q}.lora_a": entry}).encode()


HEADERS = {
    "giant": struct.pack("<Q", 2**63) + b"{}",
    "beyond the file": struct.pack("<Q", 99) + b"{}",
    "long": struct.pack("<Q", 1 << 23) + b" " * (1 << 23),
    "empty": b"",
    "no JSON": struct.pack("<Q", 2) + b"{[",
    "deep": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "a list": struct.pack("<Q", 2) + b"[]",
    "a name": struct.pack("<Q", 7) + b'{"a":1}',
} | {
    name: struct.pack("<Q", len(text)) + text + bytes(512)
    for name, text in {
        "negative shape": header(shape=[-32, -4]),
        "huge shape": header(shape=[2**40, 2**40]),
        "NaN shape": header(shape=[float("nan"), 4]),
        "float shape": header(shape=[32.0, 4]),
        "true": header(shape=[True, 4]),
        "many dimensions": header(shape=[1] * 40 + [128]),
        "text": header(shape="32"),
        "past the end": header(data_offsets=[10**6, 10**6 + 512]),
        "backwards": header(data_offsets=[512, 0]),
        "one place": header(data_offsets=[0]),
        "unknown type": header(dtype=["F32"]),
        "metadata that are no object": b'{"__metadata__": 5, ' + header()[1:],
        "half a character": header().replace(b"lora_a", b"\\ud800"),
        "a dimension that MLX does not count": header(shape=[0, 2**40], data_offsets=[0, 0]),
    }.items()
}


@pytest.mark.parametrize("name", HEADERS)
def test_files_with_wrong_headers_are_refused(base, tmp_path, name):
    folder = write_adapter(tmp_path / "m", random_arrays(build("llama"), 1))
    (folder / "adapters.safetensors").write_bytes(HEADERS[name])
    with pytest.raises(ValueError, match="expected a safetensors file"):
        read_adapter(folder, places_of(base))


def test_a_product_of_long_numbers_is_not_computed(base, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "prod", lambda _: pytest.fail("it takes minutes"))
    folder = write_adapter(tmp_path / "m", random_arrays(build("llama"), 1))
    for shape in ([10**4000] * 50, [2**63], [1] * 65):
        text = header(shape=shape)
        content = struct.pack("<Q", len(text)) + text + bytes(512)
        (folder / "adapters.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="is no tensor: expected a safetensors file"):
            read_adapter(folder, places_of(base))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"a": NaN}', " " * 2**21])
def test_files_that_are_no_configuration_are_refused(base, tmp_path, text):
    folder = write_adapter(tmp_path / "m", random_arrays(build("llama"), 1))
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        read_adapter(folder, places_of(base))


def test_a_refused_adapter_names_itself_and_the_engine_goes_on(base, tmp_path):
    engine = Engine(build("llama"), num_blocks=16, adapters={})
    with pytest.raises(ValueError, match=r"adapter sql: .* has no adapter_config\.json"):
        engine.load_adapter("sql", tmp_path)
    with pytest.raises(ValueError, match="adapter is 'sql': expected one of none"):
        engine.generate([PROMPT], adapter="sql")
    with pytest.raises(ValueError, match="adapter is 'sql': expected None"):
        Engine(build("llama"), num_blocks=16).generate([PROMPT], adapter="sql")
    found = engine.generate([PROMPT], max_tokens=4)[0].tokens
    assert found == greedy(base, PROMPT, 4)
