"""What ``/metrics`` says, in Prometheus' format.

Of the engine (read between two steps):

=============================================  =================================================
mlx_paged_requests_running                     completions computed side by side
mlx_paged_requests_waiting                     completions that wait for a place
mlx_paged_kv_blocks                            size of the KV pool in blocks
mlx_paged_kv_blocks_in_use                     blocks that somebody holds
mlx_paged_kv_blocks_cached                     free blocks whose content may be found again
mlx_paged_kv_block_bytes                       bytes of a block over all layers
mlx_paged_prompt_tokens_total                  prompt tokens computed
mlx_paged_cached_prompt_tokens_total           prompt tokens found in the prefix cache
mlx_paged_generation_tokens_total              tokens generated
mlx_paged_steps_total                          forwards of the model
mlx_paged_step_seconds_total                   time they took
mlx_paged_preemptions_total                    sequences whose K/V was given up for others
mlx_paged_faults_total                         steps that failed
=============================================  =================================================

Of the server:

=============================================  =================================================
mlx_paged_up                                   1 while completions can be computed
mlx_paged_http_responses_total{code}           answers by status
mlx_paged_completions_total{finish_reason}     completions that ended
mlx_paged_time_to_first_token_seconds          histogram, from submission
mlx_paged_completion_seconds                   histogram, from submission to the end
=============================================  =================================================
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mlx_paged.engine import Engine
from mlx_paged.outputs import Completion
from mlx_paged.request import FinishReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

GAUGES = {
    "requests_running": "Completions computed side by side.",
    "requests_waiting": "Completions that wait for a place.",
    "kv_blocks": "Size of the KV pool in blocks.",
    "kv_blocks_in_use": "Blocks that somebody holds.",
    "kv_blocks_cached": "Free blocks whose content may be found again.",
    "kv_block_bytes": "Bytes of a block over all layers.",
    "up": "1 while completions can be computed.",
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens computed.",
    "cached_prompt_tokens": "Prompt tokens found in the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "steps": "Forwards of the model.",
    "step_seconds": "Time that steps took.",
    "preemptions": "Sequences whose K/V was given up for others.",
    "faults": "Steps that failed.",
}


def engine_values(engine: Engine) -> dict[str, float]:
    """The engine's metrics by name; to be called on its own thread."""
    stats, scheduler, allocator = engine.stats, engine.scheduler, engine.scheduler.allocator
    return {
        "up": 1,
        "requests_running": len(scheduler.running),
        "requests_waiting": len(scheduler.waiting),
        "kv_blocks": allocator.num_blocks,
        "kv_blocks_in_use": allocator.blocks_in_use,
        "kv_blocks_cached": allocator.num_cached,
        "kv_block_bytes": stats.block_bytes,
        "prompt_tokens": stats.prompt_tokens,
        "cached_prompt_tokens": stats.cached_prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "steps": stats.steps,
        "step_seconds": stats.seconds,
        "preemptions": stats.preemptions,
        "faults": stats.faults,
    }


class ServerMetrics:
    """Counts what the server does, and asks for what the engine did.

    Args:
        read_engine: returns :func:`engine_values`, or ``{"up": 0}`` if it cannot.
    """

    def __init__(self, read_engine: Callable[[], Mapping[str, float]]) -> None:
        self._read_engine = read_engine
        self._registry = CollectorRegistry()
        self._responses = Counter(
            "mlx_paged_http_responses", "Answers by status.", ["code"], registry=self._registry
        )
        self._completions = Counter(
            "mlx_paged_completions",
            "Completions that ended.",
            ["finish_reason"],
            registry=self._registry,
        )
        self._ttft = self._histogram("time_to_first_token", "From submission to the first token.")
        self._seconds = self._histogram("completion", "From submission to the end.")
        self._registry.register(self)

    def _histogram(self, name: str, text: str) -> Histogram:
        full_name = f"mlx_paged_{name}_seconds"
        return Histogram(full_name, text, buckets=SECONDS, registry=self._registry)

    def count_response(self, code: int) -> None:
        self._responses.labels(str(int(code))).inc()

    def count_completion(self, completion: Completion) -> None:
        self._completions.labels(str(completion.finish_reason)).inc()
        self._seconds.observe(completion.seconds)
        if completion.ttft_s is not None:
            self._ttft.observe(completion.ttft_s)

    def count_abandoned(self, n: int) -> None:
        """Completions whose end nobody waited for."""
        self._completions.labels(str(FinishReason.ABORT)).inc(n)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: what the registry calls instead of :meth:`collect` when it registers this."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The engine's metrics at this moment."""
        values = self._read_engine()
        for name, value in values.items():
            if name in GAUGES:
                yield GaugeMetricFamily(f"mlx_paged_{name}", GAUGES[name], value)
            else:
                yield CounterMetricFamily(f"mlx_paged_{name}", COUNTERS[name], value)
