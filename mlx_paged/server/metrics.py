"""What ``/metrics`` says, in Prometheus' format.

Those of the engine are in :mod:`mlx_paged.server.metrics`. Of the server:

=============================================  =================================================
mlx_paged_http_responses_total{code}           answers by status
mlx_paged_completions_total{finish_reason}     completions that ended
mlx_paged_time_to_first_token_seconds          histogram, from submission
mlx_paged_completion_seconds                   histogram, from submission to the end
=============================================  =================================================
"""

import collections
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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

GAUGES = {
    "up": "1 while completions can be computed.",
    "requests_running": "Completions computed side by side.",
    "requests_waiting": "Completions that wait for a place.",
    "kv_blocks": "Size of the KV pool in blocks.",
    "kv_blocks_in_use": "Blocks that somebody holds.",
    "kv_blocks_cached": "Free blocks whose content may be found again.",
    "kv_block_bytes": "Bytes of a block over all layers.",
    "profiling": "1 if steps are synchronised and timed in phases.",
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens computed.",
    "cached_prompt_tokens": "Prompt tokens of ended completions found in the prefix cache.",
    "prefix_hit_tokens": "Tokens found in the prefix cache at an admission.",
    "decode_tokens": "Tokens computed that are no prompt's.",
    "generation_tokens": "Tokens generated.",
    "kv_bytes_read": "Bytes of live K/V that attention had to read.",
    "kv_blocks_touched": "Blocks that attention had to read.",
    "cow_clones": "Blocks copied on write.",
    "evictions": "Cached blocks that were given to others.",
    "preemptions": "Sequences whose K/V was given up for others.",
    "faults": "Steps that failed.",
    "steps": "Forwards of the model.",
    "step_seconds": "Time that steps took.",
    "prewarm_seconds": "Time in which the GPU pipelines were compiled.",
}
HISTOGRAMS = {
    "decode_tick_seconds": "Time of steps without prompt tokens.",
    "prefill_chunk_seconds": "Time of steps with prompt tokens.",
}


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What an engine's metrics were at one moment.

    Attributes:
        values: gauges and counters by name.
        references: blocks by how many sequences hold them.
        seconds: by what they were spent on.
        spikes: by cause.
        histograms: counts by bucket, the last one unbounded, and the sum of all times in ms.
    """

    values: Mapping[str, float]
    references: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    spikes: Mapping[str, int] = field(default_factory=dict)
    histograms: Mapping[str, tuple[list[int], float]] = field(default_factory=dict)


def read_engine(engine: Engine) -> EngineReading:
    """The engine's metrics now; to be called on its own thread."""
    stats, scheduler, ticks = engine.stats, engine.scheduler, engine.ticks
    allocator = scheduler.allocator
    total_ms = {name: ms for name, ms in ticks.total_ms.items() if name != "tick_ms"}
    return EngineReading(
        values={
            "up": 1,
            "requests_running": len(scheduler.running),
            "requests_waiting": len(scheduler.waiting),
            "kv_blocks": allocator.num_blocks,
            "kv_blocks_in_use": allocator.blocks_in_use,
            "kv_blocks_cached": allocator.num_cached,
            "kv_block_bytes": stats.block_bytes,
            "profiling": ticks.profile,
            "prompt_tokens": stats.prompt_tokens,
            "cached_prompt_tokens": stats.cached_prompt_tokens,
            "prefix_hit_tokens": stats.prefix_hit_tokens,
            "decode_tokens": stats.decode_tokens,
            "generation_tokens": stats.generation_tokens,
            "kv_bytes_read": stats.kv_bytes_read,
            "kv_blocks_touched": stats.blocks_touched,
            "cow_clones": stats.cow_clones,
            "evictions": stats.evictions,
            "preemptions": stats.preemptions,
            "faults": stats.faults,
            "steps": stats.steps,
            "step_seconds": stats.seconds,
            "prewarm_seconds": stats.prewarm_seconds or 0.0,
        },
        references=_by_power_of_two(allocator.refcount_histogram),
        seconds={name.removesuffix("_ms"): ms / 1000 for name, ms in total_ms.items()},
        spikes=dict(ticks.causes),
        histograms={
            "decode_tick_seconds": _copied(ticks.decode),
            "prefill_chunk_seconds": _copied(ticks.prefill),
        },
    )


def _by_power_of_two(histogram: Mapping[int, int]) -> dict[str, int]:
    """Few labels, however many sequences share a block: "0", "1", "2-3", "4-7" and so on."""
    found: collections.Counter[str] = collections.Counter()
    for references, blocks in histogram.items():
        low = 1 << (references.bit_length() - 1) if references else 0
        found[f"{low}-{2 * low - 1}" if low > 1 else str(low)] += blocks
    return dict(found)


def _copied(histogram: TimeHistogram) -> tuple[list[int], float]:
    return list(histogram.counts), histogram.sum_ms


def families(reading: EngineReading) -> Iterator[Metric]:
    """As Prometheus' metrics."""
    for name, value in reading.values.items():
        if name in GAUGES:
            yield GaugeMetricFamily(f"mlx_paged_{name}", GAUGES[name], value)
        else:
            yield CounterMetricFamily(f"mlx_paged_{name}", COUNTERS[name], value)
    held = GaugeMetricFamily(
        "mlx_paged_kv_blocks_referenced",
        "Blocks by how many sequences hold them.",
        labels=["references"],
    )
    for references, blocks in reading.references.items():
        held.add_metric([references], blocks)
    yield held
    spent = CounterMetricFamily(
        "mlx_paged_tick_seconds", "Time by what the engine did.", labels=["part"]
    )
    for part, seconds in reading.seconds.items():
        spent.add_metric([part], seconds)
    yield spent
    spikes = CounterMetricFamily(
        "mlx_paged_spikes", "Far too long steps by their likeliest cause.", labels=["cause"]
    )
    for cause, count in reading.spikes.items():
        spikes.add_metric([cause], count)
    yield spikes
    for name, (counts, sum_ms) in reading.histograms.items():
        bounds = [*(f"{ms / 1000:g}" for ms in BUCKETS_MS), "+Inf"]
        yield HistogramMetricFamily(
            f"mlx_paged_{name}",
            HISTOGRAMS[name],
            buckets=list(zip(bounds, accumulate(counts), strict=True)),
            sum_value=sum_ms / 1000,
        )


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    """Counts what the server does, and asks for what the engine did.

    Args:
        read_engine: what the engine says, or that it is not up.
    """

    def __init__(self, read_engine: Callable[[], EngineReading]) -> None:
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
        return families(self._read_engine())
