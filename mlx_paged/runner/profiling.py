"""A runner that synchronises between the phases of a step, so that each can be timed.

A profiled step is slower than a normal one: nothing overlaps, and every phase of every layer waits
for the device.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_paged.metrics.recorder import PhaseTimes
from mlx_paged.runner.batch import Batch
from mlx_paged.runner.model_runner import ModelRunner
from mlx_paged.sampling.sampler import Sampled, Sampler, Scores

WRAPPED = {"gather": "gather", "write": "kv_write", "copy_blocks": "kv_write"}
"""Methods of the pool and the phase that each belongs to."""


class ProfilingRunner(ModelRunner):
    """Computes the same steps and records in `phases` how long each phase took.

    Methods are wrapped only on this runner's pool and layers, so other runners stay fast.
    """

    def __init__(self, phases: PhaseTimes, *args: Any, **options: Any) -> None:
        super().__init__(*args, make_sampler=lambda: TimedSampler(phases), **options)
        self._phases = phases
        for name, phase in WRAPPED.items():
            setattr(self.pool, name, self._timed(phase, getattr(self.pool, name)))
        for layer in self.layers:
            layer.attend = self._timed("attention", layer.attend)  # type: ignore[method-assign]
            layer.append = lambda *_: None  # type: ignore[method-assign]  # so that `write` is used

    def _forward(self, batch: Batch) -> tuple[mx.array, Scores | None]:
        with self._phases.measure("forward"):
            logits, scores = super()._forward(batch)
            # Ranks compute logits that nobody samples nowhere, or all of them.
            mx.eval([logits] * bool(batch.sampled), self.pool.handles())
        return logits, scores

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed: its inputs are evaluated before, its results within the phase."""
        pool = self.pool

        def timed(*args: Any) -> Any:
            mx.eval(args, pool.handles())
            with self._phases.measure(phase):
                result = function(*args)
                mx.eval(result, pool.handles())
            return result

        return timed


class TimedSampler(Sampler):
    """A sampler that waits for its tokens."""

    def __init__(self, phases: PhaseTimes) -> None:
        super().__init__()
        self._phases = phases

    def __call__(self, logits: mx.array, *others: Any, **options: Any) -> Sampled | None:
        mx.eval(logits)
        with self._phases.measure("sample"):
            sampled = super().__call__(logits, *others, **options)
            assert sampled is not None, "a profiled step is read before the next one"
            mx.eval(sampled.tokens, sampled.logprobs)
        return sampled
