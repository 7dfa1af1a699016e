"""What the steps of an engine computed, in full: spans, and every token's log-probability."""

from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.generate_utils import BatchCounters

from mlx_paged.engine.engine import Engine
from mlx_paged.request import Request
from mlx_paged.runner.model_runner import LaunchedStep, ModelRunner
from mlx_paged.scheduler.runner_protocol import SampledToken
from mlx_paged.scheduler.step import Span, Step


@dataclass(slots=True)
class Recording:
    """Steps that ended.

    Attributes:
        spans: what they computed, in order.
        prompt_tokens: how many of those tokens were tokens of prompts.
        logprobs: by request id, log-probabilities ``[vocab]`` of which its newest token was chosen.
    """

    spans: list[Span] = field(default_factory=list)
    prompt_tokens: int = 0
    logprobs: dict[int, mx.array] = field(default_factory=dict)

    def count(self, counters: BatchCounters, num_generated: int, seconds: float) -> None:
        """Add these steps to mlx-lm's counters; their time is divided between prompt tokens and
        generated ones in proportion to their number."""
        share = self.prompt_tokens / max(1, self.prompt_tokens + num_generated)
        counters.prompt_tokens += self.prompt_tokens
        counters.prompt_time += seconds * share
        counters.generation_tokens += num_generated
        counters.generation_steps += num_generated > 0
        counters.decode_time += seconds * (1 - share)


class StepRecorder:
    """A runner that keeps what the steps of another one computed until somebody takes it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._under_way: dict[LaunchedStep, Step] = {}
        self._recording = Recording()
        self.drop = runner.drop
        self.fork = runner.fork

    def take(self) -> Recording:
        """The steps that ended since the last call."""
        recording, self._recording = self._recording, Recording()
        return recording

    def launch(self, step: Step, before: LaunchedStep | None) -> LaunchedStep:
        launched = self._runner.launch(step, before)
        self._under_way[launched] = step
        return launched

    def collect(self, launched: LaunchedStep) -> list[SampledToken]:
        step = self._under_way.pop(launched)
        choices = self._runner.collect(launched)
        self._recording.spans += step.spans
        self._recording.prompt_tokens += step.prompt_tokens
        if launched.sampled is not None:
            rows = launched.sampled.distributions
            ids = [request.id for request in launched.requests]
            self._recording.logprobs |= zip(ids, list(rows), strict=True)
        return choices

    def recover(self) -> None:
        self._under_way.clear()
        self._runner.recover()


class RecordedEngine(Engine):
    """An engine whose steps are recorded; the arguments are those of :class:`Engine`."""

    model_runner: ModelRunner
    recorder: StepRecorder

    def _wrap(self, runner: ModelRunner) -> StepRecorder:
        self.model_runner = runner
        self.recorder = StepRecorder(runner)
        return self.recorder

    def request(self, request_id: int) -> Request:
        """A request under way, or one that ended and was kept."""
        return self._requests.get(request_id) or self._kept[request_id]
