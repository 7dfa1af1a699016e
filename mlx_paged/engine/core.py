"""EngineCore: requests in, tokens out, over any runner. Knows no mlx."""

# The module `signal` looks each handler up in an enum.
from _signal import getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from signal import SIGINT
from typing import Any

from mlx_paged.arguments import integer, require_flags
from mlx_paged.constraint import Constraints
from mlx_paged.engine.beams import BeamCalls, BeamSearch
from mlx_paged.engine.cache_control import CacheControl
from mlx_paged.engine.one_thread import Occupancy, exclusive, exclusive_as
from mlx_paged.engine.pipeline import StepPipeline
from mlx_paged.engine.request_maker import (
    Queueing,
    RequestMaker,
    check_queueing,
    checked_params,
)
from mlx_paged.engine.text import (
    OutputProcessor,
    PromptEncoder,
    PromptLike,
    Tokenizer,
)
from mlx_paged.engine.token_ids import TokenIds
from mlx_paged.engine.waiting_calls import OnOutput, Streams
from mlx_paged.metrics.recorder import RecorderConfig, TickRecorder
from mlx_paged.metrics.stats import EngineStats
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.request import FinishReason, Request
from mlx_paged.sampling.grammar import Grammars
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.levels import Levels
from mlx_paged.scheduler.progress import append_token
from mlx_paged.scheduler.scheduler import Scheduler
from mlx_paged.scheduler.step import (
    Fault,
    Observers,
    Runner,
    SampledToken,
    StepResult,
)


