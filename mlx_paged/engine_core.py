"""EngineCore: requests in, tokens out, step by step. Knows no mlx."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mlx_paged.beam_requests import BeamRequests
from mlx_paged.beam_search import BeamGroup
from mlx_paged.interrupts import deferred_interrupts
from mlx_paged.output_processor import OutputProcessor
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.prompt_encoder import Prompt, PromptEncoder, Tokenizer
from mlx_paged.request import FinishReason, Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler import Scheduler
from mlx_paged.stats import EngineStats
from mlx_paged.step_pipeline import Choice, Fault, Runner, StepPipeline
from mlx_paged.tick_recorder import Instruments, TickRecorder


class EngineCore:
    """What every engine can do, whatever computes its steps.

    One thread uses it at a time. A failure ends the requests that caused it and no others; after
    any exception out of here, Ctrl-C included, the engine can go on.

    Args:
        scheduler: decides what is computed.
        runner: computes it.
        stats: counters to keep.
        tokenizer: for text prompts, stop strings and text output.
        vocab_size: token ids are below it.
        seed: of the random streams of requests that bring none.
        lookahead: launch each step before the one before it has been read.
        clock: seconds.
        instruments: to measure its steps with.

    Attributes:
        ticks: the latest steps, newest last.
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
        instruments: Instruments | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.stats = stats
        instruments = instruments or Instruments()
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

    # Requests

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has anything to give."""
        return bool(self._requests or self._ready)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        keep: bool = False,
        **options: Any,
    ) -> int:
        """Queue a prompt (text or token ids); `options` are fields of :class:`SamplingParams`.

        Args:
            priority: lower numbers first, where the engine's policy is "priority".
            cache_salt: K/V is shared only among requests with the same one, e.g. a tenant's name.
            keep: hold the blocks when the request has ended, for :meth:`fork`, until
                :meth:`release` or until they are needed.

        Returns:
            The request's id.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, an option out of range, or
                a request that the pool could never hold.
        """
        params = self._params("add_request", params, options)
        request = self._make_request(self._encode(prompt), params, params.seed)
        request.priority, request.salt, request.keep = priority, cache_salt.encode(), keep
        self.scheduler.add(request)
        self._admit(request)
        return request.id

    def add_samples(
        self,
        prompt: Prompt,
        n: int,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        **options: Any,
    ) -> list[int]:
        """Queue `n` samples of one prompt, which is computed once; returns their ids.

        Sample i of a request with seed s draws what a request with seed ``s + i`` draws.

        Raises:
            ValueError: `n` below 1, or as :meth:`add_request`.
        """
        if n < 1:
            raise ValueError(f"[add_samples] n is {n}: expected >= 1")
        params = self._params("add_samples", params, options)
        tokens = self._encode(prompt)
        seeds = [None if params.seed is None else (params.seed + i) % 2**64 for i in range(n)]
        requests = [self._make_request(list(tokens), params, seed) for seed in seeds]
        for request in requests:
            request.priority, request.salt = priority, cache_salt.encode()
        leader = requests[0]
        leader.samples = requests[1:]
        self.scheduler.add(leader)
        for request in requests:
            self._admit(request)
        return [request.id for request in requests]

    def add_beam_search(
        self,
        prompt: Prompt,
        num_beams: int,
        params: SamplingParams | None = None,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        priority: int = 0,
        cache_salt: str = "",
        **options: Any,
    ) -> int:
        """Queue a beam search; its only output is one with a completion, whose `beams` are all.

        Args:
            num_beams: hypotheses alive, and returned.
            length_penalty: above 0 favours long hypotheses, below 0 short ones.
            early_stopping: end with the first `num_beams` finished hypotheses, better or not.

        Raises:
            ValueError: as :meth:`add_request`, or options that a beam search has no use for.
        """
        params = self._params("add_beam_search", params, options)
        if params.temperature > 0 or params.stop or params.sampler is not None:
            raise ValueError(
                "[add_beam_search] temperature, stop or sampler is given: expected none of them, a"
                " beam search takes the likeliest continuations and ends at tokens"
            )
        root = self._make_request(self._encode(prompt), params, seed=0)
        root.priority, root.salt, root.synchronous = priority, cache_salt.encode(), True
        stop = self._outputs.stop_token_ids(root)
        group = BeamGroup(num_beams, params.max_tokens, length_penalty, early_stopping, stop)
        num_candidates = min(group.num_candidates, self._encode.vocab_size or group.num_candidates)
        root.params = replace(params, logprobs=num_candidates)
        self.scheduler.add(root)
        self._requests[root.id] = root
        self._beams[root.id] = BeamRequests(
            root, group, lambda tokens, logprobs: self._hypothesis(root, tokens, logprobs)
        )
        return root.id

    def fork(
        self,
        request_id: int,
        suffix: Prompt = (),
        params: SamplingParams | None = None,
        *,
        keep: bool = False,
        **options: Any,
    ) -> int:
        """Start a request that goes on from where another one is, sharing all its blocks.

        Nothing is computed and no block is copied until one of the two writes into a block that
        they share: at most the last one. For the child, all that the parent has so far is prompt.

        Args:
            request_id: of a request under way, or of one that ended and was kept.
            suffix: what the child's prompt has beyond that.
            params: of the child; default the parent's, without its seed.

        Returns:
            The child's id.

        Raises:
            ValueError: no such request, a beam search, or as :meth:`add_request`.
        """
        parent = self._requests.get(request_id) or self._kept.get(request_id)
        if parent is None or parent.synchronous:
            raise ValueError(
                f"[fork] request_id is {request_id}: expected a request under way, or an ended one"
                " that was added with keep=True"
            )
        self._settle()
        if params is None and not options:
            params, seed = parent.params, None
        else:
            params = self._params("fork", params, options)
            seed = params.seed
        tokens = parent.tokens + (self._encode(suffix, continues=True) if suffix else [])
        child = self._make_request(tokens, params, seed)
        child.priority, child.salt, child.keep = parent.priority, parent.salt, keep
        self.scheduler.check_fits(child)
        self.scheduler.fork(parent, child)
        self.runner.fork(parent, child)
        self._admit(child, context=parent.generated)
        return child.id

    def abort(self, request_id: int) -> Completion | None:
        """End a request early and free its blocks; None if it has ended already."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request_id in self._beams:
            return self._end_beams(self._beams[request_id], FinishReason.ABORT)
        return self._finish(request, FinishReason.ABORT)

    def release(self, request_id: int) -> None:
        """Give up the blocks of an ended request that was kept; without effect on others."""
        request = self._kept.pop(request_id, None)
        if request is not None:
            self.scheduler.release(request)
            self.runner.drop(request)

    def reset_prefix_cache(self) -> None:
        """Forget the K/V that finished requests left for reuse."""
        self.scheduler.allocator.drop_cached()

    # Steps

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
        self._recorder.take_in()
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

    def _take_in(self, choice: Choice) -> TokenOutput | None:
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
        if request.keep and reason is not FinishReason.ERROR:
            self._kept[request.id] = request
        else:
            request.keep = False
            self.scheduler.release(request)
            self.runner.drop(request)
        del self._requests[request.id]
        completion = self._outputs.finish(request, reason)
        self.stats.requests_finished += 1
        self.stats.cached_prompt_tokens += min(request.num_cached, request.num_prompt)
        self.stats.blocks_in_use = self.scheduler.allocator.blocks_in_use
        return completion

    def _note_first_tokens(self, choices: Sequence[Choice]) -> None:
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

    def _offer(self, beams: BeamRequests, choice: Choice) -> TokenOutput | None:
        self.scheduler.rest(choice.request)
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

    # Arguments

    def _admit(self, request: Request, context: Sequence[int] = ()) -> None:
        self._requests[request.id] = request
        self._outputs.add(request, context)

    def _make_request(self, tokens: list[int], params: SamplingParams, seed: int | None) -> Request:
        if seed is None:
            seed = int(self._rng.integers(2**63))
        request = Request(self._next_id, tokens, params, seed, arrival_time=self._clock())
        self._next_id += 1
        return request

    def _params(
        self, caller: str, params: SamplingParams | None, options: dict[str, Any]
    ) -> SamplingParams:
        if params is not None and options:
            raise ValueError(f"[{caller}] both params and options are given: expected one")
        params = params or SamplingParams(**options)
        if params.stop and self.tokenizer is None:
            raise ValueError(f"[{caller}] stop strings are given: expected a tokenizer")
        return params
