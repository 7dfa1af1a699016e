"""The metrics that ``/metrics`` shows, in Prometheus' format."""

import collections
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from mlx_paged.engine.engine import Engine
from mlx_paged.metrics.tick_log import BUCKETS_MS, TimeHistogram
from mlx_paged.outputs import Completion
from mlx_paged.request import FinishReason

COUNTERS = {
    "prompt_tokens": "Prompt tokens computed.",
    "cached_prompt_tokens": "Prompt tokens of ended completions found in the prefix cache.",
    "prefix_hit_tokens": "Tokens found in the prefix cache at an admission.",
    "decode_tokens": "Tokens computed in decodes.",
    "generation_tokens": "Tokens generated.",
    "kv_bytes_read": "Bytes of K/V that attention had to read.",
    "cow_clones": "Blocks copied on write.",
    "evictions": "Cached blocks that were reused.",
    "preemptions": "Sequences that were preempted.",
    "faults": "Steps that failed.",
    "steps": "Forward passes of the model.",
    "drafts": "Guessed tokens that were computed.",
    "accepted_drafts": "Guessed tokens that were right.",
}
"""Counters with the name of their field in the engine's statistics."""


def engine_metrics(engine: Engine) -> list[Metric]:
    """A copy of the engine's metrics. Call this on the engine's thread."""
    stats, scheduler, ticks = engine.stats, engine.scheduler, engine.ticks
    allocator = scheduler.allocator
    parts = {name.removesuffix("_ms"): ms / 1000 for name, ms in ticks.total_ms.items()}
    del parts["tick"]  # the sum of the others
    return [
        up_metric(True),
        _gauge("requests_running", "Sequences in the batch.", len(scheduler.running)),
        _gauge("requests_waiting", "Sequences that wait for a place.", len(scheduler.waiting)),
        _gauge("kv_blocks", "Size of the KV pool in blocks.", allocator.num_blocks),
        _gauge("kv_blocks_in_use", "Blocks that a sequence holds.", allocator.blocks_in_use),
        _gauge("kv_blocks_cached", "Free blocks in the prefix cache.", allocator.num_cached),
        _gauge("kv_block_bytes", "Bytes of a block in all arrays of the pool.", stats.block_bytes),
        _gauge("profiling", "1 if each phase of a step is timed.", ticks.profile),
        *(_counter(name, text, getattr(stats, name)) for name, text in COUNTERS.items()),
        _counter("kv_blocks_touched", "Blocks that attention had to read.", stats.blocks_touched),
        _counter("step_seconds", "Time of all steps.", stats.seconds),
        _counter("prewarm_seconds", "Time to compile GPU pipelines.", stats.prewarm_seconds or 0.0),
        _labelled(
            GaugeMetricFamily,
            "kv_blocks_referenced",
            "Blocks by how many sequences hold them.",
            "references",
            _by_power_of_two(allocator.refcount_histogram),
        ),
        _labelled(CounterMetricFamily, "tick_seconds", "Time by part of the step.", "part", parts),
        _labelled(CounterMetricFamily, "spikes", "Spikes by first cause.", "cause", ticks.causes),
        _histogram("decode_tick_seconds", "Time of steps without prompt tokens.", ticks.decode),
        _histogram("prefill_chunk_seconds", "Time of steps with prompt tokens.", ticks.prefill),
    ]


def up_metric(is_up: bool) -> Metric:
    return _gauge("up", "1 while completions can be computed.", is_up)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"mlx_paged_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"mlx_paged_{name}", text, value)


def _labelled(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    family = kind(f"mlx_paged_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, text: str, times: TimeHistogram) -> Metric:
    bounds = [*(f"{ms / 1000:g}" for ms in BUCKETS_MS), "+Inf"]
    buckets = list(zip(bounds, accumulate(times.counts), strict=True))
    return HistogramMetricFamily(
        f"mlx_paged_{name}", text, buckets=buckets, sum_value=times.sum_ms / 1000
    )


def _by_power_of_two(histogram: Mapping[int, int]) -> dict[str, int]:
    """Sums under few labels: "0", "1", "2-3", "4-7" and so on."""
    found: collections.Counter[str] = collections.Counter()
    for references, blocks in histogram.items():
        low = 1 << (references.bit_length() - 1) if references else 0
        found[f"{low}-{2 * low - 1}" if low > 1 else str(low)] += blocks
    return dict(found)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    """Counts answers and completions. Asks the engine for its own metrics.

    Args:
        read_engine: returns the engine's metrics.
    """

    def __init__(self, read_engine: Callable[[], Iterable[Metric]]) -> None:
        self.collect = read_engine  # the registry calls it
        self._registry = registry = CollectorRegistry()
        self._responses = Counter(
            "mlx_paged_http_responses", "Answers by status.", ["code"], registry=registry
        )
        self._completions = Counter(
            "mlx_paged_completions",
            "Completions that ended.",
            ["finish_reason"],
            registry=registry,
        )
        self._ttft = Histogram(
            "mlx_paged_time_to_first_token_seconds",
            "Time from submission to the first token.",
            buckets=SECONDS,
            registry=registry,
        )
        self._seconds = Histogram(
            "mlx_paged_completion_seconds",
            "Time from submission to the end.",
            buckets=SECONDS,
            registry=registry,
        )
        registry.register(self)

    def count_response(self, code: int) -> None:
        self._responses.labels(str(int(code))).inc()

    def count_completion(self, completion: Completion) -> None:
        self._completions.labels(str(completion.finish_reason)).inc()
        self._seconds.observe(completion.seconds)
        if completion.ttft_s is not None:
            self._ttft.observe(completion.ttft_s)

    def count_abandoned(self, n: int) -> None:
        """Count `n` completions that ended because their client left."""
        self._completions.labels(str(FinishReason.ABORT)).inc(n)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Keeps the registry from calling :meth:`collect` when it registers this object."""
        return []
