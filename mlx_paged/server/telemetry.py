"""A span of OpenTelemetry for each request, which a thread of the SDK sends over OTLP. Spans have
numbers and names of the server, and no text of a prompt or an answer."""

import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags
from starlette.datastructures import Headers
from starlette.types import Scope

from mlx_paged.server.computed import Computed
from mlx_paged.server.request_log import Record

CLOSE_S = 2.0  # for the last spans to be sent when the server stops
PARENT = re.compile("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
LONGEST_PARENT = 256
PARTS = (
    ("queue", "submitted", "begun"),
    ("prefill", "begun", "first_token"),
    ("decode", "first_token", "ended"),
)
"""The child spans: the name of each, and the times of :class:`Computed` where it begins and
ends."""


def parent_of(given: Sequence[str]) -> Context:
    """The context that the `traceparent` headers of a request name (W3C Trace Context). It is empty
    unless there is one, and this one is well formed."""
    if len(given) != 1 or len(given[0]) > LONGEST_PARENT:
        return Context()
    found = PARENT.fullmatch(given[0].strip())
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return Context()
    parent = SpanContext(int(found[2], 16), int(found[3], 16), True, TraceFlags(int(found[4], 16)))
    if not parent.is_valid:  # an id of zeros
        return Context()
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())


class Telemetry:
    """Makes a span of each request that asked for completions, when it has ended. An observer of
    the log of requests. Making a span waits for nothing: a queue takes it, and drops spans when it
    is full.

    Args:
        operations: by path, the operation's name in the GenAI conventions.
        processor: takes the spans.
    """

    def __init__(self, operations: Mapping[str, str], processor: SpanProcessor) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME", "mlx_paged")
        resource = Resource.create({"service.name": name})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("mlx_paged")
        self._operations = operations

    @classmethod
    def to(cls, endpoint: str, operations: Mapping[str, str]) -> "Telemetry":
        """Telemetry whose spans go to the URL of a collector. The log gets one line for each batch
        of spans that is lost, and none for each attempt to send it."""
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
        return cls(operations, BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))

    def close(self) -> None:
        """Send the spans that wait, for at most CLOSE_S: a collector may answer late or never."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def __call__(self, scope: Scope, record: Record) -> None:
        """Make the span of a request that has ended."""
        operation = self._operations.get(record.path)
        if operation is None or scope["method"] != "POST":
            return
        offset = time.time() - time.monotonic()

        def nanoseconds(at: float) -> int:
            return int((at + offset) * 1e9)

        computed = record.computed
        span = self._tracer.start_span(
            operation if computed is None else f"{operation} {computed.model}",
            context=parent_of(Headers(scope=scope).getlist("traceparent")),
            kind=SpanKind.SERVER,
            start_time=nanoseconds(record.begun),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "mlx_paged",
                "http.request.method": "POST",
                "http.response.status_code": record.status,
                "url.path": record.path,
                "http.response.header.x-request-id": [record.id],
            },
        )
        failed = computed is not None and computed.failed
        if record.status >= 400 or failed:
            span.set_attribute("error.type", "stream" if failed else str(record.status))
        if record.status >= 500 or failed:
            span.set_status(StatusCode.ERROR)
        if computed is not None:
            span.set_attributes(_attributes(computed))
            if computed.first_token is not None:
                span.add_event("first token", timestamp=nanoseconds(computed.first_token))
            for name, since, until in PARTS:
                start, end = getattr(computed, since), getattr(computed, until)
                if start is not None and end is not None:
                    own = trace.set_span_in_context(span, Context())
                    part = self._tracer.start_span(name, own, start_time=nanoseconds(start))
                    part.end(nanoseconds(end))
        span.end(nanoseconds(record.ended))


def _attributes(computed: Computed) -> dict[str, int | float | bool | str | Sequence[str]]:
    options = {f"gen_ai.request.{name}": value for name, value in computed.options.items()}
    return {
        **options,
        "gen_ai.request.model": computed.model,
        "gen_ai.response.model": computed.model,
        "gen_ai.usage.input_tokens": computed.input_tokens,
        "gen_ai.usage.cache_read.input_tokens": computed.cached_tokens,
        "gen_ai.usage.output_tokens": computed.output_tokens,
        "gen_ai.response.finish_reasons": computed.finish_reasons,
    }
