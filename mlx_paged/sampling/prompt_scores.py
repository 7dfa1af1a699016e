"""Log-probabilities of prompt tokens."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from mlx_paged.request import PromptLogprob, Request
from mlx_paged.sampling.sampler import most_likely

PART = 6
"""Rows of logits that are scored at once."""

ARRAYS = 10
"""Arrays of a row of logits in float32 that scoring makes, those of Metal's sort included."""


class PromptScores:
    """What a step's logits say of prompt tokens. Each part is computed, and waited for, before the
    next one is made: arrays as large as the logits are many.

    Args:
        spans: requests, and positions whose next tokens are meant.
        logits: ``[R, vocab]``; the last rows are those of the positions, in this order.
    """

    def __init__(self, spans: Sequence[tuple[Request, range]], logits: mx.array) -> None:
        self._spans = spans
        tokens = [t for request, at in spans for t in request.tokens[at.start + 1 : at.stop + 1]]
        columns = logits.shape[-1]
        # The embedding may have rows for tokens that the logits do not have.
        self._are_known = [token < columns for token in tokens]
        tokens = [min(token, columns - 1) for token in tokens]
        wanted = min(max(r.params.prompt_logprobs or 0 for r, _ in spans), logits.shape[-1])
        logits, self._rows = logits[-len(tokens) :], list[tuple[Any, ...]]()
        for start in range(0, len(tokens), PART):
            part = slice(start, start + PART)
            self._rows += scored(logits[part], tokens[part], wanted)

    def deliver(self) -> None:
        """Give each request its prompt tokens' log-probabilities."""
        rows = iter(zip(self._rows, self._are_known, strict=True))
        for request, positions in self._spans:
            assert request.prompt_logprobs is not None
            for position, ((logprob, rank, *top), is_known) in zip(positions, rows, strict=False):
                if not is_known:
                    continue
                pairs = zip(*top, strict=True) if top else ()
                kept = tuple(pairs)[: request.params.prompt_logprobs]
                request.prompt_logprobs[position + 1] = PromptLogprob(logprob, rank, kept)


def scored(logits: mx.array, tokens: list[int], wanted: int) -> list[tuple[Any, ...]]:
    """For each row of logits the log-probability and the rank of its token; if any are `wanted`,
    that many of the most likely tokens and their log-probabilities. All are evaluated."""
    logits, targets = logits.astype(mx.float32), mx.array(tokens)[:, None]
    own = mx.take_along_axis(logits, targets, axis=-1)
    # Of equally likely tokens the first one is taken.
    is_before = (logits == own) & (mx.arange(logits.shape[-1]) < targets)
    num_likelier = ((logits > own) | is_before).sum(axis=-1)
    norms = mx.logsumexp(logits, axis=-1, keepdims=True)
    arrays = [(own - norms).flatten(), 1 + num_likelier]
    if wanted:
        arrays += most_likely(logits - norms, wanted)
    mx.eval(arrays)
    return list(zip(*(cast(list[Any], array.tolist()) for array in arrays), strict=True))
