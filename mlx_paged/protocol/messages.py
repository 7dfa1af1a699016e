"""Anthropic's Messages API on the machinery of chat completions. Imports no mlx."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from mlx_paged.protocol.constraints import require
from mlx_paged.protocol.deltas import Delta, Part
from mlx_paged.protocol.fields import OWN, Fields
from mlx_paged.protocol.images import as_data_url, joined, of_result
from mlx_paged.protocol.json_text import written
from mlx_paged.protocol.request_body import ContextExceeded, Refusal
from mlx_paged.vision.images import has_image, is_image

PATHS = ("/v1/messages", "/v1/messages/count_tokens")
NAMES = {"reasoning_effort": "output_config.effort", "thinking_budget": "thinking.budget_tokens"}
NAMES |= {"enable_thinking": "thinking.type", "response_format": "output_config.format"}
"""How fields of chat completions are called here."""

KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
KINDS |= {413: "request_too_large", 503: "overloaded_error"}
"""Types of errors by status."""

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Stop reasons by OpenAI's finish reasons."""


CLIENT = "custom"
"""The type of tools that the client runs."""

BILLING = "x-anthropic-billing-header:"
"""How a first block of the system prompt begins that differs between requests and sessions."""


def error_json(error: Refusal) -> dict[str, Any]:
    kind = KINDS.get(error.status, KINDS[400] if error.status < 500 else "api_error")
    message = _of_context(error) if isinstance(error, ContextExceeded) else str(error)
    return {"type": "error", "error": {"type": kind, "message": message}}


def _of_context(error: ContextExceeded) -> str:
    """The words in which Anthropic's clients look for the sizes, to ask for less."""
    if error.num_prompt >= error.limit:
        return f"prompt is too long: {error.num_prompt} tokens > {error.limit - 1} maximum"
    sizes = f"{error.num_prompt} + {error.num_new} > {error.limit}"
    return (
        f"input length and `max_tokens` exceed context limit: {sizes},"
        " decrease input length or `max_tokens` and try again"
    )


