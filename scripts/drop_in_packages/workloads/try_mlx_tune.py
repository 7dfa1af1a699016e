"""mlx-tune: gradients of DPO and ORPO over a shared prefix, forked prompt caches, generation."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
from common import MODEL, arrays, attempt, show
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_tune import losses

mx.random.seed(0)
model, tokenizer = load(str(MODEL))
model.freeze()
linear_to_lora_layers(model, 2, {"rank": 4, "scale": 4.0, "dropout": 0.0})
prompt = tokenizer.encode("def size(values):\n    total = 0\n    for value in values:\n        ")
chosen = mx.array([prompt + tokenizer.encode("total += value\n    return total")])
rejected = mx.array([prompt + tokenizer.encode("print(x)\n\n\n")])
size = {"prompt_length": len(prompt)}
size |= {"chosen_length_py": chosen.shape[1], "rejected_length_py": rejected.shape[1]}
lengths = mx.array([chosen.shape[1]]), mx.array([rejected.shape[1]])
pair = (model, chosen, rejected, chosen.shape[1], rejected.shape[1], len(prompt))


def gradients(loss: object, **options: object) -> list[object]:
    work = partial(loss, **options, **size)
    (value, count), grads = nn.value_and_grad(model, work)(model, chosen, rejected, *lengths)
    return [value, count, [grad for _, grad in tree_flatten(grads)]]


attempt("log-probabilities", lambda: losses.compute_log_probs_pair_shared_prefix(*pair))
reference = {"reference_chosen_logprobs": mx.array([-20.0])}
reference["reference_rejected_logprobs"] = mx.array([-30.0])
attempt("DPO", gradients, losses.dpo_loss, **reference)
attempt("ORPO", gradients, losses.orpo_loss)
attempt("SimPO", gradients, losses.simpo_loss)
template = losses.build_shared_prompt_cache(model, prompt)
show("template", template is not None)
for n in range(3):
    fork = losses.fork_prompt_cache(model, template)
    show(f"fork {n}", fork is not None)
    options = {"max_tokens": 8 + n, "temperature": 0.0, "prompt_cache": fork}
    attempt(
        f"completion {n}",
        lambda options=options: losses.generate_with_log_probs(model, tokenizer, prompt, **options),
    )
attempt("template at the end", lambda: arrays(template))