class EngineCore(CacheControl, BeamCalls):
    """The engine without a model: queues requests, runs steps through a runner, returns tokens.

    One thread uses it at a time; meanwhile every other thread gets a RuntimeError. A failure ends
    the requests that caused it and no others. The engine can go on after any exception, Ctrl-C
    included. A call that adds requests adds all of them or, if it raises, none.

    Attributes:
        ticks: the latest steps, newest last.
        observers: functions that see the steps.
        ready: outputs that the next :meth:`step` returns.
        clock: seconds, for all times of requests and steps.
        token_ids: checks ids of tokens; any thread may use it.
        device_faults: steps that the device failed in, since the latest token.
    """

    def __init__(
        self,
        scheduler: Scheduler,  # decides what is computed
        runner: Runner[Any],  # computes it
        stats: EngineStats,
        *,
        tokenizer: Tokenizer | None = None,  # for text prompts, stop strings and text output
        vocab_size: int | None = None,  # columns of the logits; None: unknown
        embedding_rows: int | None = None,  # ids of prompts are below it; None: as `vocab_size`
        seed: int | None = None,  # of the random streams of requests that have no seed
        lookahead: bool = True,  # launch each step before the step before it has been read
        mixes_steps: bool = True,  # steps may compute chunks of tokens beside decodes
        instruments: RecorderConfig | None = None,  # to measure its steps with
    ) -> None:
        instruments, clock = instruments or RecorderConfig(), scheduler.clock
        self.occupancy = Occupancy()
        self.scheduler = scheduler
        self.stats = stats
        self.ticks = instruments.log
        self.tokenizer = tokenizer
        self.lookahead = lookahead
        self.ready: list[TokenOutput] = []
        self._streams = Streams()
        self.device_faults = 0
        self._is_advancing = False
        rows = vocab_size if embedding_rows is None else embedding_rows
        self.token_ids = TokenIds(rows, vocab_size, tokenizer)
        usable = self.token_ids.num_usable
        constraints = Grammars(tokenizer, vocab_size, usable, mixes_steps)
        self._encode = PromptEncoder(tokenizer, self.token_ids)
        self.clock = clock
        self._recorder = TickRecorder(scheduler, stats, clock, instruments)
        self.observers = Observers[Any]()
        self._pipeline = StepPipeline(scheduler, runner, self._recorder.pauses, self.observers)
        self._outputs = OutputProcessor(tokenizer, clock)
        self._make_request = RequestMaker(constraints, clock, seed)
        self._requests, self._kept = dict[int, Request](), dict[int, Request]()
        self._beams: dict[int, BeamSearch] = {}  # by request id of every hypothesis

    @property
    def runner(self) -> Runner[Any]:
        """What computes the steps. It may be replaced while no step is under way."""
        return self._pipeline.runner

    @runner.setter
    def runner(self, runner: Runner[Any]) -> None:
        self._pipeline.runner = runner

    @property
    def constraints(self) -> Constraints:
        """What makes the constraints of requests. Any thread may compile more, before it adds a
        request. It may be replaced."""
        return self._make_request.constraints

    @constraints.setter
    def constraints(self, constraints: Constraints) -> None:
        self._make_request.constraints = constraints

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to give."""
        return bool(self._requests or self.ready)

    def request(self, request_id: int) -> Request | None:
        """A request under way, or an ended one that is kept; None if it is neither."""
        return self._requests.get(request_id) or self._kept.get(request_id)

    def is_open(self, request_id: int) -> bool:
        """Whether :meth:`step` has more outputs of this request to give."""
        is_waiting = any(output.request_id == request_id for output in self.ready)
        return request_id in self._requests or is_waiting or self._streams.has_unread(request_id)

    def levels(self) -> Levels:
        """What the scheduler holds at present, and what it has done so far."""
        return self.scheduler.levels()

    def metrics(self) -> dict[str, Any]:
        """Counters and levels of the engine as plain JSON values: see docs/metrics.md."""
        return self._recorder.metrics()

    def check_prompt(self, prompt: PromptLike) -> None:
        """Raise the ValueError that :meth:`add_request` raises for this prompt, if it does."""
        self._encode(prompt)

    @exclusive
    def add_request(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        priority: int | str = 0,
        cache_salt: str = "",
        share: Sequence[str] = (),
        keep: bool = False,
        turn_ends: Sequence[int] = (),
        marks: Sequence[tuple[int, float]] = (),
        **options: Any,
    ) -> int:
        """Queue a prompt (text or token ids); returns the request's id.

        Args:
            priority: lower numbers first, if the engine's policy is "priority"; "background": when
                nothing else waits (docs/engine.md).
            cache_salt: K/V is shared only among requests with the same salt, e.g. a tenant's name.
            share: its client and parts of the client, which take turns under the policy "fair".
            keep: hold its blocks for :meth:`fork`, until :meth:`release` or others need them.
            turn_ends: numbers of leading tokens after which later prompts may go on differently:
                models with recurrent layers keep their states there.
            marks: numbers of leading tokens, and seconds for which their K/V is worth more.
            options: fields of :class:`SamplingParams`, instead of `params`.

        Raises:
            ValueError: an empty prompt, a token that the model does not have, an argument of a
                wrong kind or out of range, or a request that the pool could never hold.
        """
        queueing = check_queueing(
            "add_request",
            priority=priority,
            cache_salt=cache_salt,
            share=share,
            turn_ends=turn_ends,
            keep=keep,
            marks=marks,
        )
        params = checked_params("add_request", params, options, self._encode, prompt)
        request = self._make_request(self._encode(prompt), params, params.seed, queueing)
        request.keep_blocks = keep
        self._admit([request], lambda: self.scheduler.add(request))
        return request.id

    @exclusive
    def add_samples(
        self,
        prompt: PromptLike,
        n: int,
        params: SamplingParams | None = None,
        *,
        priority: int | str = 0,
        cache_salt: str = "",
        share: Sequence[str] = (),
        turn_ends: Sequence[int] = (),
        marks: Sequence[tuple[int, float]] = (),
        **options: Any,
    ) -> list[int]:
        """Queue `n` samples of one prompt, which is computed once; returns their ids.

        Sample i of a request with seed s draws the same as a request with seed ``s + i``.

        Raises:
            ValueError: `n` below 1, or as :meth:`add_request`.
        """
        n = integer("add_samples", "n", n, 1)
        queueing = check_queueing(
            "add_samples",
            priority=priority,
            cache_salt=cache_salt,
            share=share,
            turn_ends=turn_ends,
            marks=marks,
        )
        params = checked_params("add_samples", params, options, self._encode, prompt)
        encoded = self._encode(prompt)
        seeds = [None if params.seed is None else (params.seed + i) % 2**64 for i in range(n)]
        requests = [self._make_request(encoded, params, seed, queueing) for seed in seeds]
        leader = requests[0]
        leader.samples = requests[1:]
        self._admit(requests, lambda: self.scheduler.add(leader))
        return [request.id for request in requests]

    @exclusive
    def fork(
        self,
        request_id: int,
        suffix: PromptLike = (),
        params: SamplingParams | None = None,
        *,
        keep: bool = False,
        **options: Any,
    ) -> int:
        """Start a request that continues another one and shares its blocks; returns its id.

        Nothing is computed. A block is copied only when one of the two requests writes into a block
        that they share: at most the last one. All tokens of the parent are prompt of the child.

        Args:
            request_id: a request under way, or an ended one that was kept.
            suffix: prompt tokens of the child that follow those of the parent.
            params: of the child; default: the parent's, without its seed. Then the child goes on
                where the parent is in its constraint, which must allow the suffix.

        Raises:
            ValueError: no such request, a beam search, or as :meth:`add_request`.
        """
        request_id = integer("fork", "request_id", request_id)
        self._settle()  # the step under way may end the request
        parent = self.request(request_id)
        if parent is None or request_id in self._beams:
            raise ValueError(
                f"[fork] request_id is {request_id}: expected a request under way, or an ended one"
                " that was added with keep=True"
            )
        require_flags("fork", keep=keep)
        inherits = params is None and not options
        given = parent.params if inherits else checked_params("fork", params, options, self._encode)
        tokens = parent.tokens + self._encode(suffix, continues=True).tokens
        seed = None if inherits else given.seed
        constraint = parent.constraint.copy(tokens) if inherits and parent.constraint else None
        child = self._make_request(
            parent.prompt_of(tokens),
            given,
            seed,
            Queueing.of(parent),
            like=parent,
            constraint=constraint,
        )
        child.keep_blocks = keep
        self.scheduler.check_fits(child)
        self._admit([child], lambda: self.scheduler.fork(parent, child), context=parent.generated)
        return child.id

    @exclusive
    def abort(self, request_id: int) -> Completion | None:
        """End a request early and free its blocks; None if it has ended already."""
        request = self._requests.get(integer("abort", "request_id", request_id))
        if request is None:
            return None
        completion = self._finish(request, FinishReason.ABORT)
        self._streams.note_aborted(request_id, completion)
        self._release_states()
        return completion

    @exclusive
    def release(self, request_id: int) -> None:
        """Give up the blocks of an ended request that was kept; no effect on other requests."""
        request = self._kept.pop(integer("release", "request_id", request_id), None)
        if request is not None:
            self.scheduler.release(request)
            self._release_states()

    @exclusive
    def step(self) -> list[TokenOutput]:
        """Compute one step; return its tokens: of each request one, its right drafts, forced ones.
        Outputs of a stream, or of a call that waits for its requests, go there instead. Ctrl-C
        takes effect after the step; the next call then returns the outputs."""
        if not self.ready:
            self._compute()
        outputs, self.ready = self.ready, []
        return outputs

    def _compute(self) -> None:
        """Compute one step; the next :meth:`step` returns its outputs."""
        if self._streams.dropped:
            self._streams.abort_dropped(self)
        with DeferredInterrupts():
            self._advance(ahead=self.lookahead and not self._beams)

    compute = exclusive_as("compute")(_compute)

    def _complete(self, added: Iterator[list[int]], on_output: OnOutput | None) -> list[Completion]:
        """Add requests and wait for all of them, within an exclusive method."""
        try:
            return self._streams.complete(self, added, on_output)
        finally:
            self._abort_dropped()

    def _deliver(self, output: TokenOutput) -> None:
        """Give an output to the call that waits for it, or let the next :meth:`step` return it."""
        stream = self._streams.by_request.get(output.request_id)
        (self.ready if stream is None else stream.outputs).append(output)

    @exclusive_as("close of a stream")
    def _abort_dropped(self) -> None:
        """Abort the requests of streams that have no reader any more."""
        self._streams.abort_dropped(self)

    # Adding

    def _admit(
        self, requests: Sequence[Request], queue: Callable[[], None], context: Sequence[int] = ()
    ) -> None:
        """Add requests, which `queue` gives to the scheduler: all or, if anything fails, none."""
        try:
            for request in requests:
                self._requests[request.id] = request
                self._outputs.add(request, context)
            queue()
        except BaseException:
            for request in requests:
                request.samples, request.keep_blocks = [], False
                self.scheduler.discard(request)
                self._outputs.forget(request)
                self._beams.pop(request.id, None)
                self._requests.pop(request.id, None)
            raise

    # Steps

    @exclusive
    def settle(self) -> None:
        """Read the step under way, so that another thread can go on. Its outputs become `ready`."""
        self._settle()

    def _settle(self) -> None:
        """Read the step under way, so that every token is known. Its outputs become `ready`."""
        with DeferredInterrupts():
            while self._pipeline.busy:
                self._advance(ahead=False)

    def _advance(self, ahead: bool) -> None:
        if self._is_advancing:
            raise RuntimeError(
                "[Engine] a sampler or a logits processor asks for a step: expected none within a "
                "step"
            )
        self._is_advancing = True
        try:
            self._recorder.begin()
            self._take(self._pipeline.advance(ahead))
            self._release_states()
        finally:
            self._is_advancing = False

    def _release_states(self) -> None:
        """Let the runner forget the states that nothing reads any more. While there are requests,
        their next step names these states instead."""
        if not self._requests:
            self.runner.release(self.scheduler.take_released(), self.scheduler.take_rested())

    def _take(self, result: StepResult) -> None:
        """Append the tokens of a step, and recover from its fault."""
        try:
            choices = [] if result.report is None else result.report.choices
            if result.report and result.report.step.prompt_tokens:  # the last one brings a token
                self._note_first_tokens(choices)
            for choice in choices:
                self._append(choice)
                if choice.request.constraint is not None and choice.request.id not in self._beams:
                    for known in self._pipeline.known_after(choice):
                        self._append(known)
                        self.stats.generation_tokens += 1
            if result.fault is not None:
                self._recover(result.fault)
        finally:
            self._recorder.end(result)

    def _note_first_tokens(self, choices: Sequence[SampledToken]) -> None:
        for choice in choices:
            request = choice.request
            if request.id in self._beams:
                request = self._beams[request.id].root
            if request.first_token_time is None:
                request.first_token_time = self.clock()
                self.stats.ttfts.append(request.first_token_time - request.arrival_time)

    def _append(self, choice: SampledToken) -> None:
        """Give a request that has not ended its next token. Its text may wait for more tokens."""
        request = choice.request
        search = self._beams.get(request.id)
        if search is None and request.id not in self._requests:
            return  # it ended earlier in this very step
        if choice.error is not None:
            return self._fail(request, choice.error)
        if search is not None:
            self.device_faults = 0
            search.append(choice, self.scheduler)
            if search.group.done:
                self._end(search.root, search.finish_reason)
            return
        try:
            output, reason = self._outputs.append(choice, append_token(choice))
        except Exception as error:  # the tokenizer's, or there is no token
            return self._fail(request, error)
        self.device_faults = 0
        if reason is not None:
            output = replace(output, completion=self._finish(request, reason))
        self._deliver(output)

    def _recover(self, fault: Fault) -> None:
        self.stats.faults += 1
        self.device_faults += fault.is_devices
        for request in self._pipeline.recover(fault):
            self._fail(request, fault.error)
        if not isinstance(fault.error, Exception):
            raise fault.error

    def _fail(self, request: Request, error: BaseException) -> None:
        """End a request, or the beam search that it is a hypothesis of, with an error."""
        if request.id in self._beams:
            request = self._beams[request.id].root
        request.error = error
        self._end(request, FinishReason.ERROR)

    def _end(self, request: Request, reason: FinishReason) -> None:
        self._deliver(TokenOutput.last(self._finish(request, reason)))

    def _finish(self, request: Request, reason: FinishReason) -> Completion:
        search = self._beams.get(request.id)
        if search is not None:
            search.end(self.scheduler)
        self.scheduler.complete(request)
        if request.keep_blocks and reason is not FinishReason.ERROR:
            self._kept[request.id] = request
        else:
            request.keep_blocks = False
            self.scheduler.release(request)
        del self._requests[request.id]
        completion = self._outputs.finish(request, reason)
        if not request.keep_blocks:
            request.variant = None  # steps and samplers may keep the request for a while
        self.stats.requests_finished += 1
        self.stats.cached_prompt_tokens += min(request.num_cached, request.num_prompt)
        self.stats.blocks_in_use = self.scheduler.blocks_in_use
        if search is None:
            return completion
        keeps_space = bool(request.params.keep_space)
        return search.result(completion, partial(self._outputs.text_of, keeps_space=keeps_space))


class DeferredInterrupts:
    """A context that holds back SIGINT until its end, so that it cannot stop halfway. Only Python's
    own handlers in the main thread can be held back: otherwise it does nothing."""

    def __enter__(self) -> None:
        self._caught: list[tuple[Any, ...]] = []
        self._handler = getsignal(SIGINT)
        if callable(self._handler):
            try:
                signal(SIGINT, lambda *args: self._caught.append(args))
            except ValueError:  # this is not the main thread
                self._handler = None

    def __exit__(self, *exception: object) -> None:
        if callable(self._handler):
            signal(SIGINT, self._handler)
            if self._caught:
                self._handler(*self._caught[0])