def as_chat(body: Fields, counts: bool) -> Fields:
    """The body for chat completions that asks for the same; unknown fields stay as they are.

    Args:
        counts: the request only counts tokens and needs no `max_tokens`.

    Raises:
        ValueError: a field cannot be obeyed.
    """
    chat = {name: value for name, value in body.items() if name not in OWN["messages"]}
    if body.get("n", 1) != 1:
        raise ValueError(f"n: expected 1, got {str(body['n'])[:80]}")
    if not counts and body.get("max_tokens") is None:
        raise ValueError("max_tokens: expected an integer >= 1, got nothing")
    messages = objects(body.get("messages"), "messages")
    turns = (turn for i, message in enumerate(messages) for turn in _turns(message, i))
    chat["messages"] = folded(_system(body.get("system")), turns)
    if [turn["role"] for turn in chat["messages"][-1:]] == ["assistant"]:
        chat["continue_final_message"] = True
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    if any(map(_names_citations, messages)):
        chat["document.citations"] = True
    tools, ignored = _client_tools(body.get("tools"))
    chat |= ignored | {"tools": [_tool(tool) for tool in tools]}
    choice = body.get("tool_choice") or {}
    require(isinstance(choice, dict), "tool_choice", "an object", choice)
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    if choice:
        named = {"type": "function", "function": {"name": choice.get("name")}}
        choices = {"auto": "auto", "none": "none", "any": "required", "tool": named}
        if str(choice.get("type")) not in choices:
            raise ValueError(f"tool_choice: expected one of {', '.join(choices)}")
        chat["tool_choice"] = choices[choice["type"]]
    config = body.get("output_config") or {}
    require(isinstance(config, dict), "output_config", "an object", config)
    wanted = body.get("output_format") or config.get("format")
    if wanted:
        is_schema = isinstance(wanted, dict) and wanted.get("type") == "json_schema"
        if not is_schema:
            raise ValueError("output_config: expected a format of the type json_schema")
        schema = {"schema": wanted.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    others = {f"output_config.{k}": v for k, v in config.items() if k not in ("format", "effort")}
    asked = others | _thought(body.get("thinking") or {})
    asked["reasoning_effort"] = config.get("effort")
    return chat | {name: value for name, value in asked.items() if value is not None}


def _thought(thinking: Any) -> Fields:
    require(isinstance(thinking, dict), "thinking", "an object", thinking)
    kind = thinking.get("type")
    if thinking and kind not in ("adaptive", "disabled", "enabled"):
        raise ValueError(f"thinking: expected adaptive, disabled or enabled, got {str(kind)!r:.80}")
    own = {"type", "budget_tokens"}
    chat = {f"thinking.{name}": x for name, x in thinking.items() if name not in own}
    chat["thinking_budget"] = thinking.get("budget_tokens")
    chat["enable_thinking"] = None if kind in (None, "adaptive") else kind == "enabled"
    return chat


def objects(value: Any, name: str) -> list[dict[str, Any]]:
    """The value, if it is a list of objects. Raises ValueError, which names the field, if not."""
    is_list = isinstance(value, list) and value and all(isinstance(x, dict) for x in value)
    require(is_list, name, "a list of objects", value)
    return list(value)


def _client_tools(tools: Any) -> tuple[list[dict[str, Any]], Fields]:
    """The tools that the client runs, and fields that name the others, which nobody would run: they
    are ignored beside the former. Raises ValueError without one of these."""
    given = objects(tools, "tools") if tools else []
    others = {f"tools.{t['type']!s:.80}": True for t in given if t.get("type", CLIENT) != CLIENT}
    for i, tool in enumerate(given):
        is_named = tool.get("type", CLIENT) != CLIENT or isinstance(tool.get("name"), str)
        require(is_named, f"tools[{i}].name", "a text", tool.get("name"))
    kept = [tool for tool in given if tool.get("type", CLIENT) == CLIENT]
    expected = f"one of the type {CLIENT}, which the client runs"
    require(kept or not given, "tools", expected, [*others])
    return kept, others


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def text_of(content: Any, name: str) -> str:
    """The text of a string or of blocks of text."""
    if content is None or isinstance(content, str):
        return content or ""
    blocks = objects(content, name) if content else []
    for block in blocks:
        if block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise ValueError(
                f"{name}: expected text, got a block of {str(block.get('type'))!r:.80}"
            )
    return "".join(block["text"] for block in blocks)


def _system(content: Any) -> str:
    if isinstance(content, list) and content and text_of(content[:1], "system").startswith(BILLING):
        content = content[1:]
    return text_of(content, "system")


def folded(system: str, turns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A chat with at most one turn of the system, at its beginning. Later ones become text of the
    user's turn beside them, for templates refuse them, and they refuse two turns of a user. No turn
    moves, so that a longer chat has the same prefix."""
    chat = [{"role": "system", "content": system}] if system else []
    contents = [[turn["content"]] for turn in chat]
    joins = False  # whether the last turn ends with text of the system
    for turn in turns:
        is_system = turn["role"] == "system"
        is_first = not chat or chat[-1]["role"] == "system"
        role = "user" if is_system and not is_first else turn["role"]
        if chat and chat[-1]["role"] == role and (is_system or joins):
            contents[-1].append(turn["content"])
        else:
            chat.append(turn | {"role": role})
            contents.append([turn["content"]])
        joins = is_system and not is_first
    return [turn | {"content": joined(own)} for turn, own in zip(chat, contents, strict=True)]


def _turns(message: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    """A message as messages of a chat: each tool result is one of its own."""
    role, content, name = message.get("role"), message.get("content"), f"messages[{index}].content"
    is_role = role in ("user", "assistant", "system")
    require(is_role, f"messages[{index}].role", "user, assistant or system", role)
    require(isinstance(content, str | list), name, "text or a list of blocks", content)
    is_blocks = isinstance(content, list)
    blocks = objects(content, name) if is_blocks else [{"type": "text", "text": content}]
    blocks = _read_documents(blocks, name) if role == "user" else blocks
    parts, calls, thoughts = list[Fields](), list[Fields](), list[str]()
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            answers, result = block.get("tool_use_id"), _result(block, name)
            require(isinstance(answers, str), f"{name}.tool_use_id", "the id of a call", answers)
            yield {"role": "tool", "tool_call_id": answers, "content": result}
        elif kind == "tool_use" and role == "assistant":
            given = {} if block.get("input") is None else block["input"]
            require(isinstance(given, dict), f"{name}.input", "an object", given)
            function = {"name": block.get("name"), "arguments": written(given)}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking" and role == "assistant":
            thought = block.get("thinking")
            require(isinstance(thought, str | None), f"{name}.thinking", "a text", thought)
            thoughts += [thought] if thought else []
        elif kind == "image" and role == "user":
            parts.append(as_data_url(block))
        elif kind != "redacted_thinking" or role != "assistant":
            parts.append({"type": "text", "text": text_of([block], name)})
    if parts or calls:
        more: Fields = {"reasoning_content": joined(thoughts)} if thoughts else {}
        more |= {"tool_calls": calls} if calls else {}
        text = "".join(part.get("text", "") for part in parts)
        yield {"role": role, "content": parts if has_image(parts) else text} | more


def _result(block: dict[str, Any], name: str) -> str | list[Fields]:
    """The content of a tool's result; a text if it has no images."""
    failed = "Error: " if block.get("is_error") else ""
    content = _read_documents(of_result(block.get("content")), name)
    if not has_image(content):
        return failed + text_of(content, name)
    parts = [
        part if is_image(part) else {"type": "text", "text": text_of([part], name)}
        for part in content
    ]
    return [{"type": "text", "text": failed}, *parts] if failed else parts


def _read_documents(content: Any, name: str) -> Any:
    """The content with a block of text for each document, an empty line from the texts beside."""
    if not isinstance(content, list) or not content:
        return content
    given, blocks = objects(content, name), list[dict[str, Any]]()
    is_document = [block.get("type") == "document" for block in given]
    for i, block in enumerate(given):
        if is_document[i]:
            block = {"type": "text", "text": _document(block, name)}
        if any(is_document[max(i - 1, 0) : i + 1]) and i and block.get("type") == "text":
            block = {"type": "text", "text": "\n\n" + text_of([block], name)}
        blocks.append(block)
    return blocks


def _document(document: dict[str, Any], name: str) -> str:
    """The title, the context and the text of a document, each in lines of its own."""
    texts = [document.get("title"), document.get("context")]
    is_text = all(isinstance(text, str | None) for text in texts)
    require(is_text, name, "texts as title and context of a document", texts)
    return "\n".join(filter(None, [*texts, _source(document, name)]))


def _source(document: dict[str, Any], name: str) -> str:
    """The text that a document is. Raises ValueError, which names the kind of the document, if
    the document is none."""
    source = document.get("source")
    source = source if isinstance(source, dict) else {}
    kind, data = source.get("type"), source.get("data")
    if kind == "content":
        return text_of(source.get("content"), name)
    told = f"a document of the type {str(kind)!r:.40}, {str(source.get('media_type'))!r:.80}"
    if kind != "text" or not isinstance(data, str):
        raise ValueError(f"{name}: expected documents of text, got {told}")
    return data


def _names_citations(message: dict[str, Any]) -> bool:
    """Whether a message asks that its documents are cited."""
    content = message.get("content")
    wanted = [
        block.get("citations")
        for block in (content if isinstance(content, list) else ())
        if isinstance(block, dict) and block.get("type") == "document"
    ]
    return any(isinstance(each, dict) and each.get("enabled") for each in wanted)


class Blocks:
    """The content blocks of an answer, and the events that tell of them."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None  # of the block that is open

    @staticmethod
    def of(delta: Delta) -> list[dict[str, Any]]:
        """The blocks of a piece of an answer, or of all of it, in their order."""
        return [_block(part) for part in delta.parts if part.text or part.call]

    def events(self, blocks: list[dict[str, Any]]) -> Iterator[bytes]:
        """The events of new pieces of blocks."""
        for block in blocks:
            kind = block["type"]
            if kind == "tool_use":
                delta = {"type": "input_json_delta", "partial_json": written(block["input"])}
                first: dict[str, Any] = block | {"input": {}}
            else:
                delta = {"type": f"{kind}_delta", kind: block[kind]}
                first = block | {kind: ""}
            if kind != self._kind or kind == "tool_use":
                yield from self.end()
                self._index, self._kind = self._index + 1, kind
                yield self._event("content_block_start", content_block=first)
            yield self._event("content_block_delta", delta=delta)

    def end(self) -> Iterator[bytes]:
        """The event that ends the open block, if one is open."""
        if self._kind is not None:
            self._kind = None
            yield self._event("content_block_stop")

    def _event(self, kind: str, **content: Any) -> bytes:
        return event({"type": kind, "index": self._index} | content)


def _block(part: Part) -> dict[str, Any]:
    """The content block of a part of an answer."""
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    function = part.call["function"]
    own = {"name": function["name"], "input": json.loads(function["arguments"])}
    return {"type": "tool_use", "id": part.call["id"]} | own


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event with the name of its type."""
    return f"event: {content['type']}\ndata: {written(content)}\n\n".encode()
