"""Fixtures of several files of this folder."""

import pytest

from tests.support.models.tiny_models import tiny_model


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture
def boundless(monkeypatch):
    """Models without a limit of positions, whose sequences may be of any length: only the memory
    bounds a default pool."""
    monkeypatch.setattr("mlx_paged.runner.pooled_model.positions_of", lambda model: None)
    monkeypatch.setattr("mlx_paged.kv.default_pool.USUAL_TOKENS", 1 << 24)
