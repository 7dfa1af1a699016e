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

ALWAYS_RESERVED = frozenset(
    (
        *("self", "conversation", "conversations", "messages", "chat_template", "tools"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "sanitize_control_tokens", "kwargs", "template_kwargs"),
    )
)
"""Arguments of rendering that are no arguments of a template, in any version of transformers."""


def rendered(tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
    """The text of a chat.

    Args:
        tokenizer: of mlx-lm, or of transformers.
        messages: the chat, which is not changed.
        options: arguments of ``apply_chat_template`` and of the template.

    Raises:
        TemplateTooLongError: the template takes more steps or time than this chat allows.
        Exception: whatever the template raises.
    """
    budget = Budget.of(messages, options)
    with budget.active():
        return str(tokenizer.apply_chat_template(messages, **options | {"tokenize": False}))


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
