"""Engines and pools that the doctor must find wrong."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import ops
from mlx_paged.doctor import tokens
from mlx_paged.doctor.findings import Findings, run_check
from mlx_paged.engine.engine import Engine


@pytest.mark.slow
def test_a_wrong_attention_gives_wrong_tokens(monkeypatch):
    right = ops.attend

    def wrong(q: mx.array, *rest: Any, **options: Any) -> mx.array:
        return right(q[:, ::-1], *rest, **options)

    monkeypatch.setattr(ops, "attend", wrong)
    monkeypatch.setattr(tokens, "NUM_FORKS", 1)
    found = run_check(Findings("tokens"), tokens.check_tokens, True)
    assert len(found.failures) > 8
    assert all(", mlx-lm's [" in failure for failure in found.failures)


@pytest.mark.slow
def test_blocks_that_are_not_copied_give_wrong_tokens(monkeypatch):
    monkeypatch.setattr(ops, "copy_blocks", lambda k, v, pairs: (k, v))
    found = run_check(Findings("order"), tokens.check_order, True)
    assert any(", mlx-lm's [" in failure for failure in found.failures)


def test_reads_after_later_writes_are_noticed(monkeypatch):
    monkeypatch.setattr(mx, "async_eval", lambda output, handles: mx.eval(handles))
    found = Findings("order")
    tokens.rewrite_pool(found, rounds=8)
    assert found.failures == ["rounds [0, 1, 2, 3, 4, 5, 6] read what other rounds wrote"]


@pytest.fixture
def play() -> tokens.Play:
    """A play whose mlx-lm always answers [1, 2, 0]; token 2 is nearly as likely as token 1."""
    row = np.array([-20.0, -1.0, -1.01, -3.0])
    answer = SimpleNamespace(
        max_tokens=3, tie=tokens.TIE, answer=lambda prompt: ([1, 2, 0], [row, row, row])
    )
    play = tokens.Play(SimpleNamespace(), answer)
    play._prompts = {0: [5, 6]}
    return play


@pytest.mark.parametrize(
    ("got", "error", "ties", "wrong"),
    [
        ([1, 2, 0], None, 0, []),
        ([2, 3, 3], None, 1, []),
        ([3, 2, 0], None, 0, ["token 0 begins [3, 2, 0], mlx-lm's [1, 2, 0]"]),
        ([1, 2], RuntimeError("no device"), 0, ["request 0 ends after 2 tokens: no device"]),
    ],
    ids=["equal", "tie", "other", "error"],
)
def test_only_ties_may_differ(got, error, ties, wrong, play):
    play._compare(SimpleNamespace(request_id=0, tokens=got, error=error))
    assert (play.ties, len(play.wrong)) == (ties, len(wrong))
    assert all(part in whole for part, whole in zip(wrong, play.wrong, strict=True))


@pytest.mark.slow
def test_an_engine_without_preemptions_is_no_proof(monkeypatch):
    def roomy(*arguments: Any, num_blocks: int, **options: Any) -> Engine:
        return Engine(*arguments, num_blocks=1000, **options)

    monkeypatch.setattr(tokens, "Engine", roomy)
    found = run_check(Findings("order"), tokens.check_order, True)
    assert found.failures == ["the engine met no preemptions"]


def test_a_write_that_copies_the_pool_is_noticed(monkeypatch):
    right, readers = ops.write_kv, []

    def copying(k: mx.array, v: mx.array, k_cache: mx.array, *rest: Any) -> Any:
        readers.append(k_cache)  # otherwise MLX adds in place
        return right(k, v, mx.array(k_cache) + 0, *rest)

    monkeypatch.setattr(ops, "write_kv", copying)
    found = Findings("order")
    tokens.rewrite_pool(found, rounds=2)
    assert [failure[:23] for failure in found.failures] == ["a write of one token to"]
