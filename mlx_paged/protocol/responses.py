"""OpenAI's Responses API on the machinery of chat completions. Imports no mlx."""

import time
import uuid
from collections.abc import Iterator
from itertools import count
from typing import Any

from mlx_paged.protocol import client_tools
from mlx_paged.protocol.constraints import require, require_json
from mlx_paged.protocol.deltas import Delta
from mlx_paged.protocol.fields import OWN, Fields, is_list
from mlx_paged.protocol.images import Part, image_part, joined, of_result
from mlx_paged.protocol.json_text import written
from mlx_paged.protocol.messages import event, folded, objects, text_of
from mlx_paged.protocol.request_body import Refusal
from mlx_paged.vision.images import has_image, is_image, parts_of

PATH = "/v1/responses"

NAMES = {"reasoning_effort": "reasoning.effort", "max_tokens": "max_output_tokens"}
NAMES |= {"response_format": "text.format", "messages": "input"}
"""How fields of chat completions are called here."""

ECHOED: Fields = {
    **dict.fromkeys(("instructions", "max_output_tokens", "temperature", "top_p", "reasoning")),
    **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}},
    **{"text": {"format": {"type": "text"}}},
}
"""Fields of a request that its answer repeats, and what is repeated of those that are not given."""

ONCE = ("instructions", "metadata", "text", "tools")
"""Fields of :data:`ECHOED` that may be long: only the last event of a stream repeats them."""

MAX_ECHO = 1 << 16
"""Bytes of JSON of a field that an answer repeats; of a longer one it has what is repeated of one
that is not given."""

SEAL = "mlx_paged:"
"""How `encrypted_content` of our own begins; the reasoning follows as it is."""

SHELLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
"""Kinds of items that are calls of tools with a schema of their own: the name of the tool, and what
an item calls the arguments."""

OUTPUTS = ("function_call_output", "custom_tool_call_output", *(f"{x}_output" for x in SHELLS))
"""Kinds of items that are results of calls."""

PASSED_OVER = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("tool_search_call", "tool_search_output", "computer_call", "computer_call_output"),
    *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    *("program", "program_output", "compaction", "compaction_summary", "additional_tools"),
)
"""Kinds of items that the model is not shown, and that are ignored by name."""

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
TEXTS |= {"reasoning_text": "text"}
"""Kinds of content parts that are text, and where that is."""


def as_chat(body: Fields) -> Fields:
    """The body for chat completions that asks for the same; unknown fields stay as they are, and
    names with a dot tell of unknown parts.

    Raises:
        ValueError: a field cannot be obeyed.
    """
    chat = {name: value for name, value in body.items() if name not in OWN["responses"]}
    require(body.get("n", 1) == 1, "n", "1", body.get("n"))
    require("messages" not in body, "messages", "nothing, but items in input", "some")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    instructions = _text(body.get("instructions"), "instructions")
    given = objects(items, "input")
    for i, item in enumerate(given):
        kind = item.get("type")
        require(isinstance(kind, str | None), f"input[{i}].type", "a text", kind)
    passed = {f"input.{item['type']}" for item in given if item.get("type") in PASSED_OVER}
    is_shown = any(item.get("type") not in PASSED_OVER for item in given)
    require(is_shown, "input", "an item that the model can be shown", sorted(passed))
    chat |= dict.fromkeys(passed, True)
    chat["messages"] = folded(instructions, _turns(given))
    included = body.get("include") or []
    require(is_list(str, included), "include", "a list of texts", included)
    for part in included:
        if part == "message.output_text.logprobs":
            chat["logprobs"] = True
        elif part != "reasoning.encrypted_content":
            chat[f"include.{part}"] = True
    asked = {"max_tokens": body.get("max_output_tokens")}
    asked |= _thought(body) | _format(body) | _tools(body)
    return chat | {name: value for name, value in asked.items() if value is not None}


def _thought(body: Fields) -> Fields:
    wanted = body.get("reasoning") or {}
    require(isinstance(wanted, dict), "reasoning", "an object", wanted)
    others = {f"reasoning.{name}": x for name, x in wanted.items() if name != "effort"}
    return others | {"reasoning_effort": wanted.get("effort")}


