"""EngineSteps: what comes of an engine's steps: tokens, ends, failures. Knows no mlx."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mlx_paged.engine.beams import BeamRequests
from mlx_paged.engine.one_thread import Occupancy, exclusive
from mlx_paged.engine.pipeline import StepPipeline, deferred_interrupts
from mlx_paged.engine.text import OutputProcessor, PromptEncoder, Tokenizer
from mlx_paged.metrics.recorder import RecorderConfig, TickRecorder
from mlx_paged.metrics.stats import EngineStats
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.request import FinishReason, Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.runner_protocol import Fault, Runner, SampledToken
from mlx_paged.scheduler.scheduler import Scheduler


class EngineSteps:
    """An engine without the calls that add requests.

    The arguments are those of :class:`EngineCore`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner[Any],
        stats: EngineStats,
        *,
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
        seed: int | None = None,
        lookahead: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        instruments: RecorderConfig | None = None,
    ) -> None:
        self.occupancy = Occupancy()
        self.scheduler = scheduler
        self.runner = runner
        self.stats = stats
        instruments = instruments or RecorderConfig()
        self.ticks = instruments.log
        self.tokenizer = tokenizer
        self.lookahead = lookahead
        self._encode = PromptEncoder(tokenizer, vocab_size)
        self._clock = clock
        self._recorder = TickRecorder(scheduler, stats, clock, instruments)
        self._pipeline = StepPipeline(scheduler, runner, self._recorder.working_clock)
        self._outputs = OutputProcessor(tokenizer, clock)
        self._rng = np.random.default_rng(seed)
        self._next_id = 0
        self._requests: dict[int, Request] = {}
        self._kept: dict[int, Request] = {}
        self._beams: dict[int, BeamRequests] = {}  # by request id of every live hypothesis
        self._ready: list[TokenOutput] = []  # made, but not handed out yet

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to give."""
        return bool(self._requests or self._ready)

    @exclusive
    def step(self) -> list[TokenOutput]:
        """Compute one step; return the tokens it gave, at most one a request.

        Ctrl-C takes effect after the step; its outputs are then returned by the next call.
        """
        if not self._ready:
            with deferred_interrupts():
                self._advance(ahead=self.lookahead and not self._beams)
        outputs, self._ready = self._ready, []
        return outputs

    def metrics(self) -> dict[str, Any]:
        """What the engine did and does, as plain JSON values: see docs/metrics.md."""
        return self._recorder.metrics()

    def _advance(self, ahead: bool) -> None:
        self._recorder.begin()
        result = self._pipeline.advance(ahead)
        self._recorder.results_ready()
        try:
            if result.prompt_tokens:  # a first token comes with the prompt's last one
                self._note_first_tokens(result.choices)
            for choice in result.choices:
                output = self._take_in(choice)
                if output is not None:
                    self._ready.append(output)
            if result.fault is not None:
                self._recover(result.fault)
        finally:
            self._recorder.end(result)

    def _take_in(self, choice: SampledToken) -> TokenOutput | None:
        request = choice.request
        if request.is_finished or (request.synchronous and request.id not in self._beams):
            return None  # it ended earlier in this very step
        if choice.error is not None:
            return self._fail(request, choice.error)
        self.scheduler.clear(request)
        if request.synchronous:
            return self._offer(self._beams[request.id], choice)
        try:
            output, reason = self._outputs.append(choice)
        except Exception as error:  # the tokenizer's
            return self._fail(request, error)
        if reason is None:
            return output
        return replace(output, completion=self._finish(request, reason))

    def _recover(self, fault: Fault) -> None:
        self.stats.faults += 1
        for request in self._pipeline.recover(fault):
            self._ready.append(self._fail(request, fault.error))
        if not isinstance(fault.error, Exception):
            raise fault.error

    def _fail(self, request: Request, error: BaseException) -> TokenOutput:
        """End a request that something is wrong with."""
        beams = self._beams.get(request.id)
        if beams is not None:
            beams.root.error = error
            return TokenOutput.last(self._end_beams(beams, FinishReason.ERROR))
        request.error = error
        return TokenOutput.last(self._finish(request, FinishReason.ERROR))

    def _settle(self) -> None:
        """Read the step under way, so that every token is known; its outputs wait to be fetched."""
        with deferred_interrupts():
            while self._pipeline.busy:
                self._advance(ahead=False)

    def _finish(self, request: Request, reason: FinishReason) -> Completion:
        self.scheduler.complete(request)
        if request.keep_blocks and reason is not FinishReason.ERROR:
            self._kept[request.id] = request
        else:
            request.keep_blocks = False
            self.scheduler.release(request)
            self.runner.drop(request)
        del self._requests[request.id]
        completion = self._outputs.finish(request, reason)
        self.stats.requests_finished += 1
        self.stats.cached_prompt_tokens += min(request.num_cached, request.num_prompt)
        self.stats.blocks_in_use = self.scheduler.allocator.blocks_in_use
        return completion

    def _note_first_tokens(self, choices: Sequence[SampledToken]) -> None:
        for choice in choices:
            request = choice.request
            if request.synchronous and request.id in self._beams:
                request = self._beams[request.id].root
            if request.first_token_time is None:
                request.first_token_time = self._clock()
                self.stats.ttfts.append(request.first_token_time - request.arrival_time)

    # Beams

    def _hypothesis(self, root: Request, tokens: list[int], logprobs: list[float]) -> Request:
        request = self._make_request(tokens, root.params, seed=0)
        request.num_prompt, request.logprobs = root.num_prompt, logprobs
        request.priority, request.salt, request.synchronous = root.priority, root.salt, True
        self._beams[request.id] = self._beams[root.id]
        return request

    def _offer(self, beams: BeamRequests, choice: SampledToken) -> TokenOutput | None:
        self.scheduler.park(choice.request)
        if not beams.offer(choice):
            return None
        beams.advance(self.scheduler, self.runner)
        if not beams.done:
            return None
        return TokenOutput.last(self._end_beams(beams, beams.finish_reason))

    def _end_beams(self, beams: BeamRequests, reason: FinishReason) -> Completion:
        for request_id in [i for i, owner in self._beams.items() if owner is beams]:
            del self._beams[request_id]
        beams.end(self.scheduler, self.runner)
        completion = self._finish(beams.root, reason)
        found = beams.beams(self._outputs.text_of)
        return replace(completion, beams=found, text=found[0].text if found else "")

    def _make_request(self, tokens: list[int], params: SamplingParams, seed: int | None) -> Request:
        if seed is None:
            seed = int(self._rng.integers(2**63))
        request = Request(self._next_id, tokens, params, seed, arrival_time=self._clock())
        self._next_id += 1
        return request
