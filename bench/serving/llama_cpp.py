"""llama.cpp through its C interface: a model's weights, K/V, and a scheduler."""

import ctypes
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import llama_cpp
import mlx.nn as nn
import numpy as np

from bench.machine import cores
from bench.serving.gguf_file import check_writable, write_gguf
from bench.serving.servers import Level, Server, Token
from bench.serving.trace import Job

MAX_SEQUENCES = int(llama_cpp.llama_max_parallel_sequences())
"""Of one context."""

LOG_ERROR = 4  # of ``enum ggml_log_level``


@dataclass(frozen=True, slots=True)
class Span:
    """The next tokens of a sequence."""

    sequence: int  # below the context's number of sequences
    start: int  # position of the first token
    tokens: Sequence[int]
    wants_next: bool  # compute the token that follows


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _log_error(level: int, text: bytes, user_data: object) -> None:
    if level == LOG_ERROR:
        sys.stderr.write(text.decode())


llama_cpp.llama_log_set(_log_error, None)


def check_context(model: nn.Module | None, num_sequences: int) -> None:
    """Raises ValueError if no :class:`LlamaContext` can be made of these. None: of a file."""
    if model is not None:
        check_writable(model)
    if num_sequences > MAX_SEQUENCES:
        raise ValueError(
            f"expected at most {MAX_SEQUENCES} sequences side by side, got {num_sequences}"
        )


