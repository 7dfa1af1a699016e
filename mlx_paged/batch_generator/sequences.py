"""The sequences of a BatchGenerator, their responses and caches, and checks of its arguments."""

from collections.abc import Callable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch, StopSequences
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from mlx_paged.arguments import integer, require
from mlx_paged.kv.pool import as_int32
from mlx_paged.request import Request
from mlx_paged.runner.device_errors import ended
from mlx_paged.runner.layer_cache import PagedLayerCache
from mlx_paged.runner.model_probe import leaves
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.sampling_params import SamplingParams
from mlx_paged.scheduler.step import DeviceError

Caches = list[Any]  # mlx-lm's caches, one for each layer


class Response(GenerationBatch.Response):
    """mlx-lm's response: one more token of one sequence.

    Attributes:
        uid: of the sequence.
        token: its next token.
        logprobs: ``[vocab]``, the log-probabilities for this token.
        finish_reason: "stop", "length", or "error" if a processor or sampler raised or the model
            failed; `token` is then the last known one again, which a loop of mlx-lm's would append,
            and `logprobs` have no meaning. None while the sequence continues.
        all_tokens: of an ended sequence: its prompt and its generated tokens.
        prompt_cache: of an ended sequence: mlx-lm's caches of `all_tokens`. The first access makes
            them, which costs a copy. Access them in the thread of the generator.
        error: the error of a sequence that ended with one.
    """

    error: str | None = None
    _prompt_cache: Caches | partial[Caches] | None

    @property
    def prompt_cache(self) -> Caches | None:
        if isinstance(self._prompt_cache, partial):
            self._prompt_cache = self._prompt_cache()
        return self._prompt_cache

    @prompt_cache.setter
    def prompt_cache(self, cache: "Caches | partial[Caches] | None") -> None:
        self._prompt_cache = cache

    def __repr__(self) -> str:
        return f"Response(uid={self.uid}, token={self.token}, finish_reason={self.finish_reason!r})"


PromptResponse: TypeAlias = PromptProcessingBatch.Response
NextResult = tuple[list[PromptResponse], list[Response]]
"""What one call of `next` returns: the progress of prompts, and tokens."""


@dataclass(slots=True)
class BatchSequence:
    """A prompt that was inserted."""

    uid: int
    request: Request
    num_context: int  # tokens before the prompt
    boundaries: set[int]  # ends of the prompt's segments, in tokens of the prompt
    matcher: StopSequences.Matcher  # of its stop sequences
    caches: Caches | None = None  # the caller's, of the context
    num_done: int = 0  # prompt tokens that are computed and reported, or soon reported
    num_reported: int = 0  # tokens after the context that responses have reported

    @property
    def num_prompt(self) -> int:
        return self.request.num_prompt - self.num_context

    def advance(self, done: int) -> list[PromptResponse]:
        """Responses for the prompt when `done` of its tokens are computed, one for each end."""
        if done <= self.num_done:
            return []
        ends = {end for end in self.boundaries if self.num_done < end <= done}
        self.num_done = done
        return [
            PromptResponse(
                self.uid,
                (stop, self.num_prompt),
                stop in self.boundaries,
                stop == self.num_prompt,
            )
            for stop in sorted(ends | {done})
        ]


def contiguous_caches(
    runner: ModelRunner, request: Request, tokens: Sequence[int], chunk: int
) -> Caches:
    """mlx-lm's caches of exactly `tokens`, evaluated; the request's tokens begin with these. K/V in
    the pool is copied. The model computes the rest, `chunk` tokens at once: the newest token, or
    all tokens if the pool has no longer what these caches keep, or may be wrong."""
    make = partial(_contiguous_caches, runner, request, tokens, chunk)
    try:
        return ended(make)
    except DeviceError:  # what was copied may be wrong
        return ended(make)


