"""A collector for tests: takes OTLP over gRPC and keeps every span and the names of all metrics.

Runs in threads of its own, so that a busy or stopped event loop does not hold it up. As a
process, `python -m tests.support.otlp_sink --port 0 --out FILE`, it prints its address as
JSON and appends each span as a line of JSON to FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkSpan:
    """One exported span; ids are hex digits, an empty `parent_id` is none."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    status: str
    attributes: dict[str, Any]
    events: list[dict[str, Any]]
    links: list[tuple[str, str]]
    """(trace id, span id) of each."""


class OtlpSink:
    """What has arrived so far. Every method may be called from any thread."""

    def __init__(self, out: Path | None = None) -> None:
        self._arrived = threading.Condition()
        self._spans: list[SinkSpan] = []
        self._metrics: set[str] = set()
        self._out = out

    def spans(self, name: str | None = None) -> list[SinkSpan]:
        with self._arrived:
            return [span for span in self._spans if name in (None, span.name)]

    def metric_names(self) -> set[str]:
        with self._arrived:
            return set(self._metrics)

    def wait_until(self, condition: Callable[[list[SinkSpan]], bool], seconds: float = 10.0) -> None:
        """Returns once `condition` holds for the spans so far; fails after `seconds`."""
        deadline = time.monotonic() + seconds
        with self._arrived:
            while not condition(self._spans):
                left = deadline - time.monotonic()
                names = sorted({span.name for span in self._spans})
                assert left > 0, f"not within {seconds} s; arrived are {names}"
                self._arrived.wait(left)

    def add_spans(self, request: Any) -> None:
        spans = [
            _read(span, resource)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._arrived:
            self._spans.extend(spans)
            if self._out is not None:
                with self._out.open("a", encoding="utf-8") as lines:
                    lines.writelines(json.dumps(dataclasses.asdict(span)) + "\n" for span in spans)
            self._arrived.notify_all()

    def add_metrics(self, request: Any) -> None:
        with self._arrived:
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    self._metrics.update(metric.name for metric in scope.metrics)
            self._arrived.notify_all()


@contextlib.contextmanager
def running_sink(port: int = 0, out: Path | None = None) -> Iterator[tuple[str, OtlpSink]]:
    """Serves a sink; yields its endpoint, http://host:port, and the sink."""
    sink = OtlpSink(out)
    server = grpc.server(ThreadPoolExecutor(4, "otlp-sink"), options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(sink), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(sink), server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"http://127.0.0.1:{bound}", sink
    finally:
        server.stop(0).wait()


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, sink: OtlpSink) -> None:
        self._sink = sink

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._sink.add_spans(request)
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, sink: OtlpSink) -> None:
        self._sink = sink

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._sink.add_metrics(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


def _read(span: Any, resource: Any) -> SinkSpan:
    return SinkSpan(
        service=str(_attributes(resource.resource.attributes).get("service.name", "")),
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        status=trace_pb2.Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
        attributes=_attributes(span.attributes),
        events=[{"name": event.name, **_attributes(event.attributes)} for event in span.events],
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return (
        getattr(value, kind) if kind in {"string_value", "bool_value", "int_value", "double_value"} else None
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--port", type=int, default=0)
    arguments.add_argument("--out", type=Path, required=True)
    chosen = arguments.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with running_sink(chosen.port, chosen.out) as (endpoint, _):
        sys.stdout.write(json.dumps({"endpoint": endpoint}) + "\n")
        sys.stdout.flush()
        stop.wait()


if __name__ == "__main__":
    main()
