"""BatchGenerator: mlx-lm's batch generator on a paged engine."""

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import StopSequences, generation_stream
from mlx_lm.generate_utils import BatchCounters, BatchCountersSnapshot, BatchStats
from mlx_lm.sample_utils import greedy_sampler

from mlx_paged.batch_generator.contiguous_caches import contiguous_caches
from mlx_paged.batch_generator.recorder import RecordedEngine, Recording
from mlx_paged.batch_generator.sequences import (
    BatchSequence,
    Caches,
    HeldBlocks,
    LogitsProcessor,
    NextResult,
    PromptResponse,
    Response,
    Sampler,
    boundaries,
    require_one_each,
    require_tokens_of,
    row_params,
)
from mlx_paged.outputs import TokenOutput
from mlx_paged.request import FinishReason, Request
from mlx_paged.sampling_params import SamplingParams


class BatchGenerator:
    """Continuous batching with the calls and responses of mlx-lm's BatchGenerator.

    Sequences share a pool of K/V blocks: nothing is padded, joined or copied when one comes or
    goes, prompts that start alike share what they have in common, and one that does not fit waits.
    Every step gives each generating sequence its token beside a bounded piece of the prompts.
    Greedy decoding is done for all rows at once, and so are those of `params`; another sampler or
    processor is called row by row, and one that raises ends its own sequence, with "error".

    What differs: `max_kv_size` is refused where it would have an effect. Caches given to
    :meth:`insert` need `all_tokens`, of which they are made anew or found in the pool; what a cache
    holds beyond tokens (images, soft prompts) is lost.

    Args:
        model: an mlx-lm model.
        max_tokens: of sequences that bring no number of their own.
        stop_tokens: token sequences that end a sequence which brings none of its own.
        sampler: of sequences that bring none; default greedy.
        logits_processors: of sequences that bring none.
        completion_batch_size: sequences computed side by side at most.
        prefill_batch_size: the same, if it is larger.
        prefill_step_size: prompt tokens computed in a step at most, all prompts together.
        max_kv_size: of rotating caches.
        stream: where everything is computed.
        engine_options: further arguments of :class:`Engine`, such as `kv_memory`, `block_size`,
            `max_stall_ms`, `prefix_cache`, `seed`.

    Raises:
        UnsupportedModelError: the model cannot be served right.
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
        if max_kv_size is not None and not hasattr(model, "make_cache"):
            raise ValueError(
                f"[BatchGenerator] max_kv_size is {max_kv_size}: expected None, rotating caches of "
                "a size of one's own are not supported"
            )
        self.model = model
        self.max_tokens = max_tokens
        self.sampler = sampler or greedy_sampler
        self.logits_processors = logits_processors or []
        self.prefill_step_size = prefill_step_size
        self.prefill_batch_size = prefill_batch_size
        self.completion_batch_size = max(completion_batch_size, prefill_batch_size)
        self.max_kv_size = max_kv_size
        self._stream = stream or generation_stream
        self._default_stop = StopSequences(stop_tokens or None)
        with mx.stream(self._stream):
            self._engine = RecordedEngine(
                model,
                max_running=self.completion_batch_size,
                prefill_chunk=prefill_step_size,
                **engine_options,
            )
        self._uid_count = 0
        self._sequences: dict[
            int, BatchSequence
        ] = {}  # by uid, until the caller knows of their end
        self._by_request: dict[int, BatchSequence] = {}  # by request id, until they end
        self._frames: deque[NextResult] = deque()
        self._returned: deque[int] = deque()  # ids of kept requests nobody wants the caches of
        self._counters = BatchCounters()

    @property
    def stream(self) -> Any:
        return self._stream

    @property
    def prompt_cache_nbytes(self) -> int:
        """Bytes of the blocks in use; blocks that sequences share count once."""
        self._give_back()
        return self._engine.manager.blocks_in_use * self._engine.manager.pool.block_bytes

    def close(self) -> None:
        """Give up the hold on MLX's wired limit. Sequences that are left stay as they are."""
        self._engine.close(self._stream)

    def __del__(self) -> None:
        if hasattr(self, "_engine"):
            self.close()

    @contextlib.contextmanager
    def stats(self) -> Iterator[BatchStats]:
        """The work done while the block runs. The time of a step that computes both prompts and
        tokens is divided in proportion to their number."""
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
        """Add sequences; either all of them or, if something is wrong, none.

        Every argument has an entry for each sequence.

        Args:
            segments: each prompt in pieces; the end of every piece is reported.
            max_tokens: tokens to generate at most.
            caches: K/V of `all_tokens`, or None.
            all_tokens: tokens before the prompt.
            samplers: called with log-probabilities ``[1, vocab]``; None: the generator's.
            logits_processors: called with tokens and logits; None: no processors.
            stop_sequences: that end the sequence.
            params: all options of how tokens are chosen, seeds included, instead of `max_tokens`,
                `samplers` and `logits_processors`.

        Returns:
            The sequences' uids.

        Raises:
            ValueError: an argument of another length, an empty prompt, a token outside the
                vocabulary, a number of tokens that the pool could never hold, caches without the
                tokens that they hold.
        """
        n = len(segments)
        all_tokens = all_tokens or [[]] * n
        caches = caches or [None] * n
        stops = stop_sequences or [self._default_stop] * n
        rows = self._params(n, max_tokens, samplers, logits_processors, params)
        require_one_each(n, caches=caches, all_tokens=all_tokens, stop_sequences=stops, params=rows)
        require_tokens_of(caches, all_tokens)
        added: list[BatchSequence] = []
        try:
            for pieces, context, row, cache, stop in zip(
                segments, all_tokens, rows, caches, stops, strict=True
            ):
                uid = self._uid_count + len(added)
                added.append(self._add(uid, pieces, context, row, cache, stop))
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
        """Take sequences out, wherever they are, and free their blocks; unknown uids are ignored.

        Returns:
            What :meth:`extract_cache` says of them, if asked for.
        """
        extracted = self.extract_cache(uids) if return_prompt_caches else {}
        gone = set(uids)
        for uid in gone:
            sequence = self._sequences.pop(uid, None)
            if sequence is not None:
                self._end(sequence)
        self._frames = deque(f for frame in self._frames if (f := frame.without(gone)))
        return extracted

    def extract_cache(self, uids: Collection[int]) -> dict[int, tuple[Caches, list[int]]]:
        """Of each known sequence mlx-lm's caches, copied, and the tokens that they hold: all that
        the responses so far have told of."""
        known = {uid: self._sequences[uid] for uid in uids if uid in self._sequences}
        return {uid: self._extract(sequence) for uid, sequence in known.items()}

    # Steps

    def next(self) -> tuple[list[PromptResponse], list[Response]]:
        """Compute until there is something to tell, one step as a rule.

        Returns:
            How far prompts got, at most one response a sequence, and the next tokens. Both are
            empty only if no sequence is left.
        """
        self._give_back()
        with mx.stream(self._stream):
            while not self._frames and self._engine.has_work:
                self._step()
        if not self._frames:
            return [], []
        frame = self._frames.popleft()
        self._note_reported(frame)
        return frame.prompts, frame.tokens

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
        recording = self._engine.recorder.take()
        progress = self._progress(recording)
        recording.count(self._counters, len(outputs), seconds)
        frames = [NextResult() for _ in range(1 + max(map(len, progress.values()), default=0))]
        for responses in progress.values():
            for frame, response in zip(frames, responses, strict=False):
                frame.prompts.append(response)
        for output in outputs:
            sequence = self._by_request.get(output.request_id)
            if sequence is not None:
                told_first = len(progress.get(sequence.uid, ()))
                frames[told_first].tokens.append(self._response(sequence, output, recording))
        self._frames.extend(filter(None, frames))

    def _progress(self, recording: Recording) -> dict[int, list[PromptResponse]]:
        """By uid, what is to be told of prompts: the end of each segment, or how far it got."""
        progress: dict[int, list[PromptResponse]] = {}
        for span in recording.spans:
            sequence = self._by_request.get(span.request.id)
            if sequence is not None:
                done = min(span.stop - sequence.num_context, sequence.num_prompt)
                told = sequence.advance(done)
                if told:
                    progress[sequence.uid] = told
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
            self._engine.abort(output.request_id)  # of no effect if it ended by itself
            del self._by_request[output.request_id]
            response.all_tokens = list(tokens)
            if output.token is not None:
                make = partial(self._caches_of, sequence.request, response.all_tokens)
                response.prompt_cache = HeldBlocks(output.request_id, make, self._returned)
            response.error = completion.error if completion is not None else None
        return response

    def _note_reported(self, frame: NextResult) -> None:
        for prompt in frame.prompts:
            sequence = self._sequences[prompt.uid]
            sequence.num_reported = sequence.num_context + prompt.progress[0]
            sequence.caches = None
        for token in frame.tokens:
            if token.finish_reason is None:
                self._sequences[token.uid].num_reported += 1
            else:
                del self._sequences[token.uid]

    # Caches

    def _extract(self, sequence: BatchSequence) -> tuple[Caches, list[int]]:
        tokens = sequence.request.tokens[: sequence.num_reported]
        if sequence.caches is not None:
            return sequence.caches, tokens
        return self._caches_of(sequence.request, tokens), tokens

    def _caches_of(self, request: Request, tokens: Sequence[int]) -> Caches:
        with mx.stream(self._stream):
            runner = self._engine.model_runner
            return contiguous_caches(runner, request, tokens, self.prefill_step_size)

    def _give_back(self) -> None:
        """Free the blocks of ended sequences whose responses are gone."""
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
            max_tokens = max_tokens or [self.max_tokens] * n
            samplers = samplers or [None] * n
            processors = processors or [self.logits_processors] * n
            require_one_each(
                n, max_tokens=max_tokens, samplers=samplers, logits_processors=processors
            )
            return row_params(max_tokens, [s or self.sampler for s in samplers], processors)
        if max_tokens or samplers or processors:
            raise ValueError(
                "[insert] params is given beside max_tokens, samplers or logits_processors: "
                "expected those to be among the params"
            )
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
        sequence = BatchSequence(
            uid, request, len(context), boundaries(segments), stop.matcher(), caches
        )
        self._by_request[request_id] = sequence
        return sequence

    def _end(self, sequence: BatchSequence) -> None:
        if self._by_request.pop(sequence.request.id, None) is not None:
            self._engine.abort(sequence.request.id)
            self._engine.release(sequence.request.id)
