"""Coding agents' turns reuse what earlier ones computed: sessions in the form in which the clients
send them, with made-up text, against a model that follows a script."""

import http.client
import json
from urllib.parse import urlsplit

import pytest

from mlx_paged.protocol import prompts
from scripts.agents_model import SHELLS
from tests.support import TIMEOUT
from tests.support.commands.shell_agent import say, scripted

RULES = "\n".join(f"{i}. Keep file {i} short, and test what you change in it." for i in range(20))
SYSTEM = f"You are a coding agent. These are the rules of the house.\n{RULES}\n"
SCHEMA = {"type": "object", "additionalProperties": False}
QUESTIONS = ("Fix the test of the parser.", "Now explain in a word what was wrong.")
RESULT = "".join(f"line {i}: a made-up line of a file\n" for i in range(8))


def function(name, *names):
    properties = {each: {"type": "string", "description": f"the {each}"} for each in names}
    parameters = SCHEMA | {"properties": properties, "required": list(names)}
    text = f"{name} does what its name says. " * 3
    return {"name": name, "description": text, "parameters": parameters}


def tools_of(shell):
    made = [function(f"tool_{i}", "path", "text") for i in range(6)]
    return [*made, function(shell, SHELLS[shell])]


class Claude:
    """Claude Code: a header that changes with each request, a turn of the system among the others,
    and a mark for the cache on the newest block."""

    path = "/v1/messages"

    def body(self, session, number, turns):
        header = f"cc_version=2.1.332.{session:03x}; cc_entrypoint=sdk-cli; cch={number:05x};"
        ephemeral = {"cache_control": {"type": "ephemeral"}}
        system = [f"x-anthropic-billing-header: {header}", "You are Claude Code.", SYSTEM]
        messages = []
        for kind, *turn in turns:
            if kind == "user":
                reminder = [] if messages else ["<system-reminder>none</system-reminder>"]
                blocks = [{"type": "text", "text": text} for text in reminder + turn]
                messages.append({"role": "user", "content": blocks})
                if reminder:
                    messages.append({"role": "system", "content": f"Directory: /s{session}"})
            elif kind == "call":
                call_id, name, arguments = turn
                block = {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
                messages.append({"role": "assistant", "content": [block]})
            elif kind == "result":
                block = {"type": "tool_result", "tool_use_id": turn[0], "content": turn[1]}
                messages.append({"role": "user", "content": [block | {"is_error": False}]})
            else:
                block = {"type": "text", "text": turn[0]}
                messages.append({"role": "assistant", "content": [block]})
        last = next(m for m in reversed(messages) if m["role"] == "user")
        last["content"][-1] |= ephemeral
        tools = [
            {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
            for t in tools_of("Bash")
        ]
        return {
            "model": "agent",
            "max_tokens": 32_000,
            "system": [{"type": "text", "text": text} | ephemeral for text in system],
            "messages": messages,
            "tools": tools,
            "thinking": {"type": "adaptive"},
            "metadata": {"user_id": f"user_session_{session}"},
        }

    def read(self, answer):
        usage, (block,) = answer["usage"], answer["content"]
        cached = usage["cache_read_input_tokens"]
        if block["type"] == "text":
            return cached, ("say", block["text"])
        return cached, ("call", block["id"], block["name"], block["input"])


class Codex:
    """Codex: everything again in each request, nothing kept, the environment in a turn."""

    path = "/v1/responses"

    def body(self, session, number, turns):
        def message(role, text):
            kind = "output_text" if role == "assistant" else "input_text"
            return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

        items = [message("developer", "<permissions instructions>none</permissions instructions>")]
        items += [message("user", f"<environment_context>/s{session}</environment_context>")]
        for kind, *turn in turns:
            if kind == "call":
                call = {"call_id": turn[0], "name": turn[1], "arguments": json.dumps(turn[2])}
                items.append({"type": "function_call"} | call)
            elif kind == "result":
                result = {"call_id": turn[0], "output": turn[1]}
                items.append({"type": "function_call_output"} | result)
            else:
                items.append(message("user" if kind == "user" else "assistant", turn[0]))
        return {
            "model": "agent",
            "instructions": SYSTEM,
            "input": items,
            "tools": [{"type": "function", "strict": False} | t for t in tools_of("exec_command")],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": f"session-{session}",
        }

    def read(self, answer):
        cached = answer["usage"]["input_tokens_details"]["cached_tokens"]
        (item,) = answer["output"]
        if item["type"] == "message":
            return cached, ("say", item["content"][0]["text"])
        return cached, ("call", item["call_id"], item["name"], json.loads(item["arguments"]))


class OpenCode:
    """opencode: chat completions, the environment at the end of the system's text."""

    path, shell = "/v1/chat/completions", "bash"

    def system(self, session):
        return [{"role": "system", "content": f"{SYSTEM}\n<env>/s{session}</env>"}]

    def content(self, text):
        return text

    def body(self, session, number, turns):
        messages = self.system(session)
        for kind, *turn in turns:
            if kind == "call":
                own = {"name": turn[1], "arguments": json.dumps(turn[2])}
                call = {"id": turn[0], "type": "function", "function": own}
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            elif kind == "result":
                result = {"tool_call_id": turn[0], "content": self.content(turn[1])}
                messages.append({"role": "tool"} | result)
            else:
                role = "user" if kind == "user" else "assistant"
                messages.append({"role": role, "content": self.content(turn[0])})
        tools = [{"type": "function", "function": t} for t in tools_of(self.shell)]
        body = {"model": "agent", "messages": messages, "tools": tools, "max_tokens": 32_000}
        return body | {"tool_choice": "auto"}

    def read(self, answer):
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        message = answer["choices"][0]["message"]
        if not message.get("tool_calls"):
            return cached, ("say", message["content"])
        (call,) = message["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        return cached, ("call", call["id"], call["function"]["name"], arguments)


class Qwen(OpenCode):
    """qwen-code: chat completions with lists of parts, the environment in a first exchange."""

    shell = "run_shell_command"

    def system(self, session):
        return [
            {"role": "system", "content": self.content(SYSTEM)},
            {"role": "user", "content": self.content(f"This is Qwen Code. Directory: /s{session}")},
            {"role": "assistant", "content": self.content("Got it. Thanks for the context!")},
        ]

    def content(self, text):
        return [{"type": "text", "text": text}]

    def body(self, session, number, turns):
        metadata = {"metadata": {"sessionId": f"{session}", "promptId": f"{session}#{number}"}}
        return super().body(session, number, turns) | metadata


def asked(url, path, body):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    assert response.status == 200, answer
    return answer


@pytest.fixture(scope="module")
def url():
    with scripted() as found:
        yield found


@pytest.fixture
def rendered(monkeypatch):
    """The tokens of each prompt, its text, and the text of prompt and answer."""
    found, encode = [], prompts.encode

    def recorded(model, fields, *options):
        (prompt,) = encode(model, fields, *options)
        tokens = [model.tokenizer.decode([token]) for token in prompt.tokens]
        found.append((tokens, "".join(tokens), "".join(tokens) + say(fields)))
        return [prompt]

    monkeypatch.setattr(prompts, "encode", recorded)
    return found


def num_common(tokens, text, before):
    """How many of the tokens are within what a text has in common with an earlier one."""
    pairs = enumerate(zip(text, before, strict=False))
    left = next((i for i, (a, b) in pairs if a != b), min(len(text), len(before)))
    for index, token in enumerate(tokens):
        left -= len(token)
        if left < 0:
            return index
    return len(tokens)


@pytest.mark.parametrize("client", [Claude(), Codex(), OpenCode(), Qwen()], ids=lambda c: type(c))
def test_turns_and_sessions_reuse_what_they_have_in_common(url, rendered, client):
    """At least 95 % of it; a new session begins with the system's text and the tools of others."""
    for session in (1, 2):
        turns, number = [], 0
        for question in QUESTIONS:
            turns.append(("user", f"{question} This is session {session}."))
            while turns[-1][0] != "say":
                body = client.body(session, number, turns)
                cached, turn = client.read(asked(url, client.path, body))
                tokens, text, _ = rendered[-1]
                common = max(
                    (num_common(tokens, text, old) for *_, old in rendered[:-1]), default=0
                )
                assert cached >= 0.95 * common, (session, number)
                if number:
                    assert common > num_common(tokens, text, rendered[-2][1])
                elif session == 2:
                    shared = "".join(tokens[:common])
                    assert RULES in shared and all(f'"tool_{i}"' in shared for i in range(6))
                turns.append(turn)
                if turn[0] == "call":
                    turns.append(("result", turn[1], RESULT))
                number += 1
        assert number == 4
