"""MTP heads compute what their published weights mean, in every layout."""

from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from mlx_paged.heads.checkpoint import Checkpoint
from mlx_paged.heads.mtp import MTPHead
from mlx_paged.heads.mtp_weights import head_of
from tests.support.models.architectures import build
from tests.support.models.mtp_checkpoints import (
    HEADS,
    head_config,
    head_tensors,
    text_config,
    write_checkpoint,
)
from tests.support.models.mtp_reference import ReferenceHead

LENGTH = 12
"""Entries of a sequence: more than an indexer picks."""
BEHIND = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe")


def in_float32(head: MTPHead) -> MTPHead:
    """The head with the same numbers, so that only float32 rounds what it computes."""
    head.update(tree_map(lambda a: a.astype(mx.float32), head.parameters()))
    return head


class Both:
    """A head of the product and its reference, beside a model."""

    def __init__(self, folder: Path, model_type: str, own: bool = False) -> None:
        config = head_config(model_type)
        self.model = build(model_type, seed=1, **HEADS[model_type])
        self.text = getattr(self.model, "language_model", self.model)
        tensors = head_tensors(config, own=own)
        checkpoint = Checkpoint(write_checkpoint(folder, config, tensors))
        self.head = in_float32(head_of(checkpoint))
        self.head.bind(self.model)
        final_norm = np.array(self.text.model.norm.weight)
        self.reference = ReferenceHead(model_type, text_config(config), tensors, final_norm)
        behind = f"model.layers.{text_config(config)['num_hidden_layers']}"
        self.table = np.array(self.text.model.embed_tokens.weight)
        self.output = np.array(self.text.lm_head.weight)
        if own:
            self.table = tensors[f"{behind}.embed_tokens.weight"]
            self.output = tensors[f"{behind}.shared_head.head.weight"]

    def expected(self, states: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Hidden states and logits of all entries."""
        hidden = self.reference.entries(states.astype(np.float64), self.table[tokens])
        return hidden, self.reference.normed(hidden) @ self.output.T


@pytest.fixture(params=sorted(HEADS))
def both(request, tmp_path) -> Both:
    return Both(tmp_path, request.param)


def inputs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    return rng.normal(size=(LENGTH, 32)).astype(np.float32), rng.integers(0, 64, LENGTH)


def close(found: mx.array, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(found[0]), expected, rtol=2e-5, atol=2e-5)


def test_entries_equal_a_reference_in_float64(both):
    states, tokens = inputs()
    hidden, logits = both.expected(states, tokens)
    head = both.head
    found = head(mx.array(states)[None], head.embed(mx.array(tokens)[None]), head.make_cache())
    close(found, hidden)
    close(head.logits(found), logits)


@pytest.mark.sampled(3)
def test_entries_one_by_one_equal_entries_together(both):
    """As a drafter computes them: with a cache, some at once and then each alone."""
    states, tokens = inputs()
    hidden, _ = both.expected(states, tokens)
    head, cache = both.head, both.head.make_cache()
    embeddings, fused = head.embed(mx.array(tokens)[None]), mx.array(states)[None]
    ends = [0, 5, *range(6, LENGTH + 1)]
    parts = [head(fused[:, a:b], embeddings[:, a:b], cache) for a, b in pairwise(ends)]
    close(mx.concatenate(parts, axis=1), hidden)


@pytest.mark.sampled(3)
def test_a_head_is_applied_to_its_own_guesses(both):
    """The state that is fed back stands in the place of the target's, three guesses deep."""
    states, tokens = inputs()
    head, cache = both.head, both.head.make_cache()
    hidden = head(mx.array(states)[None], head.embed(mx.array(tokens)[None]), cache)[:, -1:]
    for _ in range(3):
        known, logits = both.expected(states, tokens)
        guess = int(logits[-1].argmax())
        assert head.logits(hidden)[0, -1].argmax().item() == guess
        close(head.feed_back(hidden), both.reference.fed_back(known)[-1:])
        states = np.concatenate([states, both.reference.fed_back(known)[-1:]]).astype(np.float32)
        tokens = np.append(tokens, guess)
        hidden = head(head.feed_back(hidden), head.embed(mx.array([[guess]])), cache)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model_type", BEHIND)
def test_a_head_may_have_embeddings_and_output_of_its_own(model_type, tmp_path):
    both = Both(tmp_path, model_type, own=True)
    states, tokens = inputs()
    hidden, logits = both.expected(states, tokens)
    head = both.head
    found = head(mx.array(states)[None], head.embed(mx.array(tokens)[None]), head.make_cache())
    close(found, hidden)
    close(head.logits(found), logits)


@pytest.mark.sampled(3)
def test_what_is_shared_is_no_part_of_the_head(both):
    names = [name for name in both.head.parameters() if name in ("embed_tokens", "output")]
    assert not names
    close(both.head.embed(mx.array([[1, 2]])), both.table[[1, 2]])
