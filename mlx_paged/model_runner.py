"""One step on the model: lay out, bind the caches, run, sample, evaluate."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from mlx_paged.batch import Batch, Layout
from mlx_paged.block_manager import KVBlockManager
from mlx_paged.logit_rows import LogitRows
from mlx_paged.mlx_lm_cache import PagedLayerCache
from mlx_paged.model_probe import Batching, ModelProfile, leaves, make_caches
from mlx_paged.recurrent_states import RecurrentStates
from mlx_paged.request import Request
from mlx_paged.sampling import sample
from mlx_paged.scheduler import Span, Step
from mlx_paged.sdpa_hook import attention_hook


class ModelRunner:
    """Runs steps on an mlx-lm model whose K/V lives in `manager`'s pool."""

    def __init__(self, model: nn.Module, manager: KVBlockManager, profile: ModelProfile) -> None:
        self.model = model
        self.manager = manager
        self.batching = profile.batching
        self.caches = make_caches(model, manager.pool)
        self.layers = [c for c in leaves(self.caches) if isinstance(c, PagedLayerCache)]
        self.states = RecurrentStates([c for c in leaves(self.caches) if type(c) is ArraysCache])
        self.logit_rows = LogitRows.of(model)

    def run(self, step: Step) -> tuple[list[Request], list[int], list[float]]:
        """Compute a step.

        Returns:
            The requests that got a token, the tokens and their log-probabilities.
        """
        self.manager.pool.copy_blocks(step.copies)
        requests: list[Request] = []
        logits: list[mx.array] = []
        for batch in self._batches(step.spans):
            rows = self._forward(batch)
            if batch.sampled:
                requests += batch.sampled
                logits.append(rows)
        pending = self.manager.pool.handles()
        pending += self.states.arrays([span.request.id for span in step.spans])
        if not requests:
            mx.eval(pending)
            return [], [], []
        sampled = sample(logits[0] if len(logits) == 1 else mx.concatenate(logits), requests)
        mx.eval(sampled.tokens, sampled.logprobs, pending)
        return requests, sampled.tokens.tolist(), sampled.logprobs.tolist()  # type: ignore[return-value]

    def drop(self, request: Request) -> None:
        """Forget what is kept for a request outside the pool."""
        self.states.drop(request.id)

    def _batches(self, spans: Sequence[Span]) -> list[Batch]:
        """A step's forwards: one of rows for tokens that may share it, one for each other chunk."""
        allocator = self.manager.allocator
        together = [span for span in spans if self._may_share(span)]
        alone = [span for span in spans if not self._may_share(span)]
        batches = [Batch(together, allocator)] if together else []
        return batches + [Batch([span], allocator, Layout.CHUNK) for span in alone]

    def _may_share(self, span: Span) -> bool:
        """Whether the span's tokens may be rows among other sequences' rows."""
        if self.batching is Batching.ALTERNATE:
            return len(span) == 1 and span.start > 0
        return self.batching is Batching.MIXED

    def _forward(self, batch: Batch) -> mx.array:
        """Logits ``[R, vocab]`` of the batch's sampled rows."""
        for layer in self.layers:
            layer.bind(batch)
        if batch.start == 0 and batch.layout is Layout.CHUNK:  # new, or preempted and starting over
            self.states.drop(batch.seq_ids[0])
        self.states.load(batch.seq_ids)
        axis = 0 if batch.layout is Layout.ROWS else 1
        with attention_hook(), self.logit_rows.only(batch.sampled_rows, axis):
            logits: mx.array = self.model(batch.inputs, cache=self.caches)
        self.states.store(batch.seq_ids)
        if logits.shape[axis] != len(batch.sampled):  # a head that LogitRows did not find
            logits = mx.take(logits, batch.sampled_rows, axis=axis)
        return logits.flatten(0, 1)
