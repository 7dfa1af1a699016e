"""The metrics that ``/metrics`` shows, in Prometheus' format."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import mlx.core as mx
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily as COUNTER
from prometheus_client.core import GaugeMetricFamily as GAUGE
from prometheus_client.core import HistogramMetricFamily, Metric

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.ledger import account
from mlx_paged.holdings import Holder, Holding
from mlx_paged.metrics.recorder import BUCKETS_MS, TimeHistogram
from mlx_paged.server.loaded_model import Model
from mlx_paged.server.models import Models
from mlx_paged.server.recent import Recent

T = TypeVar("T")
Kind = type[GAUGE | COUNTER]

GAUGES: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "requests_running": ("Sequences in the batch.", lambda e: e.levels().running),
    "requests_waiting": ("Sequences that wait for a place.", lambda e: e.levels().waiting),
    "kv_blocks": ("Size of the KV pool in blocks.", lambda e: e.manager.allocator.num_blocks),
    "kv_blocks_in_use": ("Blocks that a sequence holds.", lambda e: e.levels().blocks_in_use),
    "kv_blocks_cached": ("Free ones with a prefix.", lambda e: e.levels().blocks_cached),
    "kv_block_bytes": ("Bytes of a block in all arrays.", lambda e: e.stats.block_bytes),
    "profiling": ("1 if each phase of a step is timed.", lambda e: e.ticks.profile),
}
COUNTERS = {  # by the name of their field in the engine's statistics
    "prompt_tokens": "Prompt tokens computed.",
    "cached_prompt_tokens": "Prompt tokens of ended completions found in the prefix cache.",
    "prefix_hit_tokens": "Tokens found in the prefix cache at an admission.",
    "decode_tokens": "Tokens computed in decodes.",
    "generation_tokens": "Tokens generated.",
    "kv_bytes_read": "Bytes of K/V that attention had to read.",
    "shared_keys": "Keys of a step that two of its sequences have in the same blocks.",
    "cow_clones": "Blocks copied on write.",
    "evictions": "Cached blocks that were reused.",
    "preemptions": "Sequences that were preempted.",
    "faults": "Steps that failed.",
    "steps": "Forward passes of the model.",
    "drafts": "Guessed tokens that were computed.",
    "accepted_drafts": "Guessed tokens that were right.",
}
KV_DISK = {  # by their names in the disk's metrics
    "hits": "Records read from the disk.",
    "bytes_read": "Bytes of these records.",
    "bytes_written": "Bytes written to the disk.",
    "seconds_saved": "Time saved: predicted time to compute what was read - time to read it.",
    "slower": "Requests that computed what it would take longer to read.",
}

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
NUM_SPIKES = 10
MODEL = "model_name"
VLLM_TIMES = [
    *("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"),
]


def engine_status(engine: Engine) -> dict[str, Any]:
    """What the status page shows of an engine. Call this on the engine's thread."""
    now, spikes = engine.clock(), [*engine.ticks.spikes][-NUM_SPIKES:]
    return {
        **{name: read(engine) for name, (_, read) in GAUGES.items()},
        **{name: getattr(engine.stats, name) for name in COUNTERS},
        "pressure": engine.stats.pressure,
        "spikes": [
            {"tick": s.index, "age_s": now - s.start, "ms": s.tick_ms, "causes": s.causes}
            for s in spikes
        ],
    }


