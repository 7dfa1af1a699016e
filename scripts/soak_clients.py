"""Part of soak_server.py: what the clients of the server ask, and what its answers must be."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from jsonschema import validate

from scripts.soak import QUESTIONS, TOPICS

MAX_TOKENS = 24
LONGEST_HISTORY = 12  # messages of an agent, before it begins anew
SYSTEM = (
    "You are a careful assistant who works in a repository of a library for maps. Read a file "
    "before you speak of it. Answer in short sentences, name the file that you mean, and say so "
    "when you do not know. Never invent a name. Distances are in metres, angles in degrees."
)
"""With a tool's description it takes several blocks of K/V, which all agents share."""

SCHEMA = {
    "type": "object",
    "properties": {
        "topic": {"enum": list(TOPICS)},
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
        "known": {"type": "boolean"},
    },
    "required": ["topic", "number", "known"],
    "additionalProperties": False,
}
FILES = [f"src/{name}.py" for name in ("roads", "rivers", "index", "tiles", "labels")]
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Reads a file of the repository.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"enum": FILES}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n"
    "A call is <tool_call>\n{% raw %}{...}{% endraw %}\n</tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set tool_call = c.function %}<tool_call>\n"
    '{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with tool calls."""

BAD: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 3}]}),
    ("/v1/chat/completions", {"messages": "hello", "stream": True}),
    ("/v1/completions", {"prompt": "a", "max_tokens": -2}),
    ("/v1/messages", {"model": "another", "messages": [{"role": "user", "content": "hello"}]}),
]
PROBES = [f"Tell me {2 + index} facts about {topic}." for index, topic in enumerate(TOPICS)]


class WrongAnswer(AssertionError):
    """An answer that the server must not give."""


@contextmanager
def answer_of(
    port: int, path: str, body: Any = None, key: str | None = None
) -> Iterator[HTTPResponse]:
    """The server's answer, on a connection of its own that is closed behind it."""
    connection = HTTPConnection("127.0.0.1", port, timeout=3600)
    try:
        content = None if body is None else json.dumps(body)
        method, headers = "GET" if body is None else "POST", {"Content-Type": "application/json"}
        headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
        connection.request(method, path, content, headers)
        with connection.getresponse() as answer:
            yield answer
    finally:
        connection.close()


