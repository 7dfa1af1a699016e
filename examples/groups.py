"""Groups of samples as for GRPO, then a second turn by forks: python examples/groups.py [MODEL]"""

import sys
from statistics import fmean, pstdev

from mlx_lm import load

from mlx_paged import Completion, Engine, demo_model_path

PROMPTS = ["def add(a, b):\n", "def is_even(n):\n", "class Point:\n"]
GROUP = 8


def reward(completion: Completion) -> float:
    """A stand-in: the share of lines that return something."""
    lines = completion.text.splitlines() or [""]
    return sum("return" in line for line in lines) / len(lines)


model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else demo_model_path())
engine = Engine(model, tokenizer, max_running=len(PROMPTS) * GROUP)

# A prompt is computed once; its eight samples share the K/V.
groups = engine.sample(PROMPTS, GROUP, max_tokens=24, temperature=1.0, seed=0)
for prompt, group in zip(PROMPTS, groups, strict=True):
    rewards = [reward(completion) for completion in group]
    spread = pstdev(rewards) or 1.0
    advantages = [(r - fmean(rewards)) / spread for r in rewards]
    # What a trainer needs beside them: the tokens, and their log-probabilities when drawn.
    logprobs = [sum(completion.logprobs) for completion in group]
    print(f"{prompt!r}: rewards {fmean(rewards):.2f} in the mean")
    print("  advantages  ", *(f"{a:7.2f}" for a in advantages))
    print("  log-probs   ", *(f"{p:7.1f}" for p in logprobs))

# A second turn: four requests go on from one that was kept, each with the same words after it.
parent = engine.add_request(PROMPTS[0], max_tokens=16, keep=True)
while engine.has_work:
    engine.step()
turns = [
    engine.fork(parent, "\n# test:\n", max_tokens=12, temperature=1.0, seed=i) for i in range(4)
]
engine.release(parent)  # its blocks live on in the forks
ended = {}
while engine.has_work:
    for output in engine.step():
        if output.completion:
            ended[output.request_id] = output.completion
for number in turns:
    print(f"fork {number}: {ended[number].text!r}")
print(f"prompt tokens computed: {engine.stats.prompt_tokens}")
