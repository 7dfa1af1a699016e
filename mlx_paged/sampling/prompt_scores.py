"""Log-probabilities of prompt tokens."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from mlx_paged.request import PromptLogprob, Request
from mlx_paged.sampling.sampler import most_likely


class PromptScores:
    """What a step's logits say of prompt tokens, in float32, not evaluated yet.

    Args:
        spans: requests, and positions whose next tokens are meant.
        logits: ``[R, vocab]``; the last rows are those of the positions, in this order.

    Attributes:
        arrays: to be evaluated.
    """

    def __init__(self, spans: Sequence[tuple[Request, range]], logits: mx.array) -> None:
        self._spans = spans
        tokens = [t for request, at in spans for t in request.tokens[at.start + 1 : at.stop + 1]]
        logits, targets = logits[-len(tokens) :].astype(mx.float32), mx.array(tokens)[:, None]
        own = mx.take_along_axis(logits, targets, axis=-1)
        # Of equally likely tokens the first one is taken.
        is_before = (logits == own) & (mx.arange(logits.shape[-1]) < targets)
        ranks = 1 + ((logits > own) | is_before).sum(axis=-1)
        norms = mx.logsumexp(logits, axis=-1, keepdims=True)
        self.arrays = [(own - norms).flatten(), ranks]
        wanted = max(request.params.prompt_logprobs or 0 for request, _ in spans)
        if wanted:
            self.arrays += most_likely(logits - norms, min(wanted, logits.shape[-1]))

    def deliver(self) -> None:
        """Give each request its prompt tokens' log-probabilities."""
        logprobs, ranks, *tops = (cast(list[Any], array.tolist()) for array in self.arrays)
        pairs = [list(zip(*row, strict=True)) for row in zip(*tops, strict=True)]
        rows = zip(logprobs, ranks, pairs or [[]] * len(ranks), strict=True)
        for request, positions in self._spans:
            assert request.prompt_logprobs is not None
            for position, (logprob, rank, top) in zip(positions, rows, strict=False):
                kept = tuple(top[: request.params.prompt_logprobs])
                request.prompt_logprobs[position + 1] = PromptLogprob(logprob, rank, kept)
