"""Fixtures of several files of this folder."""

import pytest

from mlx_paged.drop_in.patch import patched_mlx_lm
from mlx_paged.loading import load_model
from tests.support.drop_in.prompt_cache_cases import BLOCK
from tests.support.models.tiny_models import tiny_model


@pytest.fixture(scope="module")
def demo():
    return load_model()


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture
def patched():
    with patched_mlx_lm(block_size=BLOCK):
        yield
