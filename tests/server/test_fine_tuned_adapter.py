"""An adapter that mlx_lm.lora trains is served beside the model that it was trained on."""

import json
import types

import pytest
from mlx_lm import lora

from mlx_paged import demo_model_path
from mlx_paged.loading import load_model
from tests.support.commands.server_harness import live, post
from tests.support.models.adapters import greedy, with_adapter

PROMPT = "def read_lines(path):\n"
TOKENS = 12
LINE = PROMPT + "    return open(path).read().split()\n\n\nprint(read_lines('a'))\n"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The folder of an adapter that has learnt one answer."""
    folder = tmp_path_factory.mktemp("tuned")
    for name in ("train", "valid"):
        (folder / f"{name}.jsonl").write_text(8 * (json.dumps({"text": LINE}) + "\n"))
    options = lora.CONFIG_DEFAULTS | {
        "model": str(demo_model_path()),
        "train": True,
        "data": str(folder),
        "adapter_path": str(folder / "adapter"),
        "num_layers": 4,
        "iters": 20,
        "batch_size": 1,
        "val_batches": 1,
        "learning_rate": 1e-2,
        "max_seq_length": 64,
    }
    lora.run(types.SimpleNamespace(**options))
    return folder / "adapter"


@pytest.mark.slow
def test_rows_of_the_model_and_of_its_fine_tune_share_a_server(tuned):
    texts = {}
    for name, folder in (("base", None), ("tuned", tuned)):
        model, tokenizer = load_model()
        prompt = tokenizer.encode(PROMPT)
        texts[name] = tokenizer.decode(greedy(with_adapter(model, folder), prompt, TOKENS))
    assert texts["tuned"].lstrip().startswith("return open(path).read()") != texts["base"]
    flags = "--adapter", f"tuned={tuned}", "--served-model-name", "base"
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    with live(*flags) as server:
        for name, expected in (*texts.items(), *texts.items()):
            status, _, content = post(server, body | {"model": name})
            assert (status, content["choices"][0]["text"]) == (200, expected)
