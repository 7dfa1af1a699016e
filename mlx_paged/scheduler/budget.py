"""How many prompt tokens a step takes beside its decodes. Knows no mlx."""

from collections.abc import Iterable

from mlx_paged.request import Request
from mlx_paged.scheduler.cost_model import CostModel, StepWork
from mlx_paged.scheduler.step import Span, Step

MIN_CHUNK = 16
"""Prompt tokens that every step computes, if any wait, whatever the stall bound: no prompt of P
tokens at the head of the queue takes more than P / MIN_CHUNK steps."""


class ChunkBudget:
    """A number of tokens and, where streams run, a predicted time.

    Attributes:
        prefill_chunk: prompt tokens of a step at most.
        max_stall: seconds that a step with decodes may take, as `cost` predicts, plus what
            MIN_CHUNK tokens cost; None: no such bound.
        cost: learns what steps take.

    Raises:
        ValueError: either is not above 0.
    """

    def __init__(self, prefill_chunk: int, max_stall: float | None) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"[Scheduler] prefill_chunk is {prefill_chunk}: expected >= 1")
        if max_stall is not None and not max_stall > 0:
            raise ValueError(f"[Scheduler] max_stall is {max_stall}: expected > 0 or None")
        self.prefill_chunk = prefill_chunk
        self.max_stall = max_stall
        self.cost = CostModel()

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long; of interest only where time is bounded."""
        if self.max_stall is not None and seconds > 0:
            self.cost.observe(work, seconds)

    def left(self, step: Step, request: Request, behind: Iterable[Request] = ()) -> int:
        """Prompt tokens of `request` that the step still takes.

        A prompt gives way to those `behind` it that are less than half as long as what is left of
        it: they get what they want, up to half of what the step still takes.
        """
        room = self._room(step, request)
        if room <= MIN_CHUNK or request.num_pending <= room:
            return min(room, request.num_pending)
        shorter = [r.num_pending for r in behind if 2 * r.num_pending < request.num_pending]
        return max(room - sum(shorter), room // 2, MIN_CHUNK)

    def least(self, request: Request) -> int:
        """Prompt tokens of a waiting request that are worth its admission.

        Where time is bounded a step often has some for a few tokens more. Requests let in for
        these would hold blocks for whole prompts, many at once, and be done no sooner.
        """
        if self.max_stall is None:
            return 1
        return min(MIN_CHUNK, self.prefill_chunk, request.num_pending)

    def _room(self, step: Step, request: Request) -> int:
        """As `left`, if there were nobody else."""
        wanted = min(request.num_pending, self.prefill_chunk - step.chunk_tokens)
        if self.max_stall is None or step.decode_rows == 0 or wanted <= 0:
            return wanted
        return self.cost.chunk_within(
            self.max_stall,
            step.work,
            start=request.num_computed,
            wanted=wanted,
            minimum=max(0, MIN_CHUNK - step.chunk_tokens),
        )


def is_under_way(request: Request, step: Step, budget: int, block_size: int) -> bool:
    """Whether `step` computes, for somebody else, most of what `request` would compute in it.

    Then the request is better off waiting: after the step it finds those blocks computed, and the
    step's tokens go to somebody who needs them.

    Args:
        budget: prompt tokens that the step still takes.
    """
    return any(
        2 * _shared_tokens(request, span, block_size) >= _own_tokens(request, span, budget)
        for span in step.spans
        if len(span) > 1 and span.request.salt == request.salt
    )


def _shared_tokens(request: Request, span: Span, block_size: int) -> int:
    """Tokens of full blocks of the request that the span computes."""
    ours, theirs = request.tokens, span.request.tokens
    start = stop = span.start // block_size * block_size
    if ours[:start] != theirs[:start]:
        return 0
    last = min(span.stop, len(ours))
    while stop + block_size <= last and ours[stop : (end := stop + block_size)] == theirs[stop:end]:
        stop = end
    return stop - start


def _own_tokens(request: Request, span: Span, budget: int) -> int:
    """Tokens that the request would compute now, with a hit as far as the span's predecessors."""
    return max(1, min(len(request.tokens) - span.start, budget))
