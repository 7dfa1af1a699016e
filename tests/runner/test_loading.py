"""Models that are loaded by name."""

from io import StringIO

import mlx.core as mx
import pytest

from mlx_paged import loading


def ops_of_the_random_state() -> int:
    """How many operations MLX still has to compute for its next random number."""
    graph = StringIO()
    mx.export_to_dot(graph, *mx.random.state)
    return graph.getvalue().count("shape=rectangle")


def test_a_load_leaves_no_graph_in_the_random_state():
    mx.random.uniform()
    assert ops_of_the_random_state() > 0  # what is counted exists
    loading.load_model()
    assert ops_of_the_random_state() == 0


def test_a_failed_load_leaves_no_graph_in_the_random_state(monkeypatch):
    def failing(*_args, **_options):
        mx.random.uniform()
        raise RuntimeError("no weights")

    monkeypatch.setattr(loading, "load", failing)
    with pytest.raises(ValueError, match="no weights"):
        loading.load_model()
    assert ops_of_the_random_state() == 0