class LlamaContext:
    """Weights and K/V in llama.cpp, computed by all cores; each sequence has its own K/V stream.

    With flash attention llama.cpp converts float32 K/V to float16 in every step. Without it,
    llama.cpp attends in float32.

    Args:
        model: what :func:`bench.serving.gguf_file.write_gguf` takes; with a file, any.
        gguf: a file of the same model. None: it is written.
        context: tokens of the longest sequence.
        max_tokens: of all spans computed together.
        is_half: K/V in float16.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_sequences: int,
        context: int,
        max_tokens: int,
        is_flash: bool,
        is_half: bool,
        gguf: Path | None = None,
    ) -> None:
        weights = _written(model) if gguf is None else _load(gguf)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = num_sequences * context
        options.n_batch = options.n_ubatch = max_tokens
        options.n_seq_max = options.n_outputs_max = num_sequences
        options.n_threads = options.n_threads_batch = cores()
        options.flash_attn_type = int(is_flash)
        kv_type = llama_cpp.GGML_TYPE_F16 if is_half else llama_cpp.GGML_TYPE_F32
        options.type_k = options.type_v = kv_type
        options.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(weights, options)
        if not self._context:
            llama_cpp.llama_model_free(weights)
            raise MemoryError(f"llama.cpp cannot hold {options.n_ctx} tokens of K/V")
        weakref.finalize(self, _free, weights, self._context)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = int(model.args.vocab_size)
        self._batch = _Batch(max_tokens)
        self.num_sequences = num_sequences
        self.cells = int(llama_cpp.llama_n_ctx_seq(self._context))

    def decode(self, spans: Iterable[Span]) -> dict[int, int]:
        """Compute the spans together.

        Returns:
            By sequence, the likeliest next token of those that want it.
        """
        self._batch.struct.n_tokens = 0
        wanting = []
        for span in sorted(spans, key=lambda span: span.sequence):
            self._batch.add(span)
            if span.wants_next:
                wanting.append(span.sequence)
        status = llama_cpp.llama_decode(self._context, self._batch.struct)
        if status != 0:
            raise RuntimeError(f"llama_decode failed with status {status}")
        if not wanting:
            return {}
        logits = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self._context), (len(wanting), self._vocab_size)
        )
        return dict(zip(wanting, logits.argmax(axis=1).tolist(), strict=True))

    def forget(self, sequence: int) -> None:
        """Free the cells of a sequence."""
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def move(self, sequence: int, target: int) -> None:
        """Give a sequence the number `target`, which is free; its cells are copied."""
        llama_cpp.llama_memory_seq_cp(self._memory, sequence, target, -1, -1)
        self.forget(sequence)


class _Batch:
    """The arrays of a ``llama_batch``."""

    def __init__(self, capacity: int) -> None:
        self._tokens, self._positions, self._sequences = np.zeros((3, capacity), np.int32)
        self._wanted = np.zeros(capacity, np.int8)
        self._ones = np.ones(capacity, np.int32)
        addresses = self._sequences.ctypes.data + 4 * np.arange(capacity)
        self._pointers = addresses.astype(np.uintp)
        int32 = ctypes.POINTER(ctypes.c_int32)
        self.struct = llama_cpp.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(int32),
            pos=self._positions.ctypes.data_as(int32),
            n_seq_id=self._ones.ctypes.data_as(int32),
            seq_id=self._pointers.ctypes.data_as(ctypes.POINTER(int32)),
            logits=self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def add(self, span: Span) -> None:
        start, count = self.struct.n_tokens, len(span.tokens)
        end = start + count
        self._tokens[start:end] = span.tokens
        self._positions[start:end] = np.arange(span.start, span.start + count)
        self._sequences[start:end] = span.sequence
        self._wanted[start:end] = 0
        self._wanted[end - 1] = span.wants_next
        self.struct.n_tokens = end


def _written(model: nn.Module) -> Any:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        write_gguf(model, path)
        return _load(path)


def _load(path: Path) -> Any:
    options = llama_cpp.llama_model_default_params()
    weights = llama_cpp.llama_model_load_from_file(bytes(path), options)
    if not weights:
        raise RuntimeError("llama.cpp cannot load the model")
    return weights


def _free(weights: Any, context: Any) -> None:
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(weights)


@dataclass(slots=True)
class _Sequence:
    """A stream under way: `tokens` are its prompt and output, `num_computed` of them have K/V."""

    stream: int
    tokens: list[int]
    num_prompt: int
    num_tokens: int
    num_computed: int = 0


class LlamaServer(Server):
    """Continuous batching over llama.cpp's K/V cells, as in llama.cpp's own server.

    A step computes one token of each sequence that decodes, and prompt tokens up to the chunk,
    first come first served. llama.cpp computes sequences together if their numbers are
    consecutive, so the numbers in use are kept consecutive.

    Args:
        prefill_chunk: prompt tokens of a step, of all sequences together.
        token_bytes: K/V of one token.
    """

    def __init__(self, llama: LlamaContext, prefill_chunk: int, token_bytes: int) -> None:
        self._llama = llama
        self._prefill_chunk = prefill_chunk
        self._sequence_bytes = llama.cells * token_bytes
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}  # by llama.cpp's number, oldest first

    @property
    def pool_bytes(self) -> int:
        return self._llama.num_sequences * self._sequence_bytes

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, job: Job, streams: Sequence[int]) -> None:
        if job.kv_tokens > self._llama.cells:
            raise ValueError(
                f"expected a request of at most {self._llama.cells} tokens, got {job.kv_tokens}"
            )
        self._waiting += (
            _Sequence(stream, list(job.prompt), len(job.prompt), len(job.prompt) + job.max_tokens)
            for stream in streams
        )

    def step(self) -> list[Token]:
        spans = self._schedule()
        next_tokens = self._llama.decode(spans)
        for span in spans:
            self._running[span.sequence].num_computed += len(span.tokens)
        tokens = [self._take(number, token) for number, token in next_tokens.items()]
        if not self._waiting:
            self._close_gaps()
        return tokens

    def level(self) -> Level:
        return Level(
            running=len(self._running),
            waiting=len(self._waiting),
            held_bytes=len(self._running) * self._sequence_bytes,
            live_tokens=sum(sequence.num_computed for sequence in self._running.values()),
        )

    def _schedule(self) -> list[Span]:
        spans, room = [], self._prefill_chunk
        for number, sequence in self._running.items():
            is_prompt = sequence.num_computed < sequence.num_prompt
            if is_prompt and room == 0:
                continue
            span = _next_span(number, sequence, room if is_prompt else 1)
            spans.append(span)
            room -= len(span.tokens) if is_prompt else 0
        while room and self._waiting and len(self._running) < self._llama.num_sequences:
            number = self._lowest_free()
            self._running[number] = self._waiting.popleft()
            spans.append(_next_span(number, self._running[number], room))
            room -= len(spans[-1].tokens)
        self.prompt_tokens += self._prefill_chunk - room
        return spans

    def _take(self, number: int, token: int) -> Token:
        sequence = self._running[number]
        sequence.tokens.append(token)
        is_last = len(sequence.tokens) == sequence.num_tokens
        if is_last:
            del self._running[number]
            self._llama.forget(number)
        return Token(sequence.stream, token, is_last)

    def _lowest_free(self) -> int:
        return next(number for number in count() if number not in self._running)

    def _close_gaps(self) -> None:
        while self._lowest_free() < len(self._running):
            last, target = max(self._running), self._lowest_free()
            self._llama.move(last, target)
            self._running[target] = self._running.pop(last)


def _next_span(number: int, sequence: _Sequence, room: int) -> Span:
    start = sequence.num_computed
    tokens = sequence.tokens[start : start + room]
    return Span(number, start, tokens, start + len(tokens) == len(sequence.tokens))
