"""Whether MLX has begun to compute an array."""

import io

import mlx.core as mx


def has_begun(array: mx.array) -> bool:
    """Whether MLX has begun to compute an array: until then it has the nodes of its graph."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return "shape=rectangle" not in graph.getvalue()
