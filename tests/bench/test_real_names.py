"""The names of the real chat model: a directory, or one line that says how to make it."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from bench.models import gguf_of, named_model, random_prompts, vocab_size
from bench.names import REAL, REAL_MODEL
from bench.serving import __main__ as serving
from bench.serving.engines import check_engines, kv_token_bytes
from tests.support.models.tiny_models import VOCAB, tiny_model


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A directory as the script writes it, of a tiny model."""
    model = tiny_model("llama")
    folder = tmp_path / "float32"
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (tmp_path / "model.gguf").write_text("")
    monkeypatch.setenv(REAL_MODEL, str(tmp_path))
    return tmp_path


def test_a_name_leads_to_its_directory_and_file(made, monkeypatch):
    loaded = []
    monkeypatch.setattr("bench.models.load", lambda path: loaded.append(path) or ("model", None))
    assert named_model("smollm2-float32") == "model"
    assert loaded == [str(made / "float32")] and vocab_size("smollm2-float32") == VOCAB
    assert np.max(random_prompts(3, 50, "smollm2-float32")) < VOCAB
    assert gguf_of("smollm2-float32") == gguf_of(str(made / "float32")) == made / "model.gguf"


def test_there_is_no_file_beside_other_models(made):
    assert gguf_of("reference") is gguf_of("demo") is gguf_of("owner/name") is None
    (made / "other.gguf").write_text("")
    assert gguf_of("smollm2-float32") is None


@pytest.mark.parametrize("home", [None, "nowhere"])
@pytest.mark.parametrize("name", REAL)
def test_a_model_that_is_not_there_is_one_line_that_says_how_to_make_it(
    name, home, monkeypatch, capsys
):
    monkeypatch.delenv(REAL_MODEL, raising=False)
    if home:
        monkeypatch.setenv(REAL_MODEL, home)
    with pytest.raises(SystemExit) as exit_info:
        serving.main(["--model", name, "--engines=mlx_paged"])
    out, err = capsys.readouterr()
    assert exit_info.value.code == 2 and out == "" and err.count("\n") == 1
    assert f"model {name}: {REAL_MODEL} is" in err
    assert "expected the DIR of `python -m scripts.real_model DIR`" in err


def test_llama_cpp_needs_the_file(monkeypatch):
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    with pytest.raises(ValueError, match="llama_cpp_gguf: expected a --model with one GGUF file"):
        check_engines(["llama_cpp_gguf"], tiny_model("llama"), 3)


def test_cells_have_the_bytes_of_their_numbers():
    model = tiny_model("llama")
    assert kv_token_bytes(model) == 2 * kv_token_bytes(model, dtype=mx.float16)
