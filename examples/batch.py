"""Many prompts at once, with progress: python examples/batch.py [MODEL]"""

import sys

from mlx_lm import load
from tqdm import tqdm

from mlx_paged import Engine, TokenOutput, demo_model_path

SUBJECTS = "stack", "queue", "tree", "heap", "graph", "list", "table", "cache"

model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else demo_model_path())
engine = Engine(model, tokenizer, max_running=4)  # four at a time; the others wait
prompts = [f'class {name.title()}:\n    """A {name}' for name in SUBJECTS]

with tqdm(total=len(prompts), unit="text") as bar:

    def show(output: TokenOutput) -> None:
        """Called with every token; the last one of a prompt has its completion."""
        if output.completion:
            bar.set_postfix(tokens=engine.stats.generation_tokens, refresh=False)
            bar.update()

    completions = engine.generate(prompts, max_tokens=24, on_output=show)

for prompt, completion in zip(prompts, completions, strict=True):
    print(f"--- {completion.finish_reason}, {completion.seconds:.2f} s\n{prompt}{completion.text}")
