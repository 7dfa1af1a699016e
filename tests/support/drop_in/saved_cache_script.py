"""Saves and continues prompt caches in a process of its own, under the patch or without it.

    python -m tests.support.drop_in.saved_cache_script paged|stock save|continue DIRECTORY

It prints the tokens after each prompt.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as stock

from mlx_paged import patch_mlx_lm
from tests.support.models.architectures import build

MODELS = {
    "llama": "plain",
    "gemma3_text": "windows",
    "deepseek_v3": "latents",
    "jamba": "states",
    "falcon_h1": "lists",
    "qwen3": "quantized",
}
PROMPT, MORE = [5, 17, 3, 40, 8, 8, 2, 60, 33, 1, 29, 12], [7, 44, 9]


def generated(model, tokens, cache, **options) -> list[int]:
    steps = generate_step(mx.array(tokens), model, max_tokens=9, prompt_cache=cache, **options)
    return [int(token) for token, _ in steps]


def saved(model, kind: str, file: str) -> list[int]:
    cache = stock.make_prompt_cache(model)
    options = {"kv_bits": 8, "kv_group_size": 32} if kind == "quantized" else {}
    tokens = generated(model, PROMPT, cache, **options)
    stock.save_prompt_cache(file, cache, {"about": kind})
    return tokens


def continued(model, kind: str, file: str) -> list[int]:
    cache, metadata = stock.load_prompt_cache(file, return_metadata=True)
    assert metadata == {"about": kind}
    return generated(model, MORE, cache)


def main(patch: str, step: str, directory: str) -> None:
    if patch == "paged":
        patch_mlx_lm()
    tokens = {}
    for name, kind in MODELS.items():
        model = build(name, **({"head_dim": 32} if kind == "quantized" else {}))
        file = str(Path(directory) / f"{name}.safetensors")
        tokens[name] = (saved if step == "save" else continued)(model, kind, file)
    print(json.dumps(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
