"""A head as the model of a runner."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.heads.head import Head
from mlx_paged.holdings import CountedBy, Holding
from mlx_paged.kv.memory import promise
from mlx_paged.kv.pool import as_int32
from mlx_paged.runner.batch import Batch, Layout
from mlx_paged.runner.hosted_model import HostedModel
from mlx_paged.runner.kept_states import KeptStates
from mlx_paged.runner.skip_unsampled import LogitRows


class Given:
    """What entries take of the positions before, by request.

    Args:
        array: ``[N, ...]``, what ``Head.fuse`` or ``Head.feed_back`` returned.
        counts: of each request, in the order of the rows, how many these are.
    """

    def __init__(self, array: mx.array, counts: dict[int, int]) -> None:
        self.array = array
        sizes = list(counts.values())
        self._ids = [*counts]
        self._firsts = dict(zip(counts, np.cumsum([0, *sizes]).tolist(), strict=False))
        self._counts = counts

    def rows(self, request_ids: Sequence[int]) -> mx.array:
        """The rows of these requests, in this order."""
        if request_ids == self._ids:
            return self.array
        spans = [self._firsts[i] + np.arange(self._counts[i]) for i in request_ids]
        return mx.take(self.array, as_int32(np.concatenate(spans)), axis=0)


class HeadModel(HostedModel):
    """Computes the guesses of a head as a runner wants it: tokens in, logits of the target's
    vocabulary out. Tokens that the head cannot guess have -inf.

    Args:
        head: bound to its target.
        forms: an array ``[1, 1, ...]`` for each of the target's states that the head reads.
        columns: of the target's logits.

    Attributes:
        given: what the entries of the next step take of the positions before.
        kept: the target's states that the head has not read.
    """

    extra_seconds = 0.0

    def __init__(self, head: Head, forms: Sequence[mx.array], columns: int) -> None:
        super().__init__()
        self.head = head
        self.kept = KeptStates(sum(form.nbytes for form in forms))
        promise(self.kept)
        fused = head.fuse([mx.zeros(form.shape, form.dtype) for form in forms])
        self._form = fused.shape[2:], fused.dtype
        self._columns: mx.array | None = None
        self.given: Given | None = None
        self._left: list[tuple[list[int], mx.array]] = []
        self._batch: Batch | None = None
        if head.target_ids is not None:
            of_target = np.full(columns, len(head.target_ids), np.int32)
            of_target[np.array(head.target_ids)] = np.arange(len(head.target_ids))
            self._columns = as_int32(of_target)

    def take_left(self) -> Given:
        """What the last entries of the step before leave for the next ones."""
        left, self._left = self._left, []
        counts = {request_id: 1 for ids, _ in left for request_id in ids}
        arrays = [array for _, array in left]
        return Given(arrays[0] if len(arrays) == 1 else mx.concatenate(arrays), counts)

    def forget(self) -> None:
        """Forget what a step was given and what it left."""
        self.given, self._left, self._batch = None, [], None

    def make_cache(self) -> list[Any]:
        return self.head.make_cache()

    def forget_kept(self) -> bool:
        return False

    @property
    def kept_bytes(self) -> int:
        return self.kept.most_bytes

    def holdings(self) -> list[Holding]:
        return [Holding("hidden_states", self.kept.nbytes, self.kept.most_bytes, CountedBy.MLX)]

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """What the batch's entries take of the positions before."""
        if self.given is None:
            return {}
        self._batch = batch
        rows = self.given.rows(batch.seq_ids)
        return {"fused": rows[:, None] if batch.layout is Layout.ROWS else rows[None]}

    def __call__(
        self, tokens: mx.array, cache: list[Any], fused: mx.array | None = None
    ) -> mx.array:
        head, batch = self.head, self._batch
        if fused is None:
            shape, dtype = self._form
            fused = mx.zeros((*tokens.shape, *shape), dtype)
        hidden = head(fused, head.embed(tokens), cache)
        if batch is not None:
            self._batch = None
            last = [span.stop - span.start for span in batch.spans]
            rows = as_int32(np.cumsum(last) - 1)
            left = mx.take(head.feed_back(hidden).flatten(0, 1), rows, axis=0)
            self._left.append((batch.seq_ids, left))
        logits = head.logits(LogitRows.of(self).take(hidden))
        if self._columns is None:
            return logits
        none = mx.full((*logits.shape[:-1], 1), -mx.inf, logits.dtype)
        return mx.take(mx.concatenate([logits, none], axis=-1), self._columns, axis=-1)
