"""A client of good requests, whose answers must stay the same and come in time."""

import threading
import time
from typing import Any

from scripts.attack.wire import BUSY, Request, complaint, events, exchange, post, strict

PROMPTS = ("def read_lines(path):\n", "class Stack:\n", "import os\n\n\ndef main(")
MAX_TOKENS = 12
PAUSE_S = 0.25
RETRY_S = 1.0  # after a 503, whose Retry-After is as long


class Canary:
    """Greedy questions in three APIs, streamed and whole, each compared with its first answer.

    Attributes:
        seconds: of each answer, with the waits that 503 asked for.
        num_busy: answers 503 with Retry-After.
        findings: answers that differ, are refused or come too late.
    """

    def __init__(self, port: int, key: str, bound: float) -> None:
        self.seconds: list[float] = []
        self.num_busy = 0
        self.findings: list[str] = []
        self._port, self._key, self._bound = port, key, bound
        self._questions = [
            (path, body | {"stream": stream})
            for prompt in PROMPTS
            for path, body in _forms(prompt)
            for stream in (False, True)
        ]
        self._first: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._is_up = threading.Event()
        self._num_lives = 0
        self.last_right = time.monotonic()

    def start(self) -> None:
        """Ask everything once, before others ask. Raises RuntimeError if an answer is bad."""
        for path, body in self._questions:
            text, wrong = self._ask(path, body, 60.0)
            if wrong:
                raise RuntimeError(f"the canary's first question: {wrong}")
            self._first.append(text)
        self.up()
        self._thread.start()

    def up(self) -> None:
        """The server listens."""
        self._num_lives += 1
        self.last_right = time.monotonic()
        self._is_up.set()

    def down(self) -> None:
        """From now on no answer counts, until the server listens again."""
        self._num_lives += 1
        self._is_up.clear()

    def stop(self) -> None:
        self._ended.set()
        self._is_up.set()
        self._thread.join()

    def _work(self) -> None:
        number = 0
        while not self._ended.wait(PAUSE_S):
            self._is_up.wait()
            index = number % len(self._questions)
            number += 1
            life, started = self._num_lives, time.monotonic()
            text, wrong = self._in_time(*self._questions[index], started)
            took = time.monotonic() - started
            was_left = wrong == str(BUSY) and self._ended.is_set()  # it would have asked again
            if life == self._num_lives and not was_left:
                self._judge(index, text, wrong, took)

    def _judge(self, index: int, text: str, wrong: str, took: float) -> None:
        self.seconds.append(took)
        path, body = self._questions[index]
        if not wrong and text != self._first[index]:
            wrong = f"answer {text!r}: expected {self._first[index]!r}"
        if not wrong:
            self.last_right = time.monotonic()
        if not wrong and took > self._bound:
            wrong = f"answered after {took:.1f} s: expected at most {self._bound:g} s"
        if wrong:
            stream = "streamed" if body["stream"] else "whole"
            self.findings.append(f"canary, {path}, {stream}: {wrong}")

    def _in_time(self, path: str, body: dict[str, Any], started: float) -> tuple[str, str]:
        """Ask again after a 503, as it says, until the time is over."""
        while True:
            text, wrong = self._ask(path, body, 3 * self._bound)
            is_over = time.monotonic() - started > self._bound or self._ended.is_set()
            if wrong != str(BUSY) or is_over:
                return text, wrong
            self.num_busy += 1
            time.sleep(RETRY_S)

    def _ask(self, path: str, body: dict[str, Any], patience: float) -> tuple[str, str]:
        """The text of the answer, and what is wrong; "503" if the server is busy."""
        request = Request(post(path, body, self._key), (200,), patience=patience)
        reply = exchange(self._port, request)
        if wrong := complaint(request, reply):
            return "", wrong
        if reply.status == BUSY:
            return "", str(BUSY)
        try:
            if not body["stream"]:
                return _whole(strict(reply.body)), ""
            return "".join(map(_piece, events(reply.body))), ""
        except (KeyError, IndexError, TypeError, ValueError) as error:
            return "", f"{error!r} in {reply.body[:300]!r}"


def _forms(prompt: str) -> list[tuple[str, dict[str, Any]]]:
    messages = [{"role": "user", "content": prompt}]
    return [
        ("/v1/completions", {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}),
        (
            "/v1/chat/completions",
            {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0},
        ),
        ("/v1/messages", {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}),
        ("/v1/responses", {"input": prompt, "max_output_tokens": MAX_TOKENS, "temperature": 0}),
    ]


def _whole(answer: Any) -> str:
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    if "output" in answer:
        parts = [part for item in answer["output"] for part in item["content"]]
        return "".join(part["text"] for part in parts)
    return "".join(block["text"] for block in answer["content"])


def _piece(event: Any) -> str:
    """The text that an event of a stream adds."""
    if "choices" in event:
        choice = event["choices"][0]
        return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    if event["type"] == "response.output_text.delta":
        return str(event["delta"])
    if event["type"] == "content_block_delta":
        return str(event["delta"]["text"])
    if event["type"] in ("error", "response.failed"):
        raise ValueError(f"the stream failed: {event}")
    return ""
