"""How much a model thinks before it answers. Any thread may call these functions."""

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from mlx_paged.protocol.fields import Fields
from mlx_paged.protocol.model_traits import ModelTraits

SPACES = (" ", "  ", "\n", "\n\n", "\n\n\n", "\t", "\r\n", " \n")
"""White space that models write before a thought, each one token."""

Processor = Callable[[mx.array, mx.array], mx.array]


def template_args(model: ModelTraits, fields: Fields) -> tuple[Fields, list[str]]:
    """Arguments of the chat template that obey the fields about thinking, and the names of fields
    that cannot be obeyed: the template does not know them, or the model never thinks."""
    abilities, thinks = model.abilities, model.format.thinks
    effort, wanted = fields.get("reasoning_effort"), fields.get("enable_thinking")
    args: Fields = {}
    ignored = ["thinking_budget"] if fields.get("thinking_budget") and not thinks else []
    name = "enable_thinking"
    if effort is not None:
        if abilities.takes_effort:
            args["reasoning_effort"] = model.format.efforts.get(effort, effort)
        elif effort != "none":
            ignored.append("reasoning_effort")
        if wanted is None:
            wanted, name = effort != "none", "reasoning_effort"
    if wanted is not None and abilities.switch:
        args[abilities.switch] = wanted
    elif wanted not in (None, thinks) and name not in (*args, *ignored):
        ignored.append(name)
    return args, ignored


def limit(
    model: ModelTraits, num_prompt: int, is_open: bool, budget: int, may_call: bool = False
) -> Processor:
    """A processor of logits that lets the thought at the beginning of an answer have `budget`
    tokens; the tokens that end it follow then. It evaluates nothing.

    Args:
        num_prompt: tokens of the prompt.
        is_open: the prompt ends inside the thought.
        may_call: calls of tools may follow the thought.
    """
    marks = model.format.limit(may_call)
    assert marks is not None
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    start, end, forced = (tuple(encode(text)) for text in marks)
    spaces = mx.array(sorted({token for text in SPACES for token in encode(text)[-1:]}))

    def end_thought(tokens: mx.array, logits: mx.array) -> mx.array:
        num_new = tokens.size - num_prompt
        if num_new < budget:
            return logits
        own = tokens[num_prompt:]
        begun = mx.array(0) if is_open else _opened(own, start, spaces)
        spent = num_new - begun - budget  # tokens behind the last one that the thought may have
        is_late = (begun >= 0) & (spent >= 0) & (spent < len(forced))
        is_over = is_late & ~_has(own, end, begun, begun + budget)
        token = mx.array(forced)[mx.clip(spent, 0, len(forced) - 1)]
        only = mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -mx.inf)
        return mx.where(is_over, only.astype(logits.dtype)[None], logits)

    return end_thought


def _opened(own: mx.array, start: Sequence[int], spaces: mx.array) -> mx.array:
    """The position behind the mark that opens a thought, before which white space may stand; -1 if
    the answer begins with no thought."""
    num_spaces = mx.cumprod((own[:, None] == spaces).any(axis=1)).sum()
    end = num_spaces + len(start)
    at = mx.minimum(num_spaces + mx.arange(len(start)), own.size - 1)
    is_there = (own[at] == mx.array(list(start))).all() & (end <= own.size)
    return mx.where(is_there, end, -1)


def _has(own: mx.array, mark: Sequence[int], first: mx.array, last: mx.array) -> mx.array:
    """Whether a mark ends at one of the positions behind `first`, up to `last`."""
    count = own.size - len(mark) + 1
    if count <= 0:
        return mx.array(False)
    hits = mx.stack([own[i : i + count] == token for i, token in enumerate(mark)]).all(axis=0)
    ends = mx.arange(count) + len(mark)
    return (hits & (ends > first) & (ends <= last)).any()
