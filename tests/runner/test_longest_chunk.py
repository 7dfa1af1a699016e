"""Chunks of a prompt that is alone, on a GPU."""

import pytest

from mlx_paged import Engine
from mlx_paged.runner import pooled_model
from tests.support.models.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("model_type", "longest"), [("llama", 64), ("gemma3_text", 16), ("gpt_oss", 16)]
)
def test_models_with_windows_keep_the_usual_chunk(model_type, longest, monkeypatch):
    """Each sequence takes the blocks of its longest chunk in a group with a window."""
    monkeypatch.setattr(pooled_model, "gpu_memory", object)
    options = {"block_size": 8, "num_blocks": 100, "prefill_chunk": 16, "prewarm": False}
    engine = Engine(tiny_model(model_type), **options)
    assert engine.manager.longest_chunk == longest