def _format(body: Fields) -> Fields:
    text = body.get("text") or {}
    require(isinstance(text, dict), "text", "an object", text)
    chat = {f"text.{name}": value for name, value in text.items() if name != "format"}
    wanted = text.get("format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        wanted = {"type": "json_schema", "json_schema": wanted}
    return chat | {"response_format": wanted}


def _tools(body: Fields) -> Fields:
    """Tools that the client runs are offered to the model; other tools are not."""
    offered = client_tools.read(body.get("tools"))
    chat: Fields = {"tools": offered.functions} | dict.fromkeys(offered.ignored, True)
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in client_tools.KINDS:
        named = offered.named(choice.get("name"), choice["type"] == "custom")
        choice = {"type": "function", "function": {"name": named}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice = _allowed(choice, offered)
    return chat | {"tool_choice": choice}


def _allowed(choice: Fields, offered: client_tools.Offered) -> Fields:
    """A choice of allowed tools in the form of chat completions. Tools that the client does not run
    are passed over, as in `tools`."""
    listed = objects(choice.get("tools"), "tool_choice.tools")
    own = [tool for tool in listed if tool.get("type") in client_tools.KINDS]
    names = [offered.named(tool.get("name"), tool["type"] == "custom") for tool in own]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    allowed = {"mode": choice.get("mode"), "tools": tools}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _text(content: Any, name: str) -> str:
    """The text of a string or of parts that are text."""
    parts = parts_of(content)
    for part in parts:
        require(isinstance(part, dict), name, "text or a list of objects", part)
        if str(part.get("type")) not in TEXTS:
            kind = str(part.get("type"))
            raise ValueError(f"{name}: expected text, got a part of the type {kind!r:.80}")
    given = [{"type": "text", "text": part.get(TEXTS[part["type"]])} for part in parts]
    return text_of(given, name)


def _content(content: Any, name: str) -> str | list[Part]:
    """A content that may have images; a text if there are none."""
    if not has_image(content):
        return _text(content, name)
    return [_seen(part, name) for part in content]


def _seen(part: Any, name: str) -> Part:
    """A part of a message with images."""
    return (
        image_part(part, name) if is_image(part) else {"type": "text", "text": _text([part], name)}
    )


def _known(item: dict[str, Any], name: str) -> dict[str, Any]:
    """The item; other calls as calls of functions. Raises ValueError for a malformed call."""
    kind = item.get("type")
    if kind == "custom_tool_call":
        arguments = client_tools.arguments_of_input(item.get("input"), f"{name}.input")
        return item | {"type": "function_call", "arguments": arguments}
    if kind in SHELLS:
        tool, key = SHELLS[kind]
        given = item.get(key)
        require(isinstance(given, dict), f"{name}.{key}", "an object", given)
        return item | {"type": "function_call", "name": tool, "arguments": written(given)}
    return item


def _call(item: dict[str, Any], name: str) -> dict[str, Any]:
    """A call of a function in the form of chat completions."""
    require_json(item.get("arguments"), f"{name}.arguments")
    require(isinstance(item.get("name"), str), f"{name}.name", "a text", item.get("name"))
    space = item.get("namespace")
    require(isinstance(space, str | None), f"{name}.namespace", "a text", space)
    own = {"name": client_tools.flat(space, item["name"]), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": own}


def _result(item: dict[str, Any], name: str) -> dict[str, Any]:
    """The result of a call."""
    output, answers = item.get("output"), item.get("call_id")
    if item["type"] == "local_shell_call_output" and answers is None:
        answers = item.get("id")
    if item["type"] == "shell_call_output":
        output = written(objects(output, f"{name}.output"))
    if item["type"] == "apply_patch_call_output" and output is None:
        output = item.get("status")
    require(isinstance(answers, str), f"{name}.call_id", "the id of a call", answers)
    result = _content(of_result(output), f"{name}.output")
    return {"role": "tool", "tool_call_id": answers, "content": result}


def _turns(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The items as messages of a chat: what the assistant thinks, says and calls is one message."""
    said = dict[str, Any]()
    for i, given in enumerate(items):
        if given.get("type") in PASSED_OVER:
            continue
        name = f"input[{i}]"
        item = _known(given, name)
        kind, role = item.get("type", "message"), item.get("role")
        is_said = kind in ("reasoning", "function_call") or (kind, role) == ("message", "assistant")
        ends = {"message": ("content",), "reasoning": ("content", "tool_calls")}
        if said and (not is_said or any(said.get(name) for name in ends.get(kind, ()))):
            yield _said(said)
            said = {}
        if kind == "function_call":
            said.setdefault("tool_calls", []).append(_call(item, name))
        elif kind == "reasoning":
            sealed = str(item.get("encrypted_content") or "")
            own = sealed.removeprefix(SEAL) if sealed.startswith(SEAL) else ""
            if thought := _text(item.get("content"), f"{name}.content") or own:
                said.setdefault("reasoning_content", []).append(thought)
        elif kind in OUTPUTS:
            yield _result(item, name)
        elif kind == "message" and role == "assistant":
            said["content"] = _text(item.get("content"), f"{name}.content")
        else:
            expected = "messages, reasoning, function_call or function_call_output"
            require(kind == "message", f"{name}.type", expected, kind)
            roles = {"user": "user", "system": "system", "developer": "system"}
            require(str(role) in roles, f"{name}.role", f"assistant, {', '.join(roles)}", role)
            content, name = item.get("content"), f"{name}.content"
            content = _content(content, name) if role == "user" else _text(content, name)
            yield {"role": roles[str(role)], "content": content}
    if said:
        yield _said(said)


def _said(said: Fields) -> Fields:
    """A message of the assistant, whose thoughts are one text."""
    thoughts = said.get("reasoning_content")
    own = {"reasoning_content": joined(thoughts)} if thoughts else {}
    return {"role": "assistant", "content": ""} | said | own


class Items:
    """A response and its output items, and the events that tell of them."""

    def __init__(self, body: Fields) -> None:
        given = {name: body[name] for name in ECHOED if body.get(name) is not None}
        given = {name: x for name, x in given.items() if len(written(x)) <= MAX_ECHO}
        own: Fields = {"id": f"resp_{uuid.uuid4().hex}", "object": "response"}
        own["created_at"] = int(time.time())
        self._offered = client_tools.read(body.get("tools"))
        self._sealed = "reasoning.encrypted_content" in (body.get("include") or ())
        self._numbers = count()
        self._open: dict[str, Any] = {}  # the item that has begun
        self._is_begun = False
        self._told_last = {name: x for name, x in given.items() if name in ONCE}
        first = {name: x for name, x in given.items() if name not in ONCE}
        self.response: Fields = own | {"status": "in_progress", "store": False} | ECHOED | first
        self.response |= {"model": body.get("model") or "default_model", "output": []}
        self.response |= {"error": None, "incomplete_details": None, "usage": None}

    def begin(self) -> Iterator[bytes]:
        """The events before all others; nothing if they have been made."""
        if not self._is_begun:
            self._is_begun = True
            yield self._event("created", response=self.response)
            yield self._event("in_progress", response=self.response)

    def add(self, delta: Delta) -> Iterator[bytes]:
        """The events of a piece of an answer, or of all of it."""
        yield from self.begin()
        for part in delta.parts:
            if part.kind == "tool_call":
                yield from self._call(part.call)
            else:
                kind = "message" if part.kind == "text" else part.kind
                yield from self._part(kind, part.text, part.logprobs)

    def _call(self, call: Fields) -> Iterator[bytes]:
        yield from self._close()
        function = call["function"]
        own, given = self._offered.of(function["name"]), function["arguments"]
        kind, prefix, key, event_of = "function_call", "fc", "arguments", "function_call_arguments"
        told = {"name": own.name}
        if own.is_custom:
            kind, prefix, key, event_of = (
                "custom_tool_call",
                "ctc",
                "input",
                "custom_tool_call_input",
            )
            given, told = client_tools.text_of_input(given), {}
        yield self._start(kind, prefix, {"call_id": call["id"], **own.names, key: ""})
        yield self._at(f"{event_of}.delta", delta=given)
        self._open[key] = given
        yield self._at(f"{event_of}.done", **told, **{key: given})

    def end(self, is_whole: bool, usage: dict[str, Any]) -> Iterator[bytes]:
        """The events after all others."""
        status = "completed" if is_whole else "incomplete"
        yield from self.begin()
        yield from self._close(status)
        reason = None if is_whole else {"reason": "max_output_tokens"}
        self.response |= {"status": status, "incomplete_details": reason, "usage": usage}
        self.response |= self._told_last
        yield self._event(status, response=self.response)

    def fail(self, error: Refusal) -> Iterator[bytes]:
        yield from self.begin()
        told = {"code": error.code or "server_error", "message": str(error)}
        self.response |= {"status": "failed", "error": told} | self._told_last
        yield self._event("failed", response=self.response)

    def _part(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> Iterator[bytes]:
        is_message = kind == "message"
        name = "output_text" if is_message else "reasoning_text"
        if self._open.get("type") != kind:
            yield from self._close()
            own: Fields = {"role": "assistant"} if is_message else {"summary": []}
            yield self._start(kind, "msg" if is_message else "rs", own | {"content": []})
            part: Fields = {"type": name, "text": ""}
            part |= {"annotations": [], "logprobs": []} if is_message else {}
            yield self._at("content_part.added", content_index=0, part=part)
            self._open["content"].append(part)
        (part,) = self._open["content"]
        part["text"] += text
        told: Fields = {"delta": text}
        if is_message:
            part["logprobs"] += logprobs
            told["logprobs"] = logprobs
        yield self._at(f"{name}.delta", content_index=0, **told)

    def _start(self, kind: str, prefix: str, own: Fields) -> bytes:
        self._open = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        self._open |= own
        self.response["output"].append(self._open)
        return self._event("output_item.added", output_index=self._index, item=self._open)

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        """The events that end the open item, if one is open."""
        item, self._open = self._open, {}
        for part in item.get("content", ()):
            at = {"item_id": item["id"], "output_index": self._index, "content_index": 0}
            told = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._event(f"{part['type']}.done", **at, **told)
            yield self._event("content_part.done", **at, part=part)
            if item["type"] == "reasoning" and self._sealed:
                item["encrypted_content"] = SEAL + part["text"]
        if item:
            item["status"] = status
            yield self._event("output_item.done", output_index=self._index, item=item)

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _at(self, kind: str, **content: Any) -> bytes:
        """An event of the open item."""
        return self._event(kind, item_id=self._open["id"], output_index=self._index, **content)

    def _event(self, kind: str, **content: Any) -> bytes:
        number = {"sequence_number": next(self._numbers)}
        return event({"type": f"response.{kind}"} | number | content)
