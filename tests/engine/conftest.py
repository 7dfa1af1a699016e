"""Fixtures of several files of this folder."""

import pytest

from mlx_paged import Engine
from mlx_paged.kv_disk import tier
from mlx_paged.scheduler.speculation import Speculation
from tests.support.models.tiny_models import tiny_model
from tests.support.simulation.injected_drafts import every_guess


@pytest.fixture
def eager(monkeypatch):
    """Whoever has a guess gets drafts: how many must not depend on how fast this machine is."""
    monkeypatch.setattr(Speculation, "_depths", every_guess)


@pytest.fixture
def engine(model):
    return Engine(model, block_size=4, num_blocks=64, prefill_chunk=16, max_running=8)


@pytest.fixture
def limits_of_the_disk(monkeypatch):
    """Simulated lives draw these; other tests need the real ones."""
    for name in ("STEP_BYTES", "WAIT"):
        monkeypatch.setattr(tier, name, getattr(tier, name))


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")
