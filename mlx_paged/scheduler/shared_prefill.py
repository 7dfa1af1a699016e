"""Prompts that come together and begin alike: whether one waits for the other. Knows no mlx."""

from mlx_paged.request import Request
from mlx_paged.scheduler.step import Span, Step


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
