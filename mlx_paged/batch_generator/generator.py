"""BatchGenerator: mlx-lm's batch generator on a paged engine."""

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import StopSequences, generation_stream
from mlx_lm.generate_utils import BatchCounters, BatchCountersSnapshot, BatchStats
from mlx_lm.sample_utils import greedy_sampler

from mlx_paged.arguments import require, unexpected
from mlx_paged.batch_generator.recorder import Recording, StepRecorder
from mlx_paged.batch_generator.sequences import (
    BatchSequence,
    Caches,
    LogitsProcessor,
    NextResult,
    PromptResponse,
    Response,
    Sampler,
    boundaries,
    check_options,
    contiguous_caches,
    is_list,
    one_each,
    require_one_each,
    require_tokens_of,
    row_params,
)
from mlx_paged.engine.engine import Engine
from mlx_paged.outputs import TokenOutput
from mlx_paged.request import FinishReason, Request
from mlx_paged.runner.model_probe import require_model
from mlx_paged.sampling_params import SamplingParams

OWN_NAMES = {"model", "tokenizer", "max_running", "prefill_chunk"}
"""Arguments of an engine that a generator has under a name of its own, or not."""
ENGINE_OPTIONS = signature(Engine).parameters.keys() - OWN_NAMES


class BatchGenerator:
    """Continuous batching with the calls and responses of mlx-lm's BatchGenerator.

    Sequences share a pool of K/V blocks: nothing is padded, joined or copied when a sequence enters
    or leaves. Prompts share the blocks of a common prefix, and a prompt that does not fit waits.
    Every step computes one token of each generating sequence beside one prefill chunk. Greedy
    sequences, and those with `params`, choose their tokens in one batch. Other samplers and
    processors are called row by row; one that raises ends its own sequence with "error".

    Differences: `max_kv_size` is refused if it would have an effect. Caches given to :meth:`insert`
    need `all_tokens`: their K/V is found in the pool or computed again. A cache's content that is
    not made of tokens (images, soft prompts) is lost.

    Args:
        model: an mlx-lm model.
        max_tokens: of sequences without a number of their own.
        stop_tokens: token sequences that end a sequence without stop sequences of its own.
        sampler: of sequences without a sampler; default greedy.
        logits_processors: of sequences without processors.
        completion_batch_size: the largest number of sequences that are computed together.
        prefill_batch_size: the same, if it is larger.
        prefill_step_size: the largest number of prompt tokens in a step, of all prompts together.
        max_kv_size: of rotating caches.
        stream: computes everything.
        engine_options: further arguments of :class:`Engine`, such as `kv_memory`, `block_size`,
            `max_stall_ms`, `prefix_cache`, `seed`; no drafts, because a step gives each sequence
            one token.

    Raises:
        UnsupportedModelError: results for this model could be wrong.
        ValueError: an argument out of range or without support.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_tokens: int = 128,
        stop_tokens: Sequence[Sequence[int]] | None = None,
        sampler: Sampler | None = None,
        logits_processors: list[LogitsProcessor] | None = None,
        completion_batch_size: int = 32,
        prefill_batch_size: int = 8,
        prefill_step_size: int = 2048,
        max_kv_size: int | None = None,
        stream: Any = None,
        **engine_options: Any,
    ) -> None:
        for name in sorted(engine_options.keys() - ENGINE_OPTIONS):
            known = ENGINE_OPTIONS if name not in OWN_NAMES else ()
            raise TypeError(unexpected("BatchGenerator", name, known))
        require_model("BatchGenerator", "model", model)
        for name in ("speculate", "draft_model", "draft_head"):
            given = engine_options.get(name)
            require(given is None, "BatchGenerator", name, given, "None")
        has_effect = max_kv_size is not None and not hasattr(model, "make_cache")
        rotating = "None, rotating caches of a given size are not supported"
        require(not has_effect, "BatchGenerator", "max_kv_size", max_kv_size, rotating)
        check_options(stop_tokens, completion_batch_size, prefill_batch_size, prefill_step_size)
        self.model = model
        self.max_tokens = max_tokens
        self.sampler = sampler or greedy_sampler
        self.logits_processors = logits_processors or []
        self.prefill_step_size = prefill_step_size
        self.prefill_batch_size = prefill_batch_size
        self.completion_batch_size = max(completion_batch_size, prefill_batch_size)
        self.max_kv_size = max_kv_size
        self.stream = stream or generation_stream
        self._default_stop = StopSequences(stop_tokens or None)
        with mx.stream(self.stream):
            self._engine = Engine(
                model,
                max_running=self.completion_batch_size,
                prefill_chunk=prefill_step_size,
                **engine_options,
            )
        self._recorder = StepRecorder(self._engine.observers)
        self._uid_count = 0
        # By uid, until a response has reported their end.
        self._sequences: dict[int, BatchSequence] = {}
        self._by_request: dict[int, BatchSequence] = {}  # by request id, until they end
        self._results: deque[NextResult] = deque()
        # Ids of kept requests whose caches nobody can ask for any more.
        self._returned: deque[int] = deque()
        self._counters = BatchCounters()

    @property
    def prompt_cache_nbytes(self) -> int:
        """Bytes of the blocks in use; blocks that sequences share count once."""
        self._give_back()
        return self._engine.manager.blocks_in_use * self._engine.manager.pool.block_bytes

    def close(self) -> None:
        """Restore MLX's limits of memory. Sequences stay as they are."""
        self._engine.close(self.stream)

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self.close()

    @contextlib.contextmanager
    def stats(self) -> Iterator[BatchStats]:
        """The work of the steps within this context. The time of a step is divided between prompt
        tokens and generated tokens in proportion to their numbers."""
        stats = BatchStats()
        start = BatchCountersSnapshot(**asdict(self._counters))
        try:
            yield stats
        finally:
            end = BatchCountersSnapshot(**asdict(self._counters))
            stats += BatchCountersSnapshot.between(start, end)

    # Sequences

    def insert(self, prompts: Sequence[Sequence[int]], *args: Any, **options: Any) -> list[int]:
        """:meth:`insert_segments` with prompts of one segment each; the same arguments."""
        require(is_list(prompts), "insert", "prompts", prompts, "a list of lists of token ids")
        return self.insert_segments([[prompt] for prompt in prompts], *args, **options)

    def insert_segments(
        self,
        segments: Sequence[Sequence[Sequence[int]]],
        max_tokens: Sequence[int] | None = None,
        caches: Sequence[Caches | None] | None = None,
        all_tokens: Sequence[Sequence[int]] | None = None,
        samplers: Sequence[Sampler | None] | None = None,
        logits_processors: Sequence[Sequence[LogitsProcessor] | None] | None = None,
        stop_sequences: Sequence[StopSequences] | None = None,
        *,
        params: Sequence[SamplingParams] | None = None,
    ) -> list[int]:
        """Add all sequences or, if an argument is wrong, none.

        Every argument has an entry for each sequence.

        Args:
            segments: each prompt in pieces; responses report the end of every piece.
            max_tokens: the largest number of generated tokens.
            caches: K/V of `all_tokens`, or None.
            all_tokens: tokens before the prompt.
            samplers: called with log-probabilities ``[1, vocab]``; None: the generator's sampler.
            logits_processors: called with tokens and logits; None: no processors.
            stop_sequences: that end the sequence.
            params: all sampling options, seeds included, instead of `max_tokens`, `samplers` and
                `logits_processors`.

        Returns:
            The sequences' uids.

        Raises:
            ValueError: an argument of another length, an empty prompt, a token outside the
                vocabulary, more tokens than the pool can hold, caches without their tokens.
        """
        n = len(segments) if is_list(segments) else 0
        all_tokens = one_each(n, all_tokens, [])
        caches = one_each(n, caches, None)
        stops = one_each(n, stop_sequences, self._default_stop)
        rows = self._params(n, max_tokens, samplers, logits_processors, params)
        require_one_each(n, segments=segments, caches=caches, all_tokens=all_tokens, params=rows)
        require_one_each(n, stop_sequences=stops)
        require_tokens_of(caches, all_tokens)
        added: list[BatchSequence] = []
        try:
            arguments = zip(segments, all_tokens, rows, caches, stops, strict=True)
            for uid, row in enumerate(arguments, self._uid_count):
                added.append(self._add(uid, *row))
        except BaseException:
            for sequence in added:
                self._end(sequence)
            raise
        self._uid_count += n
        self._sequences |= {sequence.uid: sequence for sequence in added}
        return [sequence.uid for sequence in added]

    def remove(
        self, uids: Collection[int], return_prompt_caches: bool = False
    ) -> dict[int, tuple[Caches, list[int]]]:
        """Remove sequences in any state and free their blocks; unknown uids are ignored.

        Returns:
            If `return_prompt_caches`, the result of :meth:`extract_cache`; else nothing.
        """
        extracted = self.extract_cache(uids if return_prompt_caches else ())
        require(isinstance(uids, Collection), "remove", "uids", uids, "a collection of uids")
        gone = set(uids)
        for uid in gone & self._sequences.keys():
            self._end(self._sequences.pop(uid))
        results, self._results = self._results, deque()
        for prompts, tokens in results:
            kept_prompts = [each for each in prompts if each.uid not in gone]
            kept_tokens = [each for each in tokens if each.uid not in gone]
            if kept_prompts or kept_tokens:
                self._results.append((kept_prompts, kept_tokens))
        return extracted

    def extract_cache(self, uids: Collection[int]) -> dict[int, tuple[Caches, list[int]]]:
        """By uid of each known sequence: a copy of its K/V as mlx-lm's caches, and the tokens that
        they hold, which are those that the responses so far have reported."""
        require(isinstance(uids, Collection), "extract_cache", "uids", uids, "a collection of uids")
        extracted = {}
        for uid in uids:
            sequence = self._sequences.get(uid)
            if sequence is not None:
                num_tokens = sequence.num_context + sequence.num_reported
                tokens = sequence.request.tokens[:num_tokens]
                caches = sequence.caches
                if caches is None:
                    caches = self._caches_of(sequence.request, tokens)
                extracted[uid] = caches, tokens
        return extracted

    # Steps

    def next(self) -> tuple[list[PromptResponse], list[Response]]:
        """Compute until there is a response, usually one step.

        Returns:
            The progress of prompts, at most one response for each sequence, and the next tokens.
            Both are empty only if no sequence is left.
        """
        self._give_back()
        with mx.stream(self.stream):
            while not self._results and self._engine.has_work:
                self._step()
        result: NextResult = self._results.popleft() if self._results else ([], [])
        self._note_reported(*result)
        return result

    def next_generated(self) -> list[Response]:
        """The next tokens; empty only if no sequence is left."""
        while True:
            prompts, tokens = self.next()
            if tokens or not prompts:
                return tokens

    def _step(self) -> None:
        start = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - start
        recording = self._recorder.take()
        progress = self._progress(recording)
        recording.count(self._counters, len(outputs), seconds)
        num_results = 1 + max(map(len, progress.values()), default=0)
        results: list[NextResult] = [([], []) for _ in range(num_results)]
        for responses in progress.values():
            for (prompts, _), response in zip(results, responses, strict=False):
                prompts.append(response)
        for output in outputs:
            sequence = self._by_request.get(output.request_id)
            if sequence is not None:
                num_before = len(progress.get(sequence.uid, ()))
                results[num_before][1].append(self._response(sequence, output, recording))
        self._results.extend(filter(any, results))

    def _progress(self, recording: Recording) -> dict[int, list[PromptResponse]]:
        """By uid, the responses for prompts: the end of each segment, or of the computed part."""
        progress: dict[int, list[PromptResponse]] = {}
        for span in recording.spans:
            sequence = self._by_request.get(span.request.id)
            if sequence is not None:
                done = min(span.stop - sequence.num_context, sequence.num_prompt)
                if responses := sequence.advance(done):
                    progress[sequence.uid] = responses
        return progress

    def _response(
        self, sequence: BatchSequence, output: TokenOutput, recording: Recording
    ) -> Response:
        completion, reason = output.completion, None
        if completion is not None:
            reason = str(completion.finish_reason)
        if output.token is not None and sequence.matcher.advance(output.token):
            reason = str(FinishReason.STOP)
        tokens = sequence.request.tokens
        logprobs = recording.logprobs.get(output.request_id)
        if logprobs is None:
            logprobs = mx.full((max(tokens) + 1,), mx.nan)
        token = tokens[-1] if output.token is None else output.token
        response = Response(sequence.uid, token, logprobs, reason, None, None)
        if reason is not None:
            self._engine.abort(output.request_id)  # no effect if it has ended
            del self._by_request[output.request_id]
            response.all_tokens = list(tokens)
            if output.token is not None:
                make = partial(self._caches_of, sequence.request, response.all_tokens)
                weakref.finalize(make, self._returned.append, output.request_id)  # in any thread
                response.prompt_cache = make
            response.error = completion.error if completion is not None else None
        return response

    def _note_reported(self, prompts: list[PromptResponse], tokens: list[Response]) -> None:
        for prompt in prompts:
            sequence = self._sequences[prompt.uid]
            sequence.num_reported = prompt.progress[0]
            sequence.caches = None
        for token in tokens:
            if token.finish_reason is None:
                self._sequences[token.uid].num_reported += 1
            else:
                del self._sequences[token.uid]

    # Caches

    def _caches_of(self, request: Request, tokens: Sequence[int]) -> Caches:
        with mx.stream(self.stream):
            return contiguous_caches(
                self._engine.manager.runner, request, tokens, self.prefill_step_size
            )

    def _give_back(self) -> None:
        """Free the blocks of ended sequences whose responses are deleted."""
        while self._returned:
            self._engine.release(self._returned.popleft())

    # Arguments

    def _params(
        self,
        n: int,
        max_tokens: Sequence[int] | None,
        samplers: Sequence[Sampler | None] | None,
        processors: Sequence[Sequence[LogitsProcessor] | None] | None,
        params: Sequence[SamplingParams] | None,
    ) -> Sequence[SamplingParams]:
        if params is None:
            max_tokens = one_each(n, max_tokens, self.max_tokens)
            samplers = one_each(n, samplers, None)
            processors = one_each(n, processors, self.logits_processors)
            require_one_each(
                n, max_tokens=max_tokens, samplers=samplers, logits_processors=processors
            )
            return row_params(max_tokens, [s or self.sampler for s in samplers], processors)
        if any(given is not None for given in (max_tokens, samplers, processors)):
            beside = "params is given beside max_tokens, samplers or logits_processors"
            raise ValueError(f"[insert] {beside}: expected these options as fields of the params")
        return params

    def _add(
        self,
        uid: int,
        segments: Sequence[Sequence[int]],
        context: Sequence[int],
        params: SamplingParams,
        caches: Caches | None,
        stop: StopSequences,
    ) -> BatchSequence:
        prompt = [token for segment in segments for token in segment]
        if not prompt:
            raise ValueError(f"[insert] prompt {uid} is empty: expected at least one token")
        request_id = self._engine.add_request([*context, *prompt], params, keep=True)
        request = self._engine.request(request_id)
        assert request is not None
        sequence = BatchSequence(
            uid, request, len(context), boundaries(segments), stop.matcher(), caches
        )
        self._by_request[request_id] = sequence
        return sequence

    def _end(self, sequence: BatchSequence) -> None:
        if self._by_request.pop(sequence.request.id, None) is not None:
            self._engine.abort(sequence.request.id)
            self._engine.release(sequence.request.id)
