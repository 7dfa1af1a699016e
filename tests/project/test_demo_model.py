"""The demo model is a small float32 checkpoint like any other, and it has learnt Python.

Thresholds are ones that random weights, or a model of token frequencies alone, cannot meet.
"""

import importlib
import json
import math
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged import demo_model_path

ROOT = Path(__file__).parents[2]
Model = tuple[nn.Module, TokenizerWrapper]

UNSEEN = '''
def weighted_mean(values, weights=None):
    """Return the mean of values, each counted as often as its weight says."""
    if weights is None:
        weights = [1] * len(values)
    if len(values) != len(weights):
        raise ValueError("expected as many weights as values")
    total = 0
    for value, weight in zip(values, weights):
        total += value * weight
    return total / sum(weights)


class Thermometer:
    """Keep the last temperatures of a sensor."""

    def __init__(self, sensor, size=10):
        self.sensor = sensor
        self.size = size
        self._readings = []

    def update(self):
        self._readings.append(self.sensor.read())
        if len(self._readings) > self.size:
            self._readings.pop(0)
'''

TEXTS = {
    "code": UNSEEN,
    "whitespace": "x = 1\t# tab\r\n\n\n        y  =  2   \n",
    "two bytes": "naïve café, Ωμέγα",
    "three bytes": "if x ≠ 0: # 日本語\n",
    "four bytes": "print('🎉🦊')",
    "compatibility forms": "\ufb01x x\u00b2 \u212b",
    "control characters": "bell \x07 escape \x1b delete \x7f",
}


def no_network(*args: object) -> None:
    raise OSError("the test has no network")


def load_offline(path: Path) -> Model:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", no_network)
        patch.setattr(socket, "getaddrinfo", no_network)
        model, tokenizer, *_ = mlx_lm.load(str(path))
    return model, tokenizer


@pytest.fixture(scope="module")
def demo() -> Model:
    return load_offline(demo_model_path())


def nats_per_token(model: nn.Module, tokens: list[int]) -> float:
    logits = model(mx.array(tokens[:-1])[None])[0]
    return float(nn.losses.cross_entropy(logits, mx.array(tokens[1:]), reduction="mean").item())


def test_the_folder_is_small_and_has_a_card():
    files = {file.name: file.stat().st_size for file in demo_model_path().iterdir()}
    assert sum(files.values()) <= 4_000_000
    assert set(files) == {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_weights_are_stored_and_run_in_float32(demo):
    stored = mx.load(str(demo_model_path() / "model.safetensors"))
    running = dict(tree_flatten(demo[0].parameters()))
    assert stored.keys() == running.keys()
    assert {w.dtype for w in (*stored.values(), *running.values())} == {mx.float32}
    assert demo[0](mx.array([[1, 2]])).dtype == mx.float32


def test_query_heads_share_key_value_heads(demo):
    assert demo[0].args.num_attention_heads == 2 * demo[0].args.num_key_value_heads


def test_unseen_python_is_expected(demo):
    model, tokenizer = demo
    tokens = tokenizer.encode(UNSEEN)
    counts = Counter(tokens)
    frequencies_alone = -sum(math.log(counts[t] / len(tokens)) for t in tokens) / len(tokens)
    assert nats_per_token(model, tokens) < 3.6 < frequencies_alone


@pytest.mark.slow
def test_order_matters(demo):
    model, tokenizer = demo
    tokens = tokenizer.encode(UNSEEN)
    assert nats_per_token(model, sorted(tokens)) > 2 * nats_per_token(model, tokens)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("prompt", ["def read_file(path):", "class Stack:"])
def test_greedy_text_looks_like_python(demo, prompt):
    text = mlx_lm.generate(*demo, prompt, max_tokens=64)
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) >= 3
    assert all(line.startswith("    ") for line in lines)
    assert len(set(demo[1].encode(text))) >= 16
    assert any(word in text for word in ("return", "self", '"""'))


def test_text_ends_by_itself(demo):
    model, tokenizer = demo
    responses = mlx_lm.stream_generate(model, tokenizer, "def close(self):", max_tokens=400)
    *_, last = responses
    assert last.finish_reason == "stop"
    assert last.token == tokenizer.eos_token_id == tokenizer.vocab["<|endoftext|>"]
    assert tokenizer.eos_token_ids == {last.token}


@pytest.mark.slow
def test_a_context_of_2048_tokens_works(demo):
    model, tokenizer = demo
    tokens = (tokenizer.encode(UNSEEN) * 12)[:2048]
    assert len(tokens) == 2048 == model.args.max_position_embeddings
    cache = make_prompt_cache(model)
    for chunk in mx.array(tokens)[None].split(8, axis=1):
        assert mx.isfinite(model(chunk, cache=cache)).all()
    assert cache[0].offset == 2048


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["def read_file(path):", "class Stack:", "def main():"])
def test_greedy_choices_are_no_near_ties(demo, prompt):
    """Sums in another order move a logit by about 1e-5; the choice must not depend on that."""
    for response in mlx_lm.stream_generate(*demo, prompt, max_tokens=48):
        second, first = mx.sort(response.logprobs)[-2:].tolist()
        assert first - second > 1e-4


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_tokenizer_gives_text_back_whole_and_streamed(demo, text):
    tokenizer = demo[1]
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    detokenizer = tokenizer.detokenizer
    segments = []
    for token in tokens:
        detokenizer.add_token(token)
        segments.append(detokenizer.last_segment)
    detokenizer.finalize()
    assert "".join(segments) + detokenizer.last_segment == text
    assert "\ufffd" not in "".join(segments)


