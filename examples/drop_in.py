"""A program of mlx-lm with paged caches under it: python examples/drop_in.py [MODEL]

The part between the lines is an ordinary program of mlx-lm. `python -m mlx_paged.run PROGRAM` does
the same without a change of its file.
"""

import sys

from mlx_paged import demo_model_path, patch_mlx_lm

patch_mlx_lm()

# ----------------------------------------------------------------------------------------
import copy  # noqa: E402

from mlx_lm import batch_generate, load, stream_generate  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else demo_model_path())
prompts = [tokenizer.encode(text) for text in ("import os\n", "class Stack:\n", "def main():\n")]
for text in batch_generate(model, tokenizer, prompts, max_tokens=16).texts:
    print(repr(text))

cache = make_prompt_cache(model)
for response in stream_generate(model, tokenizer, prompts[0], max_tokens=16, prompt_cache=cache):
    print(response.text, end="", flush=True)
print()
branches = [copy.deepcopy(cache) for _ in range(3)]
# ----------------------------------------------------------------------------------------

kind = type(cache[0])
held = sum(layer.nbytes for layer in cache)
print(f"{kind.__module__}.{kind.__name__}; three copies and the cache hold {4 * held:,.0f} bytes")
