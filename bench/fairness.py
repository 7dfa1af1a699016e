"""How many steps one client's requests delay another client's first token, over HTTP.

A server runs in this process and answers over real connections. One client sends many requests at
once and reads them as streams; another one sends one request after the other. Each request of the
other client is counted in steps of the engine: from its arrival at the engine to the step that
chose its first token, once alone and once beside the many. Counts need no idle machine.

    python -m bench.fairness --requests 500 --probes 100
"""

import argparse
import asyncio
import json
import random
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from bench.command import print_result, table
from bench.flags.fairness import parse
from bench.serving.http_engine import WORDS
from mlx_paged.engine.engine import Engine
from mlx_paged.runner.launched_step import LaunchedStep
from mlx_paged.server import flags as server_flags
from mlx_paged.server.__main__ import serving

MANY, FEW = "many", "few"
"""The clients, as the field `user` of their requests."""

MOST_MORE = 2
"""Steps that the first token may come later than alone."""

SERVER_S = 120.0
"""Seconds that the server may take to start, and a stream between two pieces."""


class StepCounter:
    """Counts the steps of an engine between a request's arrival and its first token.

    Attributes:
        found: of each request of the client with few, in the order of their first tokens.
    """

    def __init__(self, engine: Engine, step_ms: float) -> None:
        self.found: list[int] = []
        self._clock, self._step_s = engine.clock, step_ms / 1000
        self._launches: list[float] = []  # when each step was launched
        self._numbers: dict[int, int] = {}  # by identity of a step that is under way
        engine.observers.launched.append(self._launched)
        engine.observers.settled.append(self._settled)

    @property
    def num_steps(self) -> int:
        return len(self._launches)

    def _launched(self, launched: LaunchedStep) -> None:
        self._launches.append(self._clock())
        self._numbers[id(launched.report.step)] = len(self._launches)
        if self._step_s:
            time.sleep(self._step_s)

    def _settled(self, launched: LaunchedStep) -> None:
        number = self._numbers.pop(id(launched.report.step))
        for choice in launched.report.choices:
            request = choice.request
            if request.share == (f"user {FEW}",) and not request.generated:
                before = bisect_right(self._launches, request.arrival_time)
                self.found.append(number - before)


@contextmanager
def server(args: argparse.Namespace) -> Iterator[tuple[int, StepCounter]]:
    """A server in a thread of its own: its port, and the counter of its engine's steps."""
    queue = args.requests + 8 if args.queue is None else args.queue
    given = ["--port", "0", "--policy", args.policy, "--max-queue", str(queue)]
    given += ["--kv-memory", "0.2", "--max-connections", str(args.requests + 64)]
    given += ["--model", args.model] if args.model else []
    with serving(server_flags.parse(given)) as running:
        thread = threading.Thread(target=running.run)
        thread.start()
        try:
            latest = time.monotonic() + SERVER_S
            while not running.started:
                if time.monotonic() > latest or not thread.is_alive():
                    raise RuntimeError("the server has not started")
                time.sleep(0.01)
            [model] = running.models.loaded.values()
            counter = model.service.call(lambda engine: StepCounter(engine, args.step_ms))
            yield int(running.address[1]), counter
        finally:
            running.should_exit = True
            thread.join()


class Client:
    """One client of the server on a port."""

    def __init__(self, port: int, user: str) -> None:
        self._port, self._user = port, user
        self.statuses = Counter[int]()

    async def ask(self, prompt: str, max_tokens: int) -> bool:
        """Send a prompt and read its stream to the end; whether there was a token."""
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "user": self._user}
        raw = json.dumps(body | {"stream": True, "ignore_eos": True, "temperature": 0}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
            writer.write(head.encode() + raw)
            await writer.drain()
            status = int((await asyncio.wait_for(reader.readline(), SERVER_S)).split()[1])
            self.statuses[status] += 1
            has_token = False
            while line := await asyncio.wait_for(reader.readline(), SERVER_S):
                has_token = has_token or line.startswith(b'data: {"')
            return has_token and status == 200
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def probe(client: Client, prompts: Sequence[str]) -> None:
    """Send the prompts one after the other; each must get a token."""
    for prompt in prompts:
        if not await client.ask(prompt, 1) and client.statuses[200] == client.statuses.total():
            raise RuntimeError("a stream had no token")


async def beside(
    args: argparse.Namespace, port: int, counter: StepCounter, few: Client
) -> tuple[Client, int]:
    """Let the client with many send all its requests, and the other one its prompts meanwhile.
    Returns the client with many, and how many of its requests were under way at the end."""
    many, rng = Client(port, MANY), random.Random(1)
    flood = [
        asyncio.create_task(many.ask(text_of(rng, rng.randint(5, 200)), args.max_tokens))
        for _ in range(args.requests)
    ]
    first = counter.num_steps
    while many.statuses.total() < 1 or counter.num_steps < first + 10:
        await asyncio.sleep(0.01)
    await probe(few, prompts_of(args, 2))
    under_way = sum(not task.done() for task in flood)
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    return many, under_way


def text_of(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def prompts_of(args: argparse.Namespace, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [text_of(rng, args.prompt_tokens) for _ in range(args.probes)]


def summary(steps: Sequence[int]) -> dict[str, float]:
    p50, p99 = np.percentile(steps, [50, 99], method="higher").tolist() if steps else (0, 0)
    return {"count": len(steps), "p50": p50, "p99": p99, "max": max(steps, default=0)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Steps to the first token of the client with few, alone and beside the client with many.

    - `refused`: statuses of the client with few other than 200, with their counts.
    - `later`: the 99th percentile beside the many, less the same alone.
    - `many`: statuses of the other client's requests; `under_way` of them had not ended.
    """
    with server(args) as (port, counter):
        few = Client(port, FEW)
        asyncio.run(probe(few, prompts_of(args, 0)))
        counter.found.clear()
        asyncio.run(probe(few, prompts_of(args, 1)))
        alone = summary(counter.found)
        counter.found.clear()
        many, under_way = asyncio.run(beside(args, port, counter, few))
        found = summary(counter.found)
    refused = {status: n for status, n in few.statuses.items() if status != 200}
    later = found["p99"] - alone["p99"]
    is_fair = later <= MOST_MORE and not refused and found["count"] == args.probes
    is_fair = is_fair and under_way > 0
    return {
        "policy": args.policy,
        "requests": args.requests,
        "alone": alone,
        "beside": found,
        "later": later,
        "refused": refused,
        "many": dict(many.statuses),
        "under_way": under_way,
        "is_fair": is_fair,
    }


def main(argv: list[str] | None = None) -> None:
    result = measure(parse(argv))
    rows = [["steps to a first token", "p50", "p99", "max"]]
    for name in ("alone", "beside"):
        rows.append([name, *(f"{result[name][key]:.0f}" for key in ("p50", "p99", "max"))])
    print(table(rows))
    print_result("fairness", result)


if __name__ == "__main__":
    main()
