"""Names of the models that benches run. Knows no mlx, so that help is shown at once."""

import os
from pathlib import Path
from typing import Any

REFERENCE: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}

SIZES: dict[str, dict[str, Any]] = {
    "reference": REFERENCE,
    "many-kv-heads": REFERENCE | {"num_key_value_heads": 8},
    "smollm2-shape": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 128,
    },
}
"""By name. Published numbers are measured with "reference". "many-kv-heads" has four times the K/V
(16 KiB a token). "smollm2-shape" is for prompts that SmolLM2 has no positions for. "tiny" is for
tests."""

REAL_MODEL = "REAL_MODEL_DIR"
"""The variable that names the directory of :mod:`scripts.real_model`."""

REAL = ("smollm2-4bit", "smollm2-bfloat16", "smollm2-float32")
"""SmolLM2-135M-Instruct: names of what that script writes."""

MODELS = (*SIZES, *REAL)


def real_model(name: str) -> Path:
    """The directory of a name in :data:`REAL`; ValueError says how to make it."""
    home = os.environ.get(REAL_MODEL)
    directory = Path(home or "") / name.removeprefix("smollm2-")
    if not home or not (directory / "config.json").is_file():
        found = f"{REAL_MODEL} is {home!r}" if home else f"{REAL_MODEL} is not set"
        raise ValueError(
            f"model {name}: {found}: expected the DIR of `python -m scripts.real_model DIR`"
        )
    return directory
