"""mlx-lm-lora: gradients of cached chunks, forked prompt caches, its training command."""

import json
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx_lm_lora.train
from common import MODEL, PROMPTS, WORK, arrays, attempt, show
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm_lora.trainer.online_rl_utils import build_shared_prompt_cache, fork_prompt_cache
from mlx_lm_lora.trainer.sft_trainer import default_loss, reset_prompt_cache

mx.random.seed(0)
model, tokenizer = load(str(MODEL))
model.freeze()
linear_to_lora_layers(model, 2, {"rank": 4, "scale": 4.0, "dropout": 0.0})
tokens = mx.array([tokenizer.encode("".join(PROMPTS))])


def train() -> list[object]:
    """The losses and gradients of chunks that attend to the chunks before them."""
    cache, found = make_prompt_cache(model), []
    lengths = mx.array([[0, tokens.shape[1]]])
    for start in range(0, tokens.shape[1], 16):
        chunk = tokens[:, start : start + 16]
        (loss, count), grads = nn.value_and_grad(model, default_loss)(model, chunk, lengths, cache)
        found.append([loss, count, [grad for _, grad in tree_flatten(grads)]])
    reset_prompt_cache(cache)
    found.append([type(c).__name__ in ("KVCache",) or c.offset == 0 for c in cache])
    return found


attempt("cached chunks", train)
prompt = tokens[0].tolist()
template = build_shared_prompt_cache(model, prompt)
forks = [fork_prompt_cache(model, template) for _ in range(3)]
show("forks", [fork is not None for fork in forks])
for n, fork in enumerate(forks):
    last = mx.array(prompt[-1:])
    steps = generate_step(last, model, max_tokens=8 + n, prompt_cache=fork)
    attempt(f"fork {n}", lambda steps=steps: [token for token, _ in steps])
attempt("template", lambda: arrays(template))

rows = [
    {"prompt": p, "completion": f"return {n}", "text": p * 6} for n in range(8) for p in PROMPTS
]
for name in ("train", "valid", "test"):
    (WORK / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
options = ["--data", WORK, "--train", "--iters", "4", "--batch-size", "2", "--num-layers", "2"]
options += ["--max-seq-length", "128", "--seed", "0", "--adapter-path", WORK / "adapter"]
options += ["--val-batches", "1", "--efficient-long-context"]
sys.argv = ["mlx_lm_lora.train", "--model", str(MODEL), *map(str, options)]
mx.device_info = lambda: {"max_recommended_working_set_size": 8 << 30}  # of Metal only
mx.set_wired_limit = lambda limit: None
attempt("train", mlx_lm_lora.train.main)
saved = WORK / "adapter" / "adapters.safetensors"
show("train, adapter", dict(mx.load(str(saved))) if saved.exists() else None)
