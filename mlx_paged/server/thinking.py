"""How much a model thinks before it answers. Any thread may call these functions."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_paged.server.fields import Fields
from mlx_paged.server.loaded_model import Model

Processor = Callable[[mx.array, mx.array], mx.array]


def template_args(model: Model, fields: Fields) -> tuple[Fields, list[str]]:
    """Arguments of the chat template that obey the fields about thinking, and the names of fields
    that cannot be obeyed: the template does not know them, or the model never thinks."""
    abilities, thinks = model.abilities, model.tokenizer.has_thinking
    effort, wanted = fields.get("reasoning_effort"), fields.get("enable_thinking")
    args: Fields = {}
    ignored = ["thinking_budget"] if fields.get("thinking_budget") and not thinks else []
    name = "enable_thinking"
    if effort is not None:
        if abilities.takes_effort:
            args["reasoning_effort"] = effort
        elif effort != "none":
            ignored.append("reasoning_effort")
        if wanted is None:
            wanted, name = effort != "none", "reasoning_effort"
    if wanted is not None and abilities.switch:
        args[abilities.switch] = wanted
    elif wanted not in (None, thinks) and name not in (*args, *ignored):
        ignored.append(name)
    return args, ignored


def limit(model: Model, num_prompt: int, begins_in_thought: bool, budget: int) -> Processor:
    """A processor of logits that lets each thought have `budget` tokens; the tokens that end it
    follow then. It evaluates nothing.

    Args:
        num_prompt: tokens of the prompt.
        begins_in_thought: whether the prompt ends inside a thought.
    """
    start, end = model.tokenizer.think_start_tokens, model.tokenizer.think_end_tokens

    def end_thought(tokens: mx.array, logits: mx.array) -> mx.array:
        num_new = tokens.size - num_prompt
        if num_new < budget:
            return logits
        own = tokens[num_prompt:]
        begun = mx.maximum(_after(own, start), 0 if begins_in_thought else -1)
        spent = num_new - begun - budget
        is_over = (begun > _after(own, end)) & (spent >= 0)
        token = mx.array(end)[mx.clip(spent, 0, len(end) - 1)]
        only = mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -mx.inf)
        return mx.where(is_over, only.astype(logits.dtype)[None], logits)

    return end_thought


def _after(tokens: mx.array, marker: Sequence[int]) -> mx.array:
    """The position after the last occurrence of a marker; -1 if there is none."""
    count = tokens.size - len(marker) + 1
    if count <= 0:
        return mx.array(-1)
    hits = mx.stack([tokens[i : i + count] == token for i, token in enumerate(marker)]).all(axis=0)
    return mx.where(hits, mx.arange(count) + len(marker), -1).max()
