"""The sequences of a BatchGenerator, and what is told of them."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TypeAlias

from mlx_lm.generate import PromptProcessingBatch, StopSequences

from mlx_paged.batch_generator.batch_response import Caches, Response
from mlx_paged.request import Request

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
class Frame:
    """What one call of `next` returns."""

    prompts: list[PromptResponse] = field(default_factory=list)
    tokens: list[Response] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.prompts or self.tokens)

    def without(self, uids: Collection[int]) -> "Frame":
        return Frame(
            [response for response in self.prompts if response.uid not in uids],
            [response for response in self.tokens if response.uid not in uids],
        )
