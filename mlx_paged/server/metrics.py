"""What ``/metrics`` says, in Prometheus' format.

Those of the engine are in :mod:`mlx_paged.server_engine_metrics`. Of the server:

=============================================  =================================================
mlx_paged_http_responses_total{code}           answers by status
mlx_paged_completions_total{finish_reason}     completions that ended
mlx_paged_time_to_first_token_seconds          histogram, from submission
mlx_paged_completion_seconds                   histogram, from submission to the end
=============================================  =================================================
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric

from mlx_paged.outputs import Completion
from mlx_paged.request import FinishReason
from mlx_paged.server.engine_metrics import EngineReading, families

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