def engine_metrics(engine: Engine, model: str) -> list[Metric]:
    """A copy of the engine's metrics. Call this on the engine's thread. Those with vLLM's names are
    what its dashboards, and routers such as llm-d's, read."""
    stats, ticks, allocator = engine.stats, engine.ticks, engine.manager.allocator
    parts = {name.removesuffix("_ms"): ms / 1000 for name, ms in ticks.total_ms.items()}
    del parts["tick"]  # the sum of the others
    referenced = _by_power_of_two(allocator.store.refcount_histogram())
    queries = stats.prefix_hit_tokens + stats.prompt_tokens
    levels = engine.levels()
    usage = levels.blocks_in_use / allocator.num_blocks
    vllm = "As in vLLM."
    config = GAUGE("vllm:cache_config_info", vllm, labels=["block_size", "num_gpu_blocks"])
    config.add_metric([str(stats.block_size), str(allocator.num_blocks)], 1)
    compiling, refused = stats.prewarm_seconds or 0.0, dict.fromkeys(stats.refused_kernels, 1.0)
    pairs = stats.drafts_by_depth
    by_depth = [{str(n): pair[i] for n, pair in enumerate(pairs, 1)} for i in (0, 1)]
    rows: list[tuple[Any, ...]] = [
        *((GAUGE, name, text, read(engine)) for name, (text, read) in GAUGES.items()),
        *((COUNTER, name, text, getattr(stats, name)) for name, text in COUNTERS.items()),
        (COUNTER, "kv_blocks_touched", "Blocks that attention had to read.", stats.blocks_touched),
        (COUNTER, "step_seconds", "Time of all steps.", stats.seconds),
        (COUNTER, "drafts_at_depth", "Guessed tokens by depth.", by_depth[0], "depth"),
        (COUNTER, "accepted_drafts_at_depth", "Those that were right.", by_depth[1], "depth"),
        (COUNTER, "prewarm_seconds", "Time to compile pipelines.", compiling),
        (GAUGE, "memory_budget_bytes", "Bytes at most by their use.", stats.memory_budget, "use"),
        (GAUGE, "kv_blocks_referenced", "Blocks by number of holders.", referenced, "references"),
        (COUNTER, "tick_seconds", "Time by part of the step.", parts, "part"),
        (GAUGE, "refused_kernels", "1 for each refused by the compiler.", refused, "kernel"),
        (COUNTER, "spikes", "Spikes by first cause.", ticks.causes, "cause"),
        (GAUGE, "vllm:num_requests_running", vllm, {model: levels.running}, MODEL),
        (GAUGE, "vllm:num_requests_waiting", vllm, {model: levels.waiting}, MODEL),
        (GAUGE, "vllm:kv_cache_usage_perc", vllm, {model: usage}, MODEL),
        (COUNTER, "vllm:prompt_tokens", vllm, {model: queries}, MODEL),
        (COUNTER, "vllm:generation_tokens", vllm, {model: stats.generation_tokens}, MODEL),
        (COUNTER, "vllm:num_preemptions", vllm, {model: stats.preemptions}, MODEL),
        (COUNTER, "vllm:prefix_cache_queries", vllm, {model: queries}, MODEL),
        (COUNTER, "vllm:prefix_cache_hits", vllm, {model: stats.prefix_hit_tokens}, MODEL),
    ]
    if stats.pressure is not None:
        rows += _of_pressure(stats.pressure)
    disk = engine.scheduler.tier_metrics()
    if disk is not None:
        rows += [(COUNTER, f"kv_disk_{name}", KV_DISK[name], disk[name]) for name in KV_DISK]
        lost = "Records that were not trusted or not written."
        rows.append((COUNTER, "kv_disk_dropped", lost, disk["dropped"], "reason"))
    return [
        config,
        *(_family(*row) for row in rows),
        _histogram("decode_tick_seconds", "Time of steps without prompt tokens.", ticks.decode),
        _histogram("prefill_chunk_seconds", "Time of steps with prompt tokens.", ticks.prefill),
    ]


def with_lines(read: Callable[[Engine], T]) -> Callable[[Engine], tuple[T, list[Holding]]]:
    """A function for the engine's thread: what `read` tells, and the lines of the ledger."""
    return lambda engine: (read(engine), engine.ledger.lines())


def _of_memory(account: Mapping[str, Any]) -> list[Metric]:
    """The account of a process's memory."""
    held = {name: each["bytes"] for name, each in account["held"].items()}
    limits = {name: each["limit"] for name, each in account["held"].items()}
    known = {name: limit for name, limit in limits.items() if limit is not None}
    text = "Bytes of this process, as the system counts them."
    return [
        _family(GAUGE, "memory_held_bytes", "Bytes by what holds them.", held, "what"),
        _family(GAUGE, "memory_limit_bytes", "Bytes that each holds at most.", known, "what"),
        _family(GAUGE, "process_bytes", text, account["process_bytes"]),
    ]


