"""Endpoints that encode prompts or decode tokens, and compute neither."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from mlx_paged.engine import estimates
from mlx_paged.engine.engine import Engine
from mlx_paged.protocol import prompts
from mlx_paged.protocol.constraints import require
from mlx_paged.protocol.fields import Fields
from mlx_paged.protocol.long_work import may_take_long
from mlx_paged.protocol.request_body import ContextExceeded, refusing
from mlx_paged.server.answers import Answer
from mlx_paged.server.loaded_model import Model

SWITCHES = ("add_special", "add_special_tokens", "parse_special", "return_token_strs")
"""Options of /tokenize and /detokenize, of llama-server and vLLM; `with_pieces` has one value."""


def as_text(body: Fields) -> Fields:
    """A body for completions of a request to /tokenize or /detokenize. Raises ValueError for an
    option that cannot be obeyed."""
    for name in SWITCHES:
        require(isinstance(body.get(name, True), bool), name, "true or false", body.get(name))
    for name, only in (("with_pieces", False), ("parse_special", True)):
        require(body.get(name, only) is only, name, str(only).lower(), body.get(name))
    chat = {name: body[name] for name in body if name not in (*SWITCHES, "with_pieces")}
    for name in ("content", "tokens"):
        if name in chat and "prompt" not in chat:
            chat["prompt"] = chat.pop(name)
    return chat


async def tokenize(answer: Answer) -> dict[str, Any]:
    """The token ids of `content`, as llama-server gives them, or of `prompt` or `messages`, as vLLM
    does. `content` gets no special tokens around it unless `add_special` is true."""
    body = answer.fields["body"]
    is_default = "content" not in body
    is_added = body.get("add_special", body.get("add_special_tokens", is_default))

    def encode(model: Model) -> dict[str, Any]:
        if "messages" in answer.fields:
            tokens = list(_prompt(answer, model).tokens)
        else:
            text = _only(answer.fields)
            require(isinstance(text, str), "prompt", "a text", text)
            tokens = prompts.tokens_of(model, text, is_added)
        found = {"count": len(tokens), "max_model_len": model.max_context, "tokens": tokens}
        if body.get("return_token_strs"):
            with may_take_long():
                found["token_strs"] = model.tokenizer.convert_ids_to_tokens(tokens)
        return found

    return await _asked(answer, encode)


async def detokenize(answer: Answer) -> dict[str, Any]:
    """The text of token ids, as `content` for clients of llama-server and as `prompt` for those of
    vLLM."""

    def decode(model: Model) -> dict[str, Any]:
        tokens = _only(answer.fields)
        require(isinstance(tokens, list), "tokens", "a list of token ids", tokens)
        model.token_ids.check_prompt("detokenize", tokens)
        expected = f"at most {model.max_context} ids, the context length"
        require(len(tokens) <= model.max_context, "tokens", expected, len(tokens))
        with may_take_long():
            text = model.tokenizer.decode(tokens)
        return {"content": text, "prompt": text}

    return await _asked(answer, decode)


async def apply_template(answer: Answer) -> dict[str, Any]:
    """The text that the chat template makes of messages."""

    def render(model: Model) -> dict[str, Any]:
        args = answer.state.args.chat_template_args
        return {"prompt": prompts.text_of_chat(model, answer.fields, args)}

    return await _asked(answer, render)


async def estimate(answer: Answer) -> dict[str, Any]:
    """What a request would cost now: tokens of its prompt, those of them that are known, those that
    are computed before it, and seconds until its first token."""

    def measure(model: Model) -> dict[str, Any]:
        limit, salt = model.max_context, answer.fields["cache_salt"]
        adapter = answer.adapter_of(model)
        try:
            tokens = _prompt(answer, model).tokens
        except ContextExceeded as error:
            return {"tokens": error.num_prompt, "max_model_len": limit, "fits": False}

        def ask(engine: Engine) -> dict[str, Any]:
            is_there = adapter is None or adapter in engine.adapters
            require(is_there, "adapters", "an adapter that is loaded", adapter)
            variant = None if adapter is None else engine.adapters[adapter]
            return estimates.estimate(engine, tokens, salt, variant)._asdict()

        return {"max_model_len": limit, "fits": True} | model.service.call(ask)

    return await _asked(answer, measure)


TOKEN_ENDPOINTS: dict[str, Callable[[Answer], Awaitable[dict[str, Any]]]] = {
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/apply-template": apply_template,
    "/v1/estimate": estimate,
}
"""By path: what makes the answer."""


async def _asked(answer: Answer, ask: Callable[[Model], dict[str, Any]]) -> dict[str, Any]:
    """What `ask` says of the model, on a thread that encodes prompts."""
    run = asyncio.get_running_loop().run_in_executor
    async with answer.state.models.use(answer.path, 0) as model:
        with refusing(answer.names):
            return await run(answer.threads, ask, model)


def _prompt(answer: Answer, model: Model) -> prompts.Prompt:
    _only(answer.fields)
    (prompt,) = prompts.encode(model, answer.fields, answer.state.args.chat_template_args)
    return prompt


def _only(fields: Fields) -> Any:
    """The prompt of a request that has one, or a list of messages."""
    given = fields.get("prompt", [None])
    require(len(given) == 1, "prompt", "one prompt", f"{len(given)} of them")
    return given[0]
