"""Policy gradients with an adapter that the engine samples from: python examples/grpo.py [MODEL]

As in GRPO (Shao et al. 2024, arXiv:2402.03300), without its clip and KL term: each group has one
update, so that its samples come from the numbers that are trained."""

import sys
from statistics import fmean, pstdev

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_paged import Completion, Engine, demo_model_path

PROMPT, GROUP, UPDATES, SCALE = "def add(a, b):\n", 8, 3, 8.0


def reward(completion: Completion) -> float:
    """A stand-in: the share of tokens that occur once."""
    return len(set(completion.tokens)) / len(completion.tokens)


def loss(model: nn.Module, rows: mx.array, wanted: mx.array, advantages: mx.array) -> mx.array:
    """`wanted` [rows, tokens - 1]: 1 where the next token was sampled."""
    losses = nn.losses.cross_entropy(model(rows[:, :-1]), rows[:, 1:])
    return (losses * wanted * advantages[:, None]).sum() / wanted.sum()


path = sys.argv[1] if len(sys.argv) > 1 else demo_model_path()
base, tokenizer = load(path)
engine = Engine(base, tokenizer, adapters={}, max_running=GROUP)
model, _ = load(path)  # the trainer has its own layers; the engine's stay as they are
model.freeze()
linear_to_lora_layers(model, 2, {"rank": 8, "scale": SCALE, "dropout": 0.0})
optimizer, step = optim.Adam(3e-3), nn.value_and_grad(model, loss)
prompt = tokenizer.encode(PROMPT)
for update in range(UPDATES):
    arrays = dict(tree_flatten(model.trainable_parameters()))
    version = engine.update_adapter("policy", arrays, scale=SCALE).version
    (group,) = engine.sample(
        [prompt], GROUP, max_tokens=16, temperature=1.0, seed=update, adapter="policy"
    )
    assert {completion.adapter_version for completion in group} == {version}
    rewards = [reward(completion) for completion in group]
    spread = pstdev(rewards) or 1.0
    advantages = mx.array([(r - fmean(rewards)) / spread for r in rewards])
    most = max(len(completion.tokens) for completion in group)
    rows = mx.array([prompt + c.tokens + [0] * (most - len(c.tokens)) for c in group])
    lengths = mx.array([[len(prompt) - 1, len(prompt) + len(c.tokens) - 1] for c in group])
    places = mx.arange(rows.shape[1] - 1)
    wanted = ((places >= lengths[:, :1]) & (places < lengths[:, 1:])).astype(mx.float32)
    value, gradients = step(model, rows, wanted, advantages)
    optimizer.update(model, gradients)
    mx.eval(model.parameters(), optimizer.state)
    print(f"{version[:8]}: reward {fmean(rewards):.3f}, loss {value.item():.3f}")