def _of_pressure(pressure: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """What the system said of its memory, and what was given back to it."""
    given = pressure["given_back"]
    levels = {name: float(name == pressure["level"]) for name in ("normal", "warning", "critical")}
    sums = {
        name: {rung: each[name] for rung, each in given.items()}
        for name in ("bytes", "uses", "vain")
    }
    back = "to the system under memory pressure"
    return [
        (GAUGE, "memory_pressure", "1 for the level that the system tells.", levels, "level"),
        (GAUGE, "footprint_bytes", "Bytes of this process.", pressure["footprint_bytes"]),
        (GAUGE, "memory_wired", "1 unless idle for minutes.", float(pressure["is_wired"])),
        (COUNTER, "given_back_bytes", f"Bytes given back {back}.", sums["bytes"], "what"),
        (COUNTER, "given_back", f"How often bytes were given back {back}.", sums["uses"], "what"),
        (COUNTER, "given_back_in_vain", "How often no bytes came of it.", sums["vain"], "what"),
        (COUNTER, "sleeps", "Sleeps of the machine.", pressure["sleeps"]),
    ]


def _family(
    kind: Kind, name: str, text: str, values: float | Mapping[str, float], label: str = ""
) -> Metric:
    """A metric with one value, or one for each value of a label."""
    family = kind(name if ":" in name else f"mlx_paged_{name}", text, labels=[label] * bool(label))
    for key, value in values.items() if isinstance(values, Mapping) else [("", values)]:
        family.add_metric([key] * bool(label), value)
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


def _summed(families: Iterable[Metric]) -> list[Metric]:
    """One family for each name, whose samples with the same labels are added."""
    found: dict[str, Metric] = {}
    for family in families:
        before = found.get(family.name)
        sums = {(s.name, *s.labels.values()): s for s in before.samples} if before else {}
        for sample in family.samples:
            key = (sample.name, *sample.labels.values())
            value = sample.value + (sums[key].value if key in sums else 0.0)
            sums[key] = sample._replace(value=value)
        family.samples = list(sums.values())
        found[family.name] = family
    return list(found.values())


class ServerMetrics:
    """Counts answers and completions; metrics without a model's name are sums over all models."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self.holders: list[Holder] = []  # of memory of the server itself
        self._registry = CollectorRegistry()
        keep: dict[str, Any] = {"registry": self._registry, "namespace": "mlx_paged"}
        since = "Time from the request's arrival to the "
        self.responses = Counter("http_responses", "Answers by status.", ["code"], **keep)
        self.completions = Counter("completions", "Ended completions.", ["finish_reason"], **keep)
        times: dict[str, Any] = keep | {"buckets": SECONDS, "unit": "seconds"}
        self.ttft = Histogram("time_to_first_token", f"{since}first token.", **times)
        self.seconds = Histogram("completion", f"{since}end.", **times)
        named: dict[str, Any] = {"labelnames": [MODEL], "registry": self._registry}
        self._vllm = {
            name: Histogram(f"vllm:{name}_seconds", "As in vLLM.", buckets=SECONDS, **named)
            for name in VLLM_TIMES
        }
        self._recent = {
            name: Recent(self._vllm[name], SECONDS)
            for name in ("time_to_first_token", "inter_token_latency")
        }
        named["labelnames"] = [MODEL, "finished_reason"]
        self._success = Counter("vllm:request_success", "As in vLLM.", **named)
        self._registry.register(self)

    def token(self, path: str, seconds: float, is_first: bool) -> None:
        """Note a token of the model at `path`: seconds since the arrival, or since the last one."""
        if is_first:
            self.ttft.observe(seconds)
        name = "time_to_first_token" if is_first else "inter_token_latency"
        self._recent[name].note()
        self._vllm[name].labels(self._models.names.label(path)).observe(seconds)

    def ended(
        self, path: str, reason: str, seconds: float | None, queue_s: float | None = None
    ) -> None:
        """Note the end of a completion; `seconds` None: the engine was not the one that ended
        it."""
        self.completions.labels(reason).inc()
        if seconds is not None:
            self.seconds.observe(seconds)
            label = self._models.names.label(path)
            self._vllm["e2e_request_latency"].labels(label).observe(seconds)
            self._success.labels(label, reason).inc()
            if queue_s is not None:
                self._vllm["request_queue_time"].labels(label).observe(queue_s)

    def status(self, path: str) -> dict[str, Any]:
        """What the status page shows of the model at `path` beside its engine: the name, ended
        completions by reason, and percentiles of latencies of the last minutes."""
        label = self._models.names.label(path)
        ended = {
            sample.labels["finished_reason"]: sample.value
            for family in self._success.collect()
            for sample in family.samples
            if sample.name.endswith("_total") and sample.labels[MODEL] == label
        }
        latencies = {name: recent.percentiles(label) for name, recent in self._recent.items()}
        return {"model": label, "ended": ended, **latencies}

    def engines(self) -> dict[str, Any]:
        """What the status page shows of all loaded models, and of the process's memory. Raises
        RuntimeError if an engine has stopped."""
        models, statuses, lines = list(self._models.loaded.values()), [], list[Holding]()
        for model in models:
            found, own = model.service.call(with_lines(engine_status))
            statuses.append(self.status(model.name) | found)
            lines += own
        return {"models": statuses, "memory": self._account(lines, models)}

    def _account(self, lines: Sequence[Holding], models: Iterable[Model]) -> dict[str, Any]:
        """The account of the process's memory, with the lines of its engines."""
        holders = [*self.holders, *(model.holdings for model in models)]
        return account([*lines, *(line for holder in holders for line in holder())])

    def failed_answers(self) -> dict[str, float]:
        """HTTP answers that are errors, by status."""
        return {
            sample.labels["code"]: sample.value
            for family in self.responses.collect()
            for sample in family.samples
            if sample.name.endswith("_total") and sample.labels["code"] >= "400"
        }

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> list[Metric]:
        """The engines' metrics, for the registry."""
        is_up = self._models.is_healthy
        found = [_family(GAUGE, "up", "1 while completions can be computed.", is_up)]
        held = {"active": mx.get_active_memory(), "cached": mx.get_cache_memory()}
        held |= {"peak": mx.get_peak_memory()}
        found.append(_family(GAUGE, "mlx_memory_bytes", "Bytes that MLX holds.", held, "kind"))
        models, lines = list(self._models.loaded.values()), list[Holding]()
        for model in models:
            with suppress(RuntimeError):  # its engine has stopped
                label = self._models.names.label(model.name)
                read = partial(engine_metrics, model=label)
                families, own = model.service.call(with_lines(read))
                found += families
                lines += own
        return _summed([*found, *_of_memory(self._account(lines, models))])

    def describe(self) -> list[Metric]:
        """Keeps the registry from calling :meth:`collect` when it registers this object."""
        return []
