"""Heads in the published layouts of EAGLE-3 are read right, and what cannot be right is refused."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine, SamplingParams
from mlx_paged.heads.__main__ import main
from mlx_paged.heads.opening import open_head
from tests.support.models.eagle3_files import Eagle3Reference, target_states, write_head
from tests.support.models.tiny_models import VOCAB, tiny_model
from tests.support.simulation.injected_drafts import take_every_guess

LAYOUTS = {
    "EAGLE's own": {},
    "speculators'": {"is_speculators": True},
    "a normed residual": {"norm_before_residual": True},
    "norms before fc": {"is_speculators": True, "norm_before_fc": True},
    "a norm for each state": {"fc_norm": True, "norm_output": True},
    "embeddings and a width of its own": {"has_embeddings": True, "width": 48},
    "all tokens": {"drafted": None},
    "four states": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3], "num_states": 4},
    "a layer of qwen3": {"layer": {"model_type": "qwen3"}, "is_speculators": True},
}
TARGETS = ("llama", "qwen3")


def written(folder: Path, target, options):
    """A head of a tiny model, its reference, and the states that it reads."""
    defaults = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    config = defaults | {k: v for k, v in options.items() if k not in SIZES}
    sizes = {k: v for k, v in options.items() if k in SIZES}
    tensors = write_head(
        folder, target_width=target.args.hidden_size, vocab_size=VOCAB, **sizes, **config
    )
    return Eagle3Reference(tensors, **config), tuple(config["eagle_aux_hidden_state_layer_ids"])


SIZES = ("is_speculators", "has_embeddings", "width", "drafted", "num_states", "layer")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", TARGETS)
def test_its_guesses_are_those_of_a_plain_reference(tmp_path, model_type, layout):
    target = tiny_model(model_type)
    reference, ids = written(tmp_path, target, LAYOUTS[layout])
    assert compared(tmp_path, target, reference, ids) > 12


def compared(folder: Path, target, reference: Eagle3Reference, ids: tuple[int, ...]) -> int:
    """Guesses of the head that were compared with the reference, while the engine draws tokens that
    are those without drafts."""
    engine = Engine(target, draft_head=str(folder), block_size=4, num_blocks=99, prefill_chunk=7)
    table = np.array(target.model.embed_tokens.weight, np.float64)
    drafter, num_seen = engine.scheduler.decoding.drafters[0], 0
    take_every_guess(engine.scheduler.decoding)
    propose = drafter.propose

    def checked(requests, depths):
        nonlocal num_seen
        guesses = propose(requests, depths)
        for request, depth, own in zip(requests, depths, guesses, strict=True):
            states = target_states(target, request.tokens[:-1], ids)
            expected, margin = reference.guesses(states, request.tokens, table, depth)
            assert own == expected or margin < 1e-3, (own, expected, margin)
            num_seen += len(own)
        return guesses

    drafter.propose = checked
    prompts = [[(7 * i + j) % VOCAB for j in range(length)] for i, length in enumerate((3, 19))]
    done = engine.generate(prompts, SamplingParams(max_tokens=12))
    plain = Engine(target, num_blocks=99).generate(prompts, SamplingParams(max_tokens=12))
    assert [each.tokens for each in done] == [each.tokens for each in plain]
    return num_seen


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_head_guesses_as_its_own_weights_say(tmp_path, bits):
    target = tiny_model("llama")
    written(tmp_path / "head", target, {})
    out = tmp_path / "quantized"
    assert main(["extract", str(tmp_path / "head"), str(out), "--bits", str(bits)]) == 0
    weights = {n: np.array(a) for n, a in mx.load(str(out / "model.safetensors")).items()}
    packed = [name.removesuffix(".scales") for name in weights if name.endswith(".scales")]
    assert {"fc", "lm_head", "layers.0.mlp.up_proj"} < {*packed}
    for name in packed:
        scales, biases = weights.pop(f"{name}.scales"), weights.pop(f"{name}.biases")
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        whole = weights[f"{name}.weight"][..., None] >> shifts & (1 << bits) - 1
        groups = whole.reshape(*scales.shape, 64)
        dense = groups * scales[..., None].astype(np.float64) + biases[..., None]
        weights[f"{name}.weight"] = dense.reshape(len(scales), -1)
    assert compared(out, target, Eagle3Reference(weights), (1, 2, 3)) > 12


def test_a_quantized_head_computes_in_the_type_of_the_model(tmp_path):
    target, file = tiny_model("llama"), str(tmp_path / "model.safetensors")
    tensors = {
        n: mx.array(a) for n, a in write_head(tmp_path, target_width=64, vocab_size=VOCAB).items()
    }
    is_float = {n for n, a in tensors.items() if a.dtype == mx.float32}
    mx.save_safetensors(
        file, {n: a.astype(mx.float16) if n in is_float else a for n, a in tensors.items()}
    )
    main(["extract", str(tmp_path), str(tmp_path / "out"), "--bits", "4"])
    states = [mx.ones((1, 1, 64))] * 3
    for path, expected in ((tmp_path, mx.float16), (tmp_path / "out", mx.float32)):
        assert open_head(path, target).fuse(states).dtype == expected


def test_a_quantization_that_is_not_read_is_refused(tmp_path, capsys):
    target = tiny_model("llama")
    written(tmp_path, target, {})
    for asked in ([], ["--bits", "4"]):
        with pytest.raises(SystemExit, match="2"):
            main(["extract", str(tmp_path), str(tmp_path), *asked])
        change = {"quantization": {"bits": 3, "group_size": 64}}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    lines = capsys.readouterr().err.splitlines()
    assert "expected --bits 4 or --bits 8" in lines[-2] and "the head is quantized" in lines[-1]
    with pytest.raises(ValueError, match=r"quantization is .*'bits': 3.*: expected bits of 4 or 8"):
        open_head(tmp_path, target)


def test_the_states_are_the_inputs_of_layers_2_half_and_the_last_but_two(tmp_path):
    target = tiny_model("llama", num_hidden_layers=10)
    write_head(tmp_path, target_width=64, vocab_size=VOCAB)
    assert open_head(tmp_path, target).states == (2, 5, 7)


REFUSED = {
    "a key that nobody knows": ({"twist": 1}, "unknown key twist"),
    "two layers": ({"num_hidden_layers": 2}, "num_hidden_layers is 2: expected 1"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is gelu: expected silu"),
    "another layer": ({"model_type": "mamba"}, "model_type is mamba: expected llama or qwen3"),
    "no states": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    "another vocabulary": ({"vocab_size": 999}, "999"),
    "another width": ({"target_hidden_size": 32}, "fc.weight of the draft head has the shape"),
    "another kind": ({"architectures": ["Qwen3ForCausalLM"]}, "expected one of EAGLE-3"),
    "a state too many": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "reads state 9"),
    "no width": ({"hidden_size": "wide"}, "hidden_size is wide"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_that_cannot_be_right_is_refused_by_name(tmp_path, case):
    change, message = REFUSED[case]
    write_head(
        tmp_path, target_width=64, vocab_size=VOCAB, eagle_aux_hidden_state_layer_ids=[1, 2, 3]
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        Engine(tiny_model("llama"), draft_head=tmp_path, num_blocks=8)


def test_tensors_that_cannot_be_right_are_refused_by_name(tmp_path):
    tensors = write_head(
        tmp_path, target_width=64, vocab_size=VOCAB, eagle_aux_hidden_state_layer_ids=[1, 2, 3]
    )
    target, file = tiny_model("llama"), str(tmp_path / "model.safetensors")
    fc = "fc.weight"
    for changed, message in (
        ({k: v for k, v in tensors.items() if k != fc}, f"no tensor {fc}"),
        (tensors | {"midlayer.bias": np.zeros(3)}, "unknown tensor midlayer.bias"),
        (tensors | {fc: tensors[fc][:, 1:]}, rf"{fc} of the draft head has the shape \(64, 191\)"),
        (tensors | {"d2t": tensors["d2t"] + VOCAB}, "leads to ids outside"),
        (tensors | {"d2t": tensors["d2t"][1:]}, "d2t of the draft head has the shape"),
        ({k: v for k, v in tensors.items() if k != "d2t"}, "has no tensor d2t"),
    ):
        mx.save_safetensors(file, {k: mx.array(v) for k, v in changed.items()})
        with pytest.raises(ValueError, match=message):
            open_head(tmp_path, target)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json cannot be read"),
        ("config.json", "[]", "holds no object"),
        ("model.safetensors", "no", "model.safetensors cannot be read"),
        ("model.safetensors", None, "has no safetensors"),
        ("config.json", None, "config.json cannot be read"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, file, content, message):
    write_head(tmp_path, target_width=64, vocab_size=VOCAB)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        open_head(tmp_path, tiny_model("llama"))
    with pytest.raises(ValueError, match="expected a folder"):
        open_head(tmp_path / "absent", tiny_model("llama"))
