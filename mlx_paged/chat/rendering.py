"""The text that a chat template makes of a chat: every part of this package renders here."""

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Template
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from mlx_paged.chat.bounded import bounded
from mlx_paged.chat.budget import Budget, current
from mlx_paged.chat.marks import Divider, Rendered
from mlx_paged.chat.tools import completed

ALWAYS_RESERVED = frozenset(
    (
        *("self", "conversation", "conversations", "messages", "chat_template", "tools"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "sanitize_control_tokens", "kwargs", "template_kwargs"),
    )
)
"""Arguments of rendering that are no arguments of a template, in any version of transformers."""


def rendered(tokenizer: Any, messages: Sequence[Any], **options: Any) -> Rendered:
    """The text of a chat, which :func:`mlx_paged.chat.encoding.encoded` makes tokens of.

    Args:
        tokenizer: of mlx-lm, or of transformers.
        messages: the chat, which is not changed.
        options: arguments of ``apply_chat_template`` and of the template. Functions of `tools`
            without parameters get empty ones.

    Raises:
        TemplateTooLongError: the template takes more steps or time than this chat allows.
        Exception: whatever the template raises.
    """
    own = reserved_names() - {"tools"}
    if options.get("tools"):
        options = options | {"tools": completed(options["tools"])}
    given = {name: value for name, value in options.items() if name not in own}
    divider = Divider(tokenizer, [*messages, given])
    messages = divider.messages(messages)
    options = options | divider.value(given) | {"tokenize": False}
    budget = Budget.of(messages, options)
    with budget.active():
        text = str(tokenizer.apply_chat_template(messages, **options))
    return divider.taken_out(text)


@lru_cache
def reserved_names() -> frozenset[str]:
    """Names of arguments of rendering, which a client may not set as arguments of the template."""
    functions = (
        PreTrainedTokenizerBase.apply_chat_template,
        chat_template_utils.render_jinja_template,
    )
    found = {name for each in functions for name in inspect.signature(each).parameters}
    return (ALWAYS_RESERVED | found) - {"documents"}


_plain = chat_template_utils._compile_jinja_template


@lru_cache(maxsize=32)
def _bounded(text: str) -> Template:
    return bounded(_plain("").environment, text)


def _compile(text: str) -> Template:
    """What transformers calls for a template: a bounded one while :func:`rendered` runs."""
    template: Template = _plain(text) if current() is None else _bounded(text)
    return template


chat_template_utils._compile_jinja_template = _compile
