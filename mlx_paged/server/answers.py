"""Answers requests for completions: as one JSON object, or as server-sent events."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar
from urllib.parse import quote

from starlette.datastructures import State
from starlette.types import Receive, Scope, Send

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.ticket import Ticket
from mlx_paged.protocol import prompts, thinking
from mlx_paged.protocol.choices import CompletionChoice
from mlx_paged.protocol.deltas import Delta
from mlx_paged.protocol.json_text import written
from mlx_paged.protocol.replies import Reply
from mlx_paged.protocol.request_body import Refusal
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.server.computed import Computed, options_of, reasons_of, times_of
from mlx_paged.server.held_bytes import ENTRY_BYTES, Share
from mlx_paged.server.json_answer import JsonAnswer
from mlx_paged.server.loaded_model import Model
from mlx_paged.server.request_log import GONE, record_of
from mlx_paged.server.tickets import Tickets

LOGGER = logging.getLogger(__name__)

COMMENT_AFTER_S = 0.08
PATIENCE_S = 10.0  # for a prompt to be read: a comment begins the stream, and hides the status
COMMENT_EVERY_S = 1.0
COMMENT = b": waiting for the first token\n\n"
QUIET_S = 10.0  # of a stream that has begun: proxies close one that is silent for a minute
STREAM = {"content-type": "text/event-stream", "cache-control": "no-cache"}
STREAM |= {"x-accel-buffering": "no"}  # nginx sends each event on as it comes


@dataclass(kw_only=True)
class Answer(Reply):
    """One answer, an ASGI application."""

    state: State  # of Starlette's application
    path: str  # of the model
    arrived: float  # by time.monotonic
    threads: Executor | None  # that encode the prompt; None: those of the event loop
    share: Share  # bytes that are held for it
    failure: str = ""  # of a stream that ended badly
    first_seconds: float | None = None  # from the arrival to the first token
    submitted_at: dict[int, float] = field(default_factory=dict)  # by choice: to the engine
    submitted: asyncio.Event = field(default_factory=asyncio.Event)  # what it asks for can be done
    ignored: list[str] = field(default_factory=list)  # fields without effect
    sign_of_life: ClassVar[bytes] = b": still generating\n\n"  # of a stream

    @property
    def headers(self) -> dict[str, str]:
        told = ", ".join(map(quote, sorted(self.ignored)))[:1000]
        found = {"x-ignored-fields": told} if told else {}
        if self.max_tokens is not None:
            found["x-max-tokens"] = str(self.max_tokens)
        return found

    def ignore(self, names: Iterable[str]) -> None:
        """Tell the client and the log of fields without effect. Raises Refusal if none may be."""
        names = [self.names.get(name, name) for name in names]
        self.ignored += names
        if names and self.state.args.strict_fields:
            unknown = ", ".join(names)
            message = f"{unknown}: unknown, expected only known fields"[:1000]
            raise Refusal(400, message, param=names[0])
        for name in set(names) - self.state.seen:
            if len(self.state.seen) < 1000:
                self.state.seen.add(name)
                LOGGER.warning("requests have the field %.80r, which is ignored", name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, until the client disconnects."""
        answer = self._stream(send) if self.fields["stream"] else self._whole(scope, receive, send)
        work = asyncio.ensure_future(answer)
        gone = asyncio.ensure_future(_until_gone(receive))
        gone.add_done_callback(lambda _: work.cancel())
        record = record_of(scope)
        try:
            await work
        except asyncio.CancelledError:
            record.reason = "the client disconnected before the end of its answer"
            if self.state.forced:
                record.reason = "the server was stopped before the end of its answer"
                record.status = record.status if record.status != GONE else 503
        finally:
            gone.cancel()
            record.reason = record.reason or self.failure
            record.parts += self._told()
            record.computed = self._computed()

    def _computed(self) -> Computed | None:
        """What was computed, for those who observe requests; None without a choice."""
        if not self.choices:
            return None
        usage, times = Reply.usage(self), times_of(self.choices, self.submitted_at)
        if times["first_token"] is None and self.first_seconds is not None:
            times["first_token"] = self.arrived + self.first_seconds
        return Computed(
            model=self.fields["adapter"] or self.state.models.names.label(self.path),
            options=options_of(self.fields),
            input_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            output_tokens=usage["completion_tokens"],
            finish_reasons=reasons_of(self.choices),
            failed=bool(self.failure),
            **times,
        )

    def _told(self) -> list[str]:
        """What the log tells of the answer."""
        if not self.choices:
            return []
        usage, seconds = Reply.usage(self), self.first_seconds
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        tokens = f"{usage['prompt_tokens']} tokens in, {cached} cached"
        first = [] if seconds is None else [f"first after {seconds:.3f} s"]
        model = f"model {self.fields['model']!r:.80}"
        return [model, f"{tokens}, {usage['completion_tokens']} out", *first]

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole answer when all completions have ended."""
        whole: dict[int, Delta] = {}
        async with aclosing(self._pieces()) as pieces:
            async for choice, delta in pieces:
                entries = sum(1 + len(entry["top_logprobs"]) for entry in delta.logprobs)
                self.share.grow(entries * ENTRY_BYTES, "the answer")
                whole.setdefault(choice.index, Delta()).add(delta)

        def make() -> JsonAnswer:
            return JsonAnswer(self.whole(whole), headers=self.headers)

        answer = await asyncio.to_thread(make)  # it may describe a long prompt
        self.share.grow(len(answer.body), "the answer")
        await answer(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        """Send each piece of text as an event, comments until the first one, and later a sign of
        life whenever nothing was sent for a while."""
        is_open = has_event = False
        latest, lock = time.monotonic(), asyncio.Lock()  # an event may be sent in pieces

        async def write(body: bytes, more_body: bool = True) -> None:
            nonlocal is_open, latest
            async with lock:
                if not is_open:
                    is_open = True
                    raw = [(k.encode(), v.encode()) for k, v in (STREAM | self.headers).items()]
                    await send({"type": "http.response.start", "status": 200, "headers": raw})
                await send({"type": "http.response.body", "body": body, "more_body": more_body})
                latest = time.monotonic()

        async def live() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):  # wait_for of Python 3.11 may lose a cancel
                    await self.submitted.wait()
            await asyncio.sleep(self.arrived + COMMENT_AFTER_S - time.monotonic())
            while not has_event:
                await write(COMMENT)
                await asyncio.sleep(COMMENT_EVERY_S)
            while True:
                await asyncio.sleep(latest + QUIET_S - time.monotonic())
                async with lock:
                    is_silent = time.monotonic() >= latest + QUIET_S
                if is_silent:
                    await write(self.sign_of_life)

        lives = asyncio.ensure_future(live())
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    has_event = True
                    if event:
                        await write(event)
            lives.cancel()
            await write(b"", more_body=False)
        except Refusal as error:
            if not is_open:
                raise
            lives.cancel()
            self.failure = str(error)
            await write(self._error_event(error), more_body=False)
        finally:
            lives.cancel()

    async def _events(self) -> AsyncGenerator[bytes]:
        """The events of a stream; empty ones for tokens that add nothing."""
        begin, options = written(self.head)[:-1], self.fields["stream_options"]
        async with aclosing(self._pieces()) as pieces:
            async for choice, delta in pieces:
                if not delta and choice.completion is None:
                    yield b""
                    continue
                *early, last = delta.in_order()
                entries = [choice.entry(each) | {"finish_reason": None} for each in early]
                events = b""
                for entry in (*entries, choice.entry(last)):
                    part: dict[str, Any] = {"choices": [entry]}
                    if options.get("continuous_usage_stats"):
                        part["usage"] = self.usage()
                    events += f"data: {begin}, {written(part)[1:]}\n\n".encode()
                yield events
        if options.get("include_usage"):
            yield _event(self.head | {"choices": [], "usage": self.usage()})
        yield b"data: [DONE]\n\n"

    def _error_event(self, error: Refusal) -> bytes:
        return _event(error.as_json())

    async def _pieces(self) -> AsyncGenerator[tuple[CompletionChoice, Delta]]:
        """The choices' new parts as they come. Raises Refusal instead, or after some of them."""
        fields, metrics = self.fields, self.state.metrics
        samples, num_prompts = fields["best_of"], len(fields.get("prompt", [0]))
        count = num_prompts * samples
        places = min(count, max(samples, self.state.args.decode_concurrency))  # at a time
        models, client = self.state.models, next(iter(fields["share"]), "")
        async with models.use(self.path, places, client) as model, AsyncExitStack() as stack:
            self.ignore(thinking.template_args(model, fields)[1])
            self.ignore(prompts.without_effect(model, fields))
            with self.refusing():
                run = asyncio.get_running_loop().run_in_executor
                params = await run(self.threads, self._read, model)
                self.share.grow(self._num_scores(params) * ENTRY_BYTES, "the answer")
                stack.enter_context(model.holding(sum(p.held_bytes for p in self.prompts)))
                for each in params:
                    if not model.service.has_compiled(each):
                        await run(self.state.compiles, self.compile, model.service.compile, each)
                submit = partial(self._submit, model, params)
                tickets = Tickets(submit, num_prompts, samples, places)
                stack.enter_context(_kept(tickets, self.state.open_tickets))
                await tickets.begin()
            self.submitted.set()
            self.choices = [
                CompletionChoice(index, model, fields, self.prompts[index // samples])
                for index in range(count)
            ]
            told = [self.arrived] * count  # when a choice got its latest token
            try:
                async for index, output in tickets.outputs():
                    choice, now = self.choices[index], time.monotonic()
                    self.first_seconds = self.first_seconds or now - self.arrived
                    metrics.token(self.path, now - told[index], not choice.num_tokens)
                    told[index] = now
                    if fields["logprobs"]:  # they are described beside the event loop
                        delta = await run(self.state.describers, choice.add, output)
                    else:
                        delta = choice.add(output)
                    if choice.is_cut and choice.completion is None:
                        tickets.abort(index)
                    if choice.failure:
                        raise choice.failure
                    yield choice, delta
            except Refusal:
                raise
            except Exception as error:  # e.g. from a detokenizer
                LOGGER.exception("an answer failed")
                raise Refusal(500, "the answer could not be made") from error
            finally:
                now = time.monotonic()
                tickets.close()
                for choice in self.choices:
                    done, reason = choice.completion, choice.engine_reason
                    times = (None,) if done is None else (now - self.arrived, done.queue_s)
                    metrics.ended(self.path, reason, *times)

    def _read(self, model: Model) -> list[SamplingParams]:
        """As :meth:`read`, with the server's defaults."""
        args = self.state.args
        read = self.read(model, args, args.chat_template_args)
        adapter = self.adapter_of(model)
        return [replace(params, adapter=adapter) for params in read] if adapter else read

    def adapter_of(self, model: Model) -> str | None:
        """The name by which the engine has the adapter that the request asks for, which is loaded
        if it has no name yet. Raises Refusal and ValueError as :meth:`ServedAdapters.use`."""
        if self.fields["adapter"] is None:
            return None
        adapter: str = self.state.models.adapters.use(model.service, self.fields["adapter"])
        self.fields["adapter"] = adapter  # a path has many spellings, which may be any text
        return adapter

    def _num_scores(self, params: list[SamplingParams]) -> int:
        """Log-probabilities of tokens of the prompts that are wanted."""
        pairs = zip(self.prompts, params, strict=True)
        counts = ((len(prompt.tokens), own.prompt_logprobs) for prompt, own in pairs)
        return sum(length * (1 + n) for length, n in counts if n is not None)

    async def _submit(
        self, model: Model, params: list[SamplingParams], first: int, last: int
    ) -> list[Ticket]:
        """Add the prompts from `first` up to `last` to the engine."""
        fields, given = self.fields, self.prompts[first:last]
        options = {name: fields[name] for name in ("priority", "cache_salt", "share")}

        def add(engine: Engine) -> list[int]:
            ids: list[int] = []
            for prompt in self.prompts if first == 0 else ():  # none is refused later
                engine.check_prompt(prompt.tokens)
            added = range(first * fields["best_of"], last * fields["best_of"])
            self.submitted_at |= dict.fromkeys(added, time.monotonic())
            try:
                for prompt, own in zip(given, params[first:last], strict=True):
                    sampled = prompt.tokens, fields["best_of"], own
                    marks = prompts.marks(prompt, fields)
                    ids += engine.add_samples(
                        *sampled, turn_ends=prompt.turn_ends, marks=marks, **options
                    )
            except ValueError:
                for request_id in ids:
                    engine.abort(request_id)
                raise
            return ids

        with self.refusing():
            return await asyncio.to_thread(model.service.adopt, add)


@contextmanager
def _kept(tickets: Tickets, among: set[Tickets]) -> Iterator[None]:
    among.add(tickets)
    try:
        yield
    finally:
        among.remove(tickets)


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {written(content)}\n\n".encode()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
