"""llama.cpp under the harness."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from bench.serving.llama_cpp import LlamaContext, Span
from bench.serving.servers import Counters, Level, Token
from bench.serving.trace import Job


@dataclass(slots=True)
class _Sequence:
    """A stream under way; `num_computed` of its `tokens`, prompt and output, have K/V."""

    stream: int
    tokens: list[int]
    num_prompt: int
    num_tokens: int
    num_computed: int = 0


class LlamaServer:
    """Continuous batching over llama.cpp's K/V cells, as its own server does it: in every step a
    token of each sequence that decodes, and prompt tokens up to the chunk, first come first served.

    llama.cpp computes sequences together whose numbers follow each other, so the numbers in use
    are kept together.

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
        self._prompt_tokens = 0

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

    def counters(self) -> Counters:
        return Counters(prompt_tokens=self._prompt_tokens)

    def causes(self, step: int) -> tuple[str, ...]:
        return ()

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
        self._prompt_tokens += self._prefill_chunk - room
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
