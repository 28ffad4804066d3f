"""Spans that a test made, and a real PostgreSQL without any schema."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deploy.local.embedded_postgres import EmbeddedPostgres
from shared import telemetry
from tests.support.waiting import eventually

_exporter = InMemorySpanExporter()


class Spans:
    """The ended spans of one test."""

    def all(self) -> list[ReadableSpan]:
        return list(_exporter.get_finished_spans())

    def named(self, name: str, kind: trace.SpanKind | None = None) -> list[ReadableSpan]:
        return [span for span in self.all() if span.name == name and kind in (None, span.kind)]

    async def wait_for(self, name: str, kind: trace.SpanKind, seconds: float = 1.0) -> ReadableSpan:
        """Returns the span once it has ended; fails after `seconds`."""
        await eventually(lambda: bool(self.named(name, kind)), seconds)
        return self.named(name, kind)[0]


@pytest.fixture(scope="session")
def _provider() -> TracerProvider:
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        telemetry.setup("test")
    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    provider.add_span_processor(SimpleSpanProcessor(_exporter))
    return provider


@pytest.fixture
def spans(_provider: TracerProvider) -> Iterator[Spans]:
    _exporter.clear()
    yield Spans()
    _exporter.clear()


@pytest.fixture(scope="session")
def bare_postgres(postgres_server: EmbeddedPostgres) -> EmbeddedPostgres:
    """A started server; the tests of this folder use no database of ours on it."""
    return postgres_server
