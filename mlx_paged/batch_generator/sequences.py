"""The sequences of a BatchGenerator, and what is told of them."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch, StopSequences
from mlx_lm.sample_utils import greedy_sampler

from mlx_paged.request import Request
from mlx_paged.runner.model_probe import leaves
from mlx_paged.sampling_params import SamplingParams

Caches = list[Any]
"""mlx-lm's caches, one a layer."""


class HeldBlocks:
    """The blocks of an ended sequence, held until nobody can ask for its caches any more.

    Args:
        request_id: of the sequence, which the engine keeps.
        make: makes its caches.
        returned: where the id goes when this is dropped, in whatever thread that happens.
    """

    def __init__(self, request_id: int, make: Callable[[], Caches], returned: deque[int]) -> None:
        self._request_id = request_id
        self._make = make
        self._returned = returned

    def __call__(self) -> Caches:
        return self._make()

    def __del__(self) -> None:
        self._returned.append(self._request_id)


class Response(GenerationBatch.Response):
    """mlx-lm's response: one more token of one sequence.

    Attributes:
        uid, token: whose token, and its id.
        logprobs: ``[vocab]``, log-probabilities of which the token was chosen.
        finish_reason: "stop", "length", or "error" where a processor or sampler raised or the
            model failed; `token` and `logprobs` then mean nothing. None while the sequence goes on.
        all_tokens: of a sequence that ended: everything from its first token.
        prompt_cache: of a sequence that ended: mlx-lm's caches of `all_tokens`. They are made when
            they are first asked for, in the thread of the generator, and cost a copy then.
        error: what went wrong.
    """

    error: str | None = None
    _prompt_cache: Caches | HeldBlocks | None

    @property
    def prompt_cache(self) -> Caches | None:
        if isinstance(self._prompt_cache, HeldBlocks):
            self._prompt_cache = self._prompt_cache()
        return self._prompt_cache

    @prompt_cache.setter
    def prompt_cache(self, cache: "Caches | HeldBlocks | None") -> None:
        self._prompt_cache = cache

    def __repr__(self) -> str:
        return f"Response(uid={self.uid}, token={self.token}, finish_reason={self.finish_reason!r})"


PromptResponse: TypeAlias = PromptProcessingBatch.Response


@dataclass(slots=True)
class BatchSequence:
    """A prompt that was inserted.

    Attributes:
        num_context: tokens that came before the prompt proper.
        boundaries: ends of the prompt's segments, in tokens of the prompt.
        num_computed: tokens of the prompt whose computation was reported or waits to be.
        num_reported: tokens, from the first of all, that the caller knows to be computed.
        matcher: of its stop sequences.
        caches: what the caller gave for the context.
    """

    uid: int
    request: Request
    num_context: int
    boundaries: set[int]
    matcher: StopSequences.Matcher
    caches: Caches | None = None
    num_computed: int = 0
    num_reported: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_reported = self.num_context

    @property
    def num_prompt(self) -> int:
        return self.request.num_prompt - self.num_context

    def advance(self, done: int) -> list[PromptResponse]:
        """`done` tokens of the prompt are computed: what is to be told of it, one by one."""
        if done <= self.num_computed:
            return []
        ends = {end for end in self.boundaries if self.num_computed < end <= done}
        self.num_computed = done
        return [
            PromptResponse(
                self.uid, (stop, self.num_prompt), stop in self.boundaries, stop == self.num_prompt
            )
            for stop in sorted(ends | {done})
        ]


@dataclass(slots=True)
class NextResult:
    """What one call of `next` returns."""

    prompts: list[PromptResponse] = field(default_factory=list)
    tokens: list[Response] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.prompts or self.tokens)

    def without(self, uids: Collection[int]) -> "NextResult":
        return NextResult(
            [response for response in self.prompts if response.uid not in uids],
            [response for response in self.tokens if response.uid not in uids],
        )


LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
Sampler = Callable[[mx.array], mx.array]


def row_params(
    max_tokens: Sequence[int],
    samplers: Sequence[Sampler],
    processors: Sequence[Sequence[LogitsProcessor] | None],
) -> list[SamplingParams]:
    """How each sequence chooses its tokens; greedy rows need no sampler of their own."""
    return [
        SamplingParams(
            max_tokens=most,
            sampler=None if sampler is greedy_sampler else sampler,
            logits_processors=tuple(own or ()),
        )
        for most, sampler, own in zip(max_tokens, samplers, processors, strict=True)
    ]


def boundaries(segments: Sequence[Sequence[int]]) -> set[int]:
    """Ends of segments; as in mlx-lm, the last token of a prompt is one of its own."""
    ends = set(accumulate(map(len, segments)))
    return ends | {max(ends) - 1}


def require_one_each(n: int, **arguments: Sequence[Any] | None) -> None:
    """ValueError unless every argument that is given has `n` entries."""
    for name, values in arguments.items():
        if values is not None and len(values) != n:
            raise ValueError(f"[insert] {name} has {len(values)} entries: expected {n}")


def require_tokens_of(caches: Sequence[Caches | None], all_tokens: Sequence[Sequence[int]]) -> None:
    """ValueError where caches hold something without just the tokens that they hold."""
    for i, (cache, tokens) in enumerate(zip(caches, all_tokens, strict=True)):
        layers = list(leaves(cache or []))
        if all(layer.empty() for layer in layers):
            continue
        held = max((layer.offset for layer in layers if hasattr(layer, "offset")), default=None)
        if not tokens or held not in (None, len(tokens)):
            raise ValueError(
                f"[insert] caches[{i}] holds {held or 'some'} tokens and all_tokens[{i}] has "
                f"{len(tokens)}: expected the very tokens that the caches hold, K/V of which is "
                "found in the pool or computed"
            )
