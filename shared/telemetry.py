"""Traces, metrics and logs of a service process; the only room that sets up OpenTelemetry.

Spans always have real ids, so that logs and documents can name their trace; they are
exported over OTLP only when the standard OTEL_* variables ask for it. Never puts document
text, file names or queries into a span or a log line.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from typing import Any, ParamSpec, TypeVar

from opentelemetry import context, metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.log_lines import configure_logging, log_event

__all__ = [
    "CALL_SECONDS", "Telemetry", "carrier_of", "carry_context", "configure_logging", "current_carrier",
    "current_trace_id", "current_traceparent", "current_tracestate", "log_event", "mark_failed", "meter",
    "remote_context", "setup", "span", "span_from", "tracer",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T")

SCOPE = "readymark"
SHUTDOWN_SECONDS = 3.0
# Bounds of histograms of calls, in seconds: a query takes milliseconds, a batch of embeddings many seconds.
CALL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# The W3C form; anything else a client sends is ignored. Length is bounded by the pattern.
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_TRACESTATE = 512
_propagator = TraceContextTextMapPropagator()
_setup_lock = threading.Lock()


class Telemetry:
    """What a process has to shut down at its very end."""

    def __init__(self, traces: TracerProvider, meters: MeterProvider | None) -> None:
        self.traces = traces
        self._meters = meters

    def shutdown(self) -> None:
        """Exports what is left, for at most 3 s: a collector that is away must not hold up the process."""

        def finish() -> None:
            self.traces.shutdown()
            if self._meters is not None:
                self._meters.shutdown()

        # The SDK ignores its own time limit while it retries, so the limit is put around it.
        thread = threading.Thread(target=finish, name="telemetry-shutdown", daemon=True)
        thread.start()
        thread.join(SHUTDOWN_SECONDS)


def setup(service_name: str) -> Telemetry:
    """Installs the tracer and meter providers of this process; call it once, at the start."""
    os.environ.setdefault("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    with _setup_lock:
        resource = _make_resource(service_name)
        traces = TracerProvider(resource=resource, shutdown_on_exit=False)
        meters = None
        if _asks_for_export("TRACES"):
            _add_trace_exporter(traces)
        if _asks_for_export("METRICS"):
            meters = _make_meter_provider(resource)
            metrics.set_meter_provider(meters)
        trace.set_tracer_provider(traces)
    return Telemetry(traces, meters)


def _make_resource(service_name: str) -> Resource:
    """Returns what the OTEL_* variables say, and our own names where they say nothing."""
    given = Resource.create()
    names: dict[str, str] = {}
    if str(given.attributes["service.name"]).startswith("unknown_service"):
        names["service.name"] = service_name
    if "service.instance.id" not in given.attributes:
        # Without it the metrics of two workers would overwrite each other.
        names["service.instance.id"] = str(uuid.uuid4())
    return given.merge(Resource(names))


def _asks_for_export(signal: str) -> bool:
    """True when the standard variables name an OTLP endpoint or exporter for this signal."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = os.environ.get(f"OTEL_{signal}_EXPORTER", "")
    if exporter:
        return "otlp" in exporter.split(",")
    return bool(
        os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    )


def _add_trace_exporter(traces: TracerProvider) -> None:
    # Imported only when asked for: it costs a third of a second.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))


def _make_meter_provider(resource: Resource) -> MeterProvider:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    return MeterProvider(resource=resource, metric_readers=[reader], shutdown_on_exit=False)


def tracer() -> trace.Tracer:
    return trace.get_tracer(SCOPE)


def meter() -> metrics.Meter:
    return metrics.get_meter(SCOPE)


@contextlib.contextmanager
def span(name: str, attributes: Mapping[str, Any] | None = None) -> Iterator[Span]:
    """A child of the current span. An error that leaves it marks it, by its type: texts may be private."""
    with tracer().start_as_current_span(
        name, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as started:
        try:
            yield started
        except Exception as error:
            mark_failed(started, error)
            raise


def mark_failed(failed: Span, error: BaseException) -> None:
    failed.set_attribute("error.type", type(error).__name__)
    failed.set_status(Status(StatusCode.ERROR, type(error).__name__))


@contextlib.contextmanager
def span_from(
    traceparent: str | None,
    tracestate: str | None,
    name: str,
    *,
    as_link: bool = False,
    kind: SpanKind = SpanKind.CONSUMER,
    attributes: Mapping[str, Any] | None = None,
) -> Iterator[Span]:
    """A span that continues a stored trace, or, with `as_link`, begins a new one that links to it.

    Starts from an empty context either way: nothing of whatever ran before leaks in.
    """
    origin = trace.get_current_span(remote_context(traceparent, tracestate)).get_span_context()
    links = [Link(origin)] if origin.is_valid else []
    parent = context.Context() if as_link else remote_context(traceparent, tracestate)
    token = context.attach(context.Context())
    started = tracer().start_span(name, parent, kind, attributes, links)
    try:
        with trace.use_span(started, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            yield started
    finally:
        context.detach(token)


def remote_context(traceparent: str | None, tracestate: str | None) -> context.Context:
    """Returns the context that a caller sent; an empty one when it is missing or malformed."""
    if traceparent is None or not _TRACEPARENT.fullmatch(traceparent):
        return context.Context()
    carrier = {"traceparent": traceparent}
    if tracestate is not None and len(tracestate) <= _MAX_TRACESTATE:
        carrier["tracestate"] = tracestate
    return _propagator.extract(carrier, context.Context())


def current_carrier() -> dict[str, str]:
    """Returns `traceparent` and, if there is any, `tracestate` of the current span."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier


def carrier_of(given: Span) -> dict[str, str]:
    """Returns the carrier of a span that is not the current one."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(given))
    return carrier


def current_traceparent() -> str | None:
    return current_carrier().get("traceparent")


def current_tracestate() -> str | None:
    return current_carrier().get("tracestate")


def current_trace_id() -> str | None:
    """Returns the trace id as 32 hex digits; None outside any span."""
    current = trace.get_current_span().get_span_context()
    return f"{current.trace_id:032x}" if current.is_valid else None


def carry_context(function: Callable[P, T]) -> Callable[P, T]:
    """Returns `function` bound to the current context, for executors and threads, which lose it."""
    carried = copy_context()

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return carried.copy().run(function, *args, **kwargs)

    return run
