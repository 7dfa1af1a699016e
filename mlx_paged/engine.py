"""Engine: many requests generated at once from one paged pool."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_paged.block_allocator import ceil_div
from mlx_paged.block_manager import KVBlockManager
from mlx_paged.kv_memory import num_blocks_for
from mlx_paged.model_probe import probe
from mlx_paged.model_runner import ModelRunner
from mlx_paged.outputs import Completion, TokenOutput
from mlx_paged.prewarm import prewarm as compile_pipelines
from mlx_paged.request import FinishReason, Request
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler import Scheduler, Step
from mlx_paged.stats import EngineStats
from mlx_paged.text_stream import TextStream

Prompt = str | Sequence[int]


class Engine:
    """Continuous batching over a pool of K/V blocks.

    Any number of requests may be added at any time. Each :meth:`step` gives every running request
    its next token and computes a bounded piece of the prompts that are still waiting.

    Args:
        model: an mlx-lm model, e.g. the first value of ``mlx_lm.load``.
        tokenizer: the second; without it prompts are token ids and no text comes out.
        block_size: token slots in a block.
        kv_memory: bytes for the pool; default: what the device can spare.
        num_blocks: size of the pool in blocks, instead of `kv_memory`.
        max_kv_tokens: if neither is given, the pool is made no larger than for these tokens.
        max_running: requests computed side by side at most.
        prefill_chunk: prompt tokens computed in a step at most, beside the running requests.
        seed: of the random streams of requests that bring none.
        prefix_cache: share the K/V of prompts that start alike.
        prewarm: compile the GPU pipelines now rather than while the first requests wait; how long
            it took is in ``stats.prewarm_seconds``, None on a CPU, where nothing is compiled.

    Raises:
        UnsupportedModelError: the model cannot be served right.
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper | None = None,
        *,
        block_size: int = 16,
        kv_memory: int | None = None,
        num_blocks: int | None = None,
        max_kv_tokens: int | None = None,
        max_running: int = 32,
        prefill_chunk: int = 512,
        seed: int | None = None,
        prefix_cache: bool = True,
        prewarm: bool = True,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"[Engine] block_size is {block_size}: expected >= 1")
        profile = probe(model)
        if num_blocks is None:
            num_blocks = num_blocks_for(model, profile.shapes, block_size, kv_memory)
            if kv_memory is None and max_kv_tokens is not None:
                num_blocks = min(num_blocks, ceil_div(max_kv_tokens, block_size))
        self.tokenizer = tokenizer
        self.manager = KVBlockManager.from_shapes(profile.shapes, block_size, num_blocks)
        self.runner = ModelRunner(model, self.manager, profile)
        self.scheduler = Scheduler(
            self.manager.allocator,
            max_running,
            prefill_chunk,
            prefix_cache=prefix_cache and not profile.recurrent,
        )
        self.stats = EngineStats(block_size, self.manager.pool.block_bytes, num_blocks)
        if prewarm:
            self.stats.prewarm_seconds = compile_pipelines(profile.attentions, block_size)
        self._rng = np.random.default_rng(seed)
        self._vocab_size = getattr(getattr(model, "args", None), "vocab_size", None)
        self._next_id = 0
        self._requests: dict[int, Request] = {}
        self._texts: dict[int, TextStream] = {}
        self._streams: dict[int, deque[TokenOutput]] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return self.scheduler.has_work

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> int:
        """Queue a prompt (text or token ids); `options` are fields of :class:`SamplingParams`.

        Returns:
            The request's id.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, an option out of range, or
                a request that the pool could never hold.
        """
        if params is not None and options:
            raise ValueError("[add_request] both params and options are given: expected one")
        params = params or SamplingParams(**options)
        if params.stop and self.tokenizer is None:
            raise ValueError("[add_request] stop strings are given: expected a tokenizer")
        tokens = self._encode(prompt)
        seed = int(self._rng.integers(2**63)) if params.seed is None else params.seed
        request = Request(self._next_id, tokens, params, seed)
        self.scheduler.add(request)
        self._next_id += 1
        self._requests[request.id] = request
        if self.tokenizer is not None:
            self._texts[request.id] = TextStream(self.tokenizer.detokenizer, params.stop)
        return request.id

    def step(self) -> list[TokenOutput]:
        """Compute one step; return the tokens it gave, at most one a request."""
        started = time.perf_counter()
        preemptions = self.scheduler.num_preemptions
        step = self.scheduler.schedule()
        if not step.spans:
            return []
        requests, tokens, logprobs = self.runner.run(step)
        now = time.perf_counter()
        self._record(step, now - started, len(tokens))
        self.stats.preemptions += self.scheduler.num_preemptions - preemptions
        self._advance(step)
        outputs = [
            self._append(request, token, logprob, now)
            for request, token, logprob in zip(requests, tokens, logprobs, strict=True)
        ]
        for output in outputs:
            if output.request_id in self._streams:
                self._streams[output.request_id].append(output)
        return outputs

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_output: Callable[[TokenOutput], None] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Complete all prompts; results in their order.

        Args:
            params: for all of them, or one each.
            on_output: called with every token as it comes.

        Raises:
            ValueError: as :meth:`add_request`; then none of the prompts is run.
        """
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(
                f"[generate] {len(prompts)} prompts but {len(each)} params: expected one each"
            )
        ids: list[int] = []
        try:
            for prompt, param in zip(prompts, each, strict=True):
                ids.append(self.add_request(prompt, param, **options))
            done = self._complete_all(set(ids), on_output)
        except BaseException:
            for request_id in ids:
                self.abort(request_id)
            raise
        return [done[request_id] for request_id in ids]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[TokenOutput]:
        """Add a request and yield its tokens as they come; other requests advance meanwhile.

        Closing the iterator aborts the request.

        Raises:
            ValueError: as :meth:`add_request`, at once.
        """
        request_id = self.add_request(prompt, params, **options)
        self._streams[request_id] = deque()
        return self._outputs(request_id)

    def abort(self, request_id: int) -> Completion | None:
        """End a request early and free its blocks; None if it has ended already."""
        request = self._requests.get(request_id)
        return None if request is None else self._finish(request, FinishReason.ABORT)

    def reset_prefix_cache(self) -> None:
        """Forget the K/V that finished requests left for reuse."""
        self.manager.allocator.drop_cached()

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("[add_request] prompt is text: expected token ids or a tokenizer")
            bos = self.tokenizer.bos_token
            special = bos is None or not prompt.startswith(bos)
            tokens = list(self.tokenizer.encode(prompt, add_special_tokens=special))
        else:
            tokens = [int(token) for token in prompt]
        if not tokens:
            raise ValueError("[add_request] prompt is empty: expected at least one token")
        limit = self._vocab_size or max(tokens) + 1
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < limit:
                raise ValueError(
                    f"[add_request] prompt has token {token}: expected ids in [0, {limit})"
                )
        return tokens

    def _advance(self, step: Step) -> None:
        """The step's K/V is in the pool: move on, and offer blocks that became full for reuse."""
        block_size = self.manager.block_size
        for span in step.spans:
            request = span.request
            request.num_computed = span.stop
            crossed = span.stop // block_size > span.start // block_size
            if crossed and self.scheduler.prefix_cache:
                self.manager.commit(request.id, request.tokens, span.stop)

    def _append(self, request: Request, token: int, logprob: float, now: float) -> TokenOutput:
        request.tokens.append(token)
        request.logprobs.append(logprob)
        if request.first_token_time is None:
            request.first_token_time = now
            self.stats.ttfts.append(now - request.arrival_time)
        text = self._texts.get(request.id)
        ends = self._ends(request, token)
        segment = "" if text is None or ends else text.push(token)
        reason = None
        if ends or (text is not None and text.stopped):
            reason = FinishReason.STOP
        elif request.num_generated >= request.params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            return TokenOutput(request.id, token, segment, logprob)
        if text is not None:
            segment += text.finish()
        return TokenOutput(request.id, token, segment, logprob, self._finish(request, reason))

    def _ends(self, request: Request, token: int) -> bool:
        if token in request.params.stop_token_ids:
            return True
        if self.tokenizer is None or request.params.ignore_eos:
            return False
        return token in self.tokenizer.eos_token_ids

    def _finish(self, request: Request, reason: FinishReason) -> Completion:
        self.scheduler.complete(request)
        self.runner.drop(request)
        del self._requests[request.id]
        text = self._texts.pop(request.id, None)
        request.finish_reason = reason
        request.finish_time = time.perf_counter()
        self.stats.requests_finished += 1
        self.stats.cached_prompt_tokens += request.num_cached
        self.stats.blocks_in_use = self.manager.blocks_in_use
        return Completion.of(request, "" if text is None else text.text)

    def _complete_all(
        self, ids: set[int], on_output: Callable[[TokenOutput], None] | None
    ) -> dict[int, Completion]:
        done: dict[int, Completion] = {}
        while len(done) < len(ids):
            for output in self.step():
                if output.request_id not in ids:
                    continue
                if on_output is not None:
                    on_output(output)
                if output.completion is not None:
                    done[output.request_id] = output.completion
        return done

    def _outputs(self, request_id: int) -> Iterator[TokenOutput]:
        outputs = self._streams[request_id]
        try:
            while True:
                while outputs:
                    output = outputs.popleft()
                    yield output
                    if output.completion is not None:
                        return
                if request_id not in self._requests:  # aborted by somebody else
                    return
                self.step()
        finally:
            del self._streams[request_id]
            self.abort(request_id)

    def _record(self, step: Step, seconds: float, sampled: int) -> None:
        prompt_tokens = sum(
            max(0, min(span.stop, span.request.num_prompt) - span.start) for span in step.spans
        )
        in_use = self.manager.blocks_in_use
        self.stats.record_step(seconds, prompt_tokens, sampled, len(step.spans), in_use)
        self.stats.record_memory([span.stop for span in step.spans])
        self.stats.cow_clones = self.manager.cow_clones
