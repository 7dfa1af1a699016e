"""OpenAI-compatible servers as engines of the bench: a trace over HTTP, each answer a stream.

A client sees no step and no K/V, so a run has streams and no ticks. A prompt is text of as many
common words as the trace has tokens, equal words for equal tokens. Every round uses the words in
another order, because a server may still know the prompts of the round before. The server's own
counts of tokens (`usage`) are used; without them a piece of a stream counts as one token.
"""

import asyncio
import importlib.util
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from bench.flags.engines import APIS
from bench.serving.replay import Clock
from bench.serving.run import Run, Stream
from bench.serving.servers import Counters
from bench.serving.trace import Job
from bench.serving.workload import OpenLoop
from mlx_paged.arguments import missing

if TYPE_CHECKING:
    from aiohttp import ClientSession

COMMON = (
    "the of and to in is that for it as was with be by on not this are or from at which but have"
    " an had they you were one all we can more if no out so up what time new only some could"
)
WORDS = COMMON.split()
"""Most tokenizers have a token for each of them."""

WARM_UP = (Job(0.0, (1, 2, 3, 4), 3), Job(0.0, (1, 2, 3, 4, 5), 3))
POLL_S = 0.001  # how often a closed loop looks for answers that have ended
CONNECT_S, SILENCE_S = 10.0, 600.0
NONCE = time.time_ns()  # the order of words differs from that of all earlier sessions
REASON_CHARS = 160


class Endpoint:
    """One server.

    Raises:
        ValueError: nothing answers there as an OpenAI-compatible server does.
    """

    def __init__(self, url: str, api: str, model: str | None) -> None:
        if importlib.util.find_spec("aiohttp") is None:
            raise ValueError(f"--url: {missing('aiohttp', 'bench')}")
        self.url, self.path, self.model = url, f"{url}/v1/{APIS[api]}", model
        self._num_plays = 0
        self._words = list(WORDS)
        warm_up = Run(url)
        try:
            self.model = self.model or asyncio.run(self._first_model())
            self.play(warm_up, OpenLoop(WARM_UP), lambda count: None)
        except _errors() as error:
            warm_up.failures.append(_reason(error))
        if warm_up.failures:
            raise ValueError(f"--url: {url}: no OpenAI-compatible server: {warm_up.failures[0]}")

    def play(self, run: Run, source: OpenLoop, on_tokens: Callable[[int], object]) -> None:
        """Send each job when it is due, until every stream has ended or failed."""
        cpu_s = time.process_time()
        self._words = random.Random(NONCE + self._num_plays).sample(WORDS, len(WORDS))
        self._num_plays += 1
        try:
            asyncio.run(self._play(run, source, on_tokens))
        except BaseException:
            run.is_partial = True
            raise
        finally:
            run.client_cpu_s = time.process_time() - cpu_s

    def text_of(self, job: Job) -> str:
        """A prompt in the words of the latest round."""
        return " ".join(self._words[token % len(WORDS)] for token in job.prompt)

    def _session(self) -> "ClientSession":
        from aiohttp import ClientSession, ClientTimeout, TCPConnector

        key = os.environ.get("OPENAI_API_KEY")
        return ClientSession(
            connector=TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S),
        )

    async def _first_model(self) -> str:
        async with self._session() as session, session.get(f"{self.url}/v1/models") as response:
            _check(response.status, await response.text())
            return str((await response.json())["data"][0]["id"])

    async def _play(self, run: Run, source: OpenLoop, on_tokens: Callable[[int], object]) -> None:
        clock = Clock()

        async def read(job: Job, stream: Stream) -> None:
            usage: dict[str, Any] = {}
            try:
                async for event in self._events(session, job):
                    if piece := _piece(event):
                        stream.times_s.append(clock.now())
                        stream.tokens += piece
                        on_tokens(1)
                    usage = event.get("usage") or usage
                _count(usage, stream, run)
                stream.is_done = True
            except _errors() as error:
                run.failures.append(_reason(error))

        async def answer(job: Job, streams: Sequence[Stream]) -> None:
            await asyncio.gather(*(read(job, stream) for stream in streams))
            source.completed()

        number = 0
        async with self._session() as session, asyncio.TaskGroup() as tasks:
            while not source.is_empty:
                for arrival_s, job in source.due(clock.now()):
                    streams = [Stream(number, arrival_s) for _ in range(job.samples)]
                    run.streams += streams
                    tasks.create_task(answer(job, streams))
                    number += 1
                if not source.is_empty:
                    await asyncio.sleep(max(POLL_S, source.next_s() - clock.now()))

    async def _events(self, session: "ClientSession", job: Job) -> AsyncIterator[dict[str, Any]]:
        """The events of one answer."""
        async with session.post(self.path, json=self._body(job)) as response:
            if response.status != 200:
                _check(response.status, await response.text())
            async for line in response.content:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    yield json.loads(data)
                elif line.startswith(b"data:"):
                    return
        raise ValueError("a stream broke off")

    def _body(self, job: Job) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": job.max_tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        text = self.text_of(job)
        if self.path.endswith(APIS["chat"]):
            return body | {"messages": [{"role": "user", "content": text}]}
        return body | {"prompt": text}


def _piece(event: dict[str, Any]) -> str:
    """The text that an event brings; ValueError if it brings an error."""
    if event.get("error"):
        raise ValueError(str(event["error"]))
    names = ("text", "content", "reasoning", "reasoning_content")
    deltas = [choice.get("delta") or choice for choice in event.get("choices") or ()]
    return "".join(str(delta.get(name) or "") for delta in deltas for name in names)


def _count(usage: dict[str, Any], stream: Stream, run: Run) -> None:
    """Take over a server's counts of tokens, if it sent any."""
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        computed = run.counters.prompt_tokens + int(usage["prompt_tokens"]) - cached
        run.counters = Counters(computed, run.counters.cached_prompt_tokens + cached)
        stream.counted = int(usage["completion_tokens"])


def _check(status: int, text: str) -> None:
    if status != 200:
        raise ValueError(f"status {status}: {text}")


def _errors() -> tuple[type[Exception], ...]:
    """What a server or the way to it can cause."""
    from aiohttp import ClientError

    return ClientError, OSError, ValueError, LookupError, TypeError, AttributeError


def _reason(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())[:REASON_CHARS]