def test_a_prompt_may_end_in_a_newline(demo):
    """No token spans a newline: lines have the same tokens alone as in their text."""
    lines = UNSEEN.splitlines(keepends=True)
    assert [t for line in lines for t in demo[1].encode(line)] == demo[1].encode(UNSEEN)


def test_there_is_no_chat_template(demo):
    assert not demo[1].has_chat_template


@pytest.fixture(scope="module")
def train_demo() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        return importlib.import_module("scripts.train_demo")


@pytest.fixture
def library(tmp_path) -> Path:
    """A standard library of four modules, two of which are not its own to give."""
    modules = {
        "weather.py": UNSEEN,
        "again.py": UNSEEN.replace("Thermometer", "Barometer"),
        "foreign.py": "# Copyright (c) 1999 by Somebody Else\nforeign = 1\n",
        "package/test/check.py": "tested = 1\n",
    }
    for name, text in modules.items():
        path = tmp_path / "library" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "library"


TINY = {
    "steps": 3,
    "batch-size": 2,
    "seq-len": 32,
    "sample-tokens": 2,
    "vocab-size": 300,
    "hidden-size": 32,
    "intermediate-size": 64,
    "num-hidden-layers": 1,
    "num-attention-heads": 2,
    "num-key-value-heads": 1,
    "head-dim": 16,
}


@pytest.fixture
def train(train_demo, library) -> Callable[..., dict[str, Any]]:
    """Trains a tiny model on the small library."""

    def train(out: Path, **flags: int) -> dict[str, Any]:
        paths = [f"--out={out}", f"--corpus={library}"]
        return train_demo.main([*paths, *(f"--{k}={v}" for k, v in (TINY | flags).items())])

    return train


def test_training_writes_a_checkpoint_that_loads(train, tmp_path, capsys):
    out = tmp_path / "model"
    report = train(out)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert report["steps"] == 3 and report["tokens_seen"] == 3 * 2 * 32
    assert report["bytes"] == sum(file.stat().st_size for file in out.iterdir())
    model, tokenizer = load_offline(out)
    assert model(mx.array([tokenizer.encode(UNSEEN)])).shape[-1] == len(tokenizer.vocab) == 300
    assert tokenizer.eos_token_ids == {tokenizer.vocab["<|endoftext|>"]}
    assert tokenizer.eos_token_id in tokenizer.eos_token_ids
    assert tokenizer.encode("\n    x")[0] == tokenizer.encode("\n")[0]
    assert nats_per_token(model, tokenizer.encode(UNSEEN)) == pytest.approx(math.log(300), rel=0.2)


@pytest.mark.slow
def test_training_is_repeatable(train, tmp_path):
    runs = [tmp_path / "first", tmp_path / "second"]
    for out in runs:
        train(out)
    first, second = (mx.load(str(out / "model.safetensors")) for out in runs)
    assert all(mx.array_equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_training_lowers_the_loss(train, tmp_path):
    assert train(tmp_path / "model", steps=60)["val_loss"] < 0.7 * math.log(300)


@pytest.mark.slow
def test_training_goes_on_while_greedy_choices_are_near_ties(
    train, train_demo, tmp_path, monkeypatch
):
    margins = iter([0.0, 5e-5, 0.5])
    monkeypatch.setattr(train_demo, "show_samples", lambda *arguments: next(margins))
    assert train(tmp_path / "model")["smallest_margin"] == 0.5


def test_only_the_library_s_own_modules_are_read(train_demo, library):
    sources = train_demo.read_sources(library)
    assert [source[:4] for source in sources] == ["\ndef", "\ndef"]
    assert not any("foreign" in source or "tested" in source for source in sources)


@pytest.mark.parametrize(
    ("line", "foreign"),
    [
        ("# Copyright (C) 2001-2006 Python Software Foundation", False),
        ('"copying" and "permission" are words of code', False),
        ("# Copyright 2007 Google, Inc. All Rights Reserved.", True),
        ("# SPDX-License-Identifier: MIT", True),
        ("# Licensed under the MIT license", True),
    ],
)
def test_a_notice_of_others_is_seen(train_demo, line, foreign):
    assert train_demo.carries_foreign_notice(f"import os\n{line}\n") is foreign


def test_a_module_is_cut_at_its_functions_and_classes(train_demo):
    source = "import os\n\n\n@cache\ndef f():\n    return 1\n\n\nx = f()\nclass A:\n    y = x\n"
    assert list(train_demo.split_documents(source)) == [
        "import os",
        "@cache\ndef f():\n    return 1",
        "x = f()",
        "class A:\n    y = x",
    ]
