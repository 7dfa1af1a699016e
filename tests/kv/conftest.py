"""Fixtures of several files of this folder."""

import pytest

from tests.support.models.tiny_models import tiny_model


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")