def _contiguous_caches(
    runner: ModelRunner, request: Request, tokens: Sequence[int], chunk: int
) -> Caches:
    caches: Caches = make_prompt_cache(runner.model)
    start = min(request.num_computed, len(tokens))
    if start and (runner.error or _has_lost(runner, request, start, caches)):
        start = 0
    if start:
        _copy(runner, request, start, caches)
    for first in range(start, len(tokens), chunk):
        runner.model(mx.array([tokens[first : first + chunk]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    mx.eval([cache.state for cache in caches])
    return caches


def _has_lost(runner: ModelRunner, request: Request, num_tokens: int, caches: Caches) -> bool:
    """Whether the pool lacks what `caches` of the first `num_tokens` of a request keep: states that
    have gone on, or blocks that a window has left. Only rotating caches drop old tokens, too."""
    allocator, position = runner.allocator, num_tokens
    for source, target in zip(leaves(runner.caches), leaves(caches), strict=True):
        if not isinstance(source, PagedLayerCache):
            if allocator.state(request.id).position != num_tokens:
                return True
        elif type(target) is not RotatingKVCache:
            group = allocator.groups[source.place.group]
            position = position if group.keeps_all else 0
    return not allocator.can_continue(request.id, position)


def _copy(runner: ModelRunner, request: Request, num_tokens: int, caches: Caches) -> None:
    """Copy the K/V of the first `num_tokens` of a request, or its states, into new caches."""
    allocator = runner.allocator
    num_blocks = allocator.blocks_needed(num_tokens)
    block_ids = [
        as_int32(table[0])
        for group in range(len(allocator.groups))
        for table in allocator.store.tables(
            allocator.table(request.id, group)[None, :num_blocks], group
        )
    ]
    if runner.states.exist:
        runner.states.load([allocator.state(request.id).id])
    for source, target in zip(leaves(runner.caches), leaves(caches), strict=True):
        if not isinstance(source, PagedLayerCache):
            target.cache = list(source.cache)
        elif source.stores:
            target.update_and_fetch(*source.contiguous(block_ids[source.place.table], num_tokens))


LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
Sampler = Callable[[mx.array], mx.array]


def row_params(
    max_tokens: Sequence[int],
    samplers: Sequence[Sampler],
    processors: Sequence[Sequence[LogitsProcessor] | None],
) -> list[SamplingParams]:
    """The params of each sequence; a greedy one needs no sampler of its own."""
    return [
        SamplingParams(
            max_tokens=limit,
            sampler=None if sampler is greedy_sampler else sampler,
            logits_processors=tuple(own or ()),
        )
        for limit, sampler, own in zip(max_tokens, samplers, processors, strict=True)
    ]


def boundaries(segments: Sequence[Sequence[int]]) -> set[int]:
    """Ends of segments; as in mlx-lm, the last token of a prompt is a segment of its own."""
    ends = set(accumulate(map(len, segments)))
    return ends | {max(ends) - 1}


def check_options(stop_tokens: Any, completion: int, prefill: int, step: int) -> None:
    """ValueError unless a generator can be made with these stop tokens and sizes."""
    integer("BatchGenerator", "completion_batch_size", completion, 1)
    integer("BatchGenerator", "prefill_batch_size", prefill, 1)
    integer("BatchGenerator", "prefill_step_size", step, 1)
    are_lists = stop_tokens is None or (is_list(stop_tokens) and all(map(is_list, stop_tokens)))
    require(are_lists, "BatchGenerator", "stop_tokens", stop_tokens, "lists of token ids")


def one_each(n: int, given: Any, default: Any) -> Any:
    """`given`, or `n` times the default; as in mlx-lm, an empty list counts as None."""
    return [default] * n if given is None or (is_list(given) and len(given) == 0) else given


def is_list(value: object) -> bool:
    """Whether a value has entries in an order, and is no text."""
    return (
        isinstance(value, Sized)
        and not isinstance(value, str | bytes | Set | Mapping)
        and getattr(value, "ndim", 1) > 0
    )


def _are_caches(prompt_cache: Sequence[Any]) -> bool:
    return all(hasattr(cache, "state") for cache in prompt_cache)


_ENTRIES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "segments": (lambda x: is_list(x) and all(map(is_list, x)), "lists of token ids"),
    "caches": (lambda x: x is None or (is_list(x) and _are_caches(x)), "caches or None"),
    "all_tokens": (is_list, "a list of token ids"),
    "logits_processors": (lambda x: x is None or is_list(x), "a list of processors or None"),
    "stop_sequences": (lambda x: isinstance(x, StopSequences), "StopSequences"),
}
"""What an argument has for each sequence: a check, and its meaning in words. SamplingParams checks
the other arguments."""


def require_one_each(n: int, **arguments: Sequence[Any]) -> None:
    """ValueError unless every argument is a list with `n` valid entries."""
    for name, values in arguments.items():
        require(is_list(values), "insert", name, values, "a list with an entry for each sequence")
        if len(values) != n:
            raise ValueError(f"[insert] {name} has {len(values)} entries: expected {n}")
        if name in _ENTRIES:
            is_valid, expected = _ENTRIES[name]
            for i, value in enumerate(values):
                require(is_valid(value), "insert", f"{name}[{i}]", value, expected)


def require_tokens_of(caches: Sequence[Caches | None], all_tokens: Sequence[Sequence[int]]) -> None:
    """ValueError if a cache that is not empty comes without exactly the tokens that it holds."""
    for i, (cache, tokens) in enumerate(zip(caches, all_tokens, strict=True)):
        layers = list(leaves(cache or []))
        if all(layer.empty() for layer in layers):
            continue
        held = max((layer.offset for layer in layers if hasattr(layer, "offset")), default=None)
        if not tokens or held not in (None, len(tokens)):
            raise ValueError(
                f"[insert] caches[{i}] holds {held or 'some'} tokens and all_tokens[{i}] has "
                f"{len(tokens)}: expected exactly the tokens that the caches hold; their K/V is "
                "found in the pool or computed"
            )
