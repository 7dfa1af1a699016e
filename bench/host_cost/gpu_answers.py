"""Ops that choose as on a GPU, on a machine without one."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from mlx_paged import _ext
from mlx_paged.ops import dispatch


@contextmanager
def gpu_answers() -> Iterator[None]:
    """Within this context Python runs as on a GPU whose compiler takes every kernel.

    The package asks the same questions and takes the same ways as there. What is chosen is built
    for the CPU's stream, so a CPU can compute the result.
    """
    on_cpu, stream_of = mx.Device(mx.cpu), mx.default_stream

    def stream(device: Any) -> mx.Stream:
        return stream_of(on_cpu)

    with ExitStack() as stack:
        for owner, name, answer in (
            (mx, "default_device", lambda: mx.Device(mx.gpu)),
            (mx, "default_stream", stream),
            (_ext.metal, "has_metal", lambda: True),
            (dispatch, "_compile", lambda plan, *arrays, **options: True),
        ):
            stack.enter_context(patch.object(owner, name, answer))
        yield
