"""Fixtures of several files of this folder."""

import pytest

from bench.models import llama_model


@pytest.fixture(scope="module")
def model():
    return llama_model("tiny")