class Clients:
    """Threads that ask for everything at random, one thing each at a time.

    Attributes:
        counts: answers by kind; "cut" ones ended with the process.
        failures: what was wrong, a line each.
        gaps: seconds between the events of streams, since they were last taken.
        cached: prompt tokens that the server had already.
    """

    def __init__(self, port: int, count: int, pause: float, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.gaps: list[float] = []
        self.cached = 0
        self._port = port
        self._pause = pause
        self._ended, self._is_up = threading.Event(), threading.Event()
        self._num_lives = 0
        self._kinds: dict[str, Callable[[random.Random], None]] = {
            "chat": self._chat,
            "message": self._message,
            "agent": self._agent,
            "dropped": self._dropped,
            "guided": self._guided,
            "samples": self._samples,
            "refused": self._refused,
        }
        work = [(random.Random(f"{seed}:{index}"),) for index in range(count)]
        self._threads = [threading.Thread(target=self._work, args=each) for each in work]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def up(self) -> None:
        """The server listens."""
        self._num_lives += 1
        self._is_up.set()

    def down(self) -> None:
        """From now on calls may fail, until the server listens again."""
        self._is_up.clear()

    def stop(self) -> None:
        """Wait until all calls have ended."""
        self._ended.set()
        self._is_up.set()
        for thread in self._threads:
            thread.join()

    def probe(self) -> tuple[list[str], list[int]]:
        """Greedy answers to the same questions, and how many tokens of each prompt were known."""
        answers, known = list[str](), list[int]()
        for question in PROBES:
            turns = [("system", SYSTEM), ("user", question)]
            messages = [{"role": role, "content": text} for role, text in turns]
            body = self._post({"messages": messages, "temperature": 0})
            answers.append(body["choices"][0]["message"]["content"])
            known.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
        return answers, known

    def _work(self, rng: random.Random) -> None:
        while not self._ended.is_set():
            self._is_up.wait()
            life, kind = self._num_lives, rng.choice(list(self._kinds))
            try:
                self._kinds[kind](rng)
                self.counts[kind] += 1
            except Exception as error:  # a thread that ends would hide what comes after it
                if not self._is_up.is_set() or life != self._num_lives:
                    self.counts["cut"] += 1
                else:
                    self.failures.append(f"{kind}: {type(error).__name__}: {error}"[:300])
                    print(self.failures[-1], flush=True)
            self._ended.wait(rng.expovariate(1 / self._pause))

    def _post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
        with answer_of(self._port, path, {"max_tokens": MAX_TOKENS, **body}) as answer:
            content = answer.read()
        require(answer.status == 200, f"{answer.status} {content!r}")
        found = json.loads(content)
        details = found.get("usage", {}).get("prompt_tokens_details") or {}
        self.cached += details.get("cached_tokens", 0)
        return found

    def _question(self, rng: random.Random) -> dict[str, str]:
        form, topic = rng.choice(QUESTIONS), rng.choice(TOPICS)
        return {"role": "user", "content": form.format(number=rng.randint(2, 99), topic=topic)}

    def _chat(self, rng: random.Random) -> None:
        """A chat of a few turns, as a stream."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        for _ in range(rng.randint(1, 3)):
            messages.append(self._question(rng))
            body = {"messages": messages, "temperature": rng.choice((0, 0.8)), "stream": True}
            parts, before, reason = list[str](), 0.0, None
            for event in self._events("/v1/chat/completions", body):
                choice = event["choices"][0]
                parts.append(choice["delta"].get("content") or "")
                reason = choice["finish_reason"] or reason
                now = time.perf_counter()
                self.gaps += [now - before] if before else []
                before = now
            require(reason in ("stop", "length"), f"a stream ended with {reason}")
            messages.append({"role": "assistant", "content": "".join(parts)})

    def _message(self, rng: random.Random) -> None:
        """Anthropic's form."""
        body = {"system": SYSTEM, "messages": [self._question(rng)]}
        if rng.random() < 0.5:
            events = [
                event["type"] for event in self._events("/v1/messages", body | {"stream": True})
            ]
            is_whole = events[:1] == ["message_start"] and events[-1:] == ["message_stop"]
            return require(is_whole, f"events {events}")
        answer = self._post(body, "/v1/messages")
        require(answer["stop_reason"] in ("end_turn", "max_tokens"), str(answer))

    def _agent(self, rng: random.Random) -> None:
        """Calls of a tool, with a history that grows."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        messages.append(self._question(rng))
        for _ in range(rng.randint(2, LONGEST_HISTORY // 2)):
            body = {"messages": messages, "tools": [TOOL], "tool_choice": "required"}
            answer = self._post(body | {"temperature": 0.7, "max_tokens": 80})
            said = answer["choices"][0]["message"]
            calls = said.get("tool_calls") or []
            require(len(calls) > 0, f"no tool call in {said}")
            path = json.loads(calls[0]["function"]["arguments"])["path"]
            require(path in FILES, f"the tool has no path {path}")
            messages.append({"role": "assistant", "content": "", "tool_calls": calls[:1]})
            text = f"{path}: {rng.randint(10, 400)} lines about {rng.choice(TOPICS)}"
            messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": text})

    def _dropped(self, rng: random.Random) -> None:
        """A stream whose client leaves after a few events."""
        body = {"messages": [self._question(rng)], "stream": True, "max_tokens": 200}
        left = rng.randint(1, 12)
        for _ in self._events("/v1/chat/completions", body):
            left -= 1
            if not left:
                break

    def _guided(self, rng: random.Random) -> None:
        """An answer that a JSON schema describes."""
        form = {"type": "json_schema", "json_schema": {"name": "fact", "schema": SCHEMA}}
        body = {"messages": [self._question(rng)], "response_format": form, "max_tokens": 60}
        choice = self._post(body)["choices"][0]
        require(choice["finish_reason"] == "stop", str(choice))
        validate(json.loads(choice["message"]["content"]), SCHEMA)

    def _samples(self, rng: random.Random) -> None:
        body = {"messages": [self._question(rng)], "n": 3, "temperature": 1.0, "seed": 7}
        answer = self._post(body)
        require(len(answer["choices"]) == 3, f"{len(answer['choices'])} samples")

    def _refused(self, rng: random.Random) -> None:
        """A bad request."""
        path, body = rng.choice(BAD)
        with answer_of(self._port, path, body) as answer:
            content = answer.read()
        is_named = b"error" in content and 400 <= answer.status < 500
        require(is_named, f"{answer.status} {content!r} for {body}")

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        """The events of a stream. Whoever stops reading closes the connection."""
        with answer_of(self._port, path, {"max_tokens": MAX_TOKENS, **body}) as answer:
            require(answer.status == 200, f"{answer.status} at a stream")
            for line in answer:
                text = line.removeprefix(b"data: ").strip()
                if line.startswith(b"data: ") and text != b"[DONE]":
                    yield json.loads(text)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise WrongAnswer(message)
