"""MTP heads of checkpoints draft in an engine, and change no token."""

import json
import random
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_paged import Engine, SamplingParams, demo_model_path
from mlx_paged.generate import __main__ as command
from mlx_paged.heads.mtp_files import extract
from mlx_paged.heads.opening import open_head
from mlx_paged.runner import drafting
from tests.support.models.architectures import VOCAB, build
from tests.support.models.mtp_checkpoints import (
    HEADS,
    head_config,
    head_tensors,
    text_config,
    write_checkpoint,
)
from tests.support.models.mtp_reference import ReferenceHead
from tests.support.simulation.injected_drafts import take_every_guess

OPTIONS = {"block_size": 4, "num_blocks": 60, "prefill_chunk": 7}


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def model_and_head(folder: Path, model_type: str) -> tuple[nn.Module, Path]:
    config = head_config(model_type)
    write_checkpoint(folder, config, head_tensors(config))
    return build(model_type, seed=1, **HEADS[model_type]), folder


class Watched:
    """An engine whose head is compared with the reference at each proposal.

    Attributes:
        compared: guesses that were compared.
    """

    def __init__(self, folder: Path, model_type: str) -> None:
        self.target, path = model_and_head(folder, model_type)
        config = head_config(model_type)
        text = getattr(self.target, "language_model", self.target)
        self.inner, self.output = text.model, np.array(text.lm_head.weight, np.float64)
        self.table = np.array(self.inner.embed_tokens.weight)
        self.reference = ReferenceHead(
            model_type, text_config(config), head_tensors(config), np.array(self.inner.norm.weight)
        )
        self.engine = Engine(self.target, draft_head=str(path), **OPTIONS)
        take_every_guess(self.engine.scheduler.decoding)
        drafter = self.engine.scheduler.decoding.drafters[0]
        self.drafter, self._propose, drafter.propose = drafter, drafter.propose, self.propose
        self.compared = 0

    def propose(self, requests, depths):
        guesses = self._propose(requests, depths)
        for request, own in zip(requests, guesses, strict=True):
            if own:
                first = self.drafter._drafted[request.id].origin
                self._compare(request.tokens, first, own)
        return guesses

    def _compare(self, tokens: list[int], first: int, guesses: list[int]) -> None:
        states = np.array(self.inner(mx.array([tokens[:-1]]))[0])[first:]
        text = list(tokens[first + 1 :])
        for guess in guesses:
            hidden = self.reference.entries(states, self.table[text])
            logits = self.reference.normed(hidden)[-1] @ self.output.T
            assert logits.max() - logits[guess] < 1e-3, (guess, logits.argmax())
            states = np.concatenate([states, self.reference.fed_back(hidden)[-1:]])
            text.append(guess)
            self.compared += 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model_type", sorted(HEADS))
def test_guesses_are_those_of_the_reference(model_type, tmp_path):
    """Prompts in chunks, with requests that decode; a prompt that was seen before."""
    watched = Watched(tmp_path, model_type)
    asked = [prompt(length, length) for length in (5, 17, 9)]
    params = SamplingParams(max_tokens=12)
    done = watched.engine.generate(asked, params) + watched.engine.generate(asked[:1], params)
    plain = Engine(watched.target, **OPTIONS).generate([*asked, asked[0]], params)
    assert [each.tokens for each in done] == [each.tokens for each in plain]
    assert watched.compared > 20


def test_a_file_of_extract_drafts_as_the_checkpoint_does(tmp_path):
    """The file lies where `auto` looks for it: in the model's folder."""
    target, folder = model_and_head(tmp_path / "checkpoint", "mimo")
    (tmp_path / "model").mkdir()
    extract(folder, tmp_path / "model" / "head.safetensors")
    drafts = []
    for head in (folder, tmp_path / "model" / "head.safetensors", tmp_path / "model"):
        engine = Engine(target, draft_head=head, **OPTIONS)
        take_every_guess(engine.scheduler.decoding)
        (done,) = engine.generate([prompt(9)], SamplingParams(max_tokens=10))
        drafts.append((done.tokens, done.drafts, done.accepted_drafts))
    assert drafts[0] == drafts[1] == drafts[2] and drafts[0][1] > 5


def test_auto_is_the_head_of_the_models_checkpoint(tmp_path, capsys, monkeypatch):
    """The command loads the model and its head from one folder, and prints the same text."""
    demo = demo_model_path()
    vocab_size = json.loads((demo / "config.json").read_text())["vocab_size"]
    config = head_config("mimo", vocab_size=vocab_size)
    parameters = tree_flatten(build("mimo", seed=1, vocab_size=vocab_size).parameters())
    weights = {name: np.array(array, np.float32) for name, array in parameters}
    write_checkpoint(tmp_path, config, weights | head_tensors(config))
    for file in demo.glob("token*"):
        shutil.copy(file, tmp_path)
    opened: list[Path] = []
    monkeypatch.setattr(drafting, "open_head", lambda *of: opened.append(of[0]) or open_head(*of))
    texts = []
    for flags in ([], ["--draft-head", "auto"]):
        asked = ["--model", str(tmp_path), "-p", "def f", "--max-tokens", "16", *flags]
        assert command.main(asked) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].strip()
    assert opened == [tmp_path]


def test_auto_without_a_head_is_refused(capsys):
    asked = ["--model", str(demo_model_path()), "--draft-head", "auto", "-p", "x"]
    with pytest.raises(SystemExit, match="2"):
        command.main(asked)
    assert "expected one of EAGLE-3, or an MTP head" in capsys.readouterr().err


def test_a_head_that_does_not_fit_the_model_is_refused(tmp_path):
    _, folder = model_and_head(tmp_path, "mimo")
    for name, changes, message in (
        ("mimo", {"vocab_size": 80}, "the head has vocab_size 64: the model has 80"),
        ("qwen2", {}, "the head is of a mimo: the model is a qwen2"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(build(name, **changes), draft_head=str(folder), **OPTIONS)
