"""Fixtures of several files of this folder."""

import mlx.core as mx
import pytest

from tests.support.devices import is_gpu
from tests.support.ops.paged_cases import answer_by


@pytest.fixture(params=["native", "reference"])
def kernel(request, monkeypatch):
    """Both answers; a CPU stream would always choose the compiled kernel."""
    answer_by(monkeypatch, lambda *_: request.param)
    return request.param


@pytest.fixture
def on_cpu(request):
    """The CPU has both kernels for any shape, and float32 keeps its 24 bits there. Tests that are
    marked ``mac`` are on the GPU of a Mac."""
    if request.node.get_closest_marker("mac") and is_gpu():
        yield
        return
    with mx.stream(mx.cpu):
        yield
