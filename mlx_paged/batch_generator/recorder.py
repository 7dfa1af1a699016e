"""Records the steps of an engine: their spans, and the log-probabilities of every token."""

from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.generate_utils import BatchCounters

from mlx_paged.runner.launched_step import LaunchedStep
from mlx_paged.scheduler.step import Observers, Span


@dataclass(slots=True)
class Recording:
    """The steps that ended."""

    spans: list[Span] = field(default_factory=list)  # of these steps, in order
    prompt_tokens: int = 0  # of the spans
    # By request id, the log-probabilities ``[vocab]`` for its newest token.
    logprobs: dict[int, mx.array] = field(default_factory=dict)

    def count(self, counters: BatchCounters, num_generated: int, seconds: float) -> None:
        """Add these steps to mlx-lm's counters."""
        share = self.prompt_tokens / max(1, self.prompt_tokens + num_generated)
        counters.prompt_tokens += self.prompt_tokens
        counters.prompt_time += seconds * share
        counters.generation_tokens += num_generated
        counters.generation_steps += num_generated > 0
        counters.decode_time += seconds * (1 - share)


class StepRecorder:
    """Records the steps that end, until :meth:`take`."""

    def __init__(self, observers: Observers[LaunchedStep]) -> None:
        self._recording = Recording()
        observers.settled.append(self._settled)

    def take(self) -> Recording:
        """The steps that ended since the last call."""
        recording, self._recording = self._recording, Recording()
        return recording

    def _settled(self, launched: LaunchedStep) -> None:
        step = launched.report.step
        self._recording.spans += step.spans
        self._recording.prompt_tokens += step.prompt_tokens
        if launched.sampled is not None:
            rows = launched.sampled.distributions
            ids = [request.id for request in launched.requests]
            self._recording.logprobs |= zip(ids, list(rows), strict=True)
