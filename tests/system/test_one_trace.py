"""One trace from the client's span to the commit, over every process, and nothing private in it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from readymark_client import Readymark

from tests.support.otlp_sink import SinkSpan, running_sink
from tests.support.processes import REPOSITORY, Cluster, start_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

INGEST = "readymark.ingest.v1.IngestService"
EMBEDDER = "readymark.embedder.v1.EmbedderService"
SEARCH = "readymark.search.v1.SearchService/Search"
# Occurs in the text, the file's name, the metadata and the query, and may occur nowhere else.
CANARY = "xylocanary"
TEXT = "\n\n".join(f"Paragraph {n}: the {CANARY} pump number {n} was repaired on Monday." for n in range(30))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Journey:
    """What one document and one search left behind, read after all processes had stopped."""

    trace_id: str
    caller_span_id: str
    search_trace_id: str
    document: dict[str, Any]
    """As `readymark get --json` prints it."""
    hits: int
    spans: list[SinkSpan]
    metrics: set[str]
    lines: list[dict[str, Any]]
    exit_codes: set[int]

    def trace(self, trace_id: str) -> list[SinkSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]


@pytest.fixture(scope="module")
def journey(models: Path) -> Journey:
    with running_sink() as (endpoint, sink):
        settings = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "READYMARK_LOG_LEVEL": "DEBUG",
            "READYMARK_INGEST_POLL_SECONDS": "0.2",
            "READYMARK_INGEST_CHUNK_MAX_TOKENS": "64",
            "READYMARK_INGEST_CHUNK_OVERLAP_TOKENS": "8",
        }
        cluster = start_cluster(models, settings)
        try:
            for start in (cluster.embedder, cluster.ingest, cluster.search, cluster.worker):
                start()
            trace_id, caller_span_id, document_id, search_trace_id, hits = travel(cluster)
            document = get_by_command_line(cluster, document_id)
            # Stopping is what sends the last spans; nobody has to wait for them.
            exit_codes = {process.stop() for process in reversed(cluster.processes)}
        finally:
            cluster.stop()
        return Journey(
            trace_id=trace_id,
            caller_span_id=caller_span_id,
            search_trace_id=search_trace_id,
            document=document,
            hits=hits,
            spans=sink.spans(),
            metrics=sink.metric_names(),
            lines=[line for process in cluster.processes for line in process.lines],
            exit_codes=exit_codes,
        )


def travel(cluster: Cluster) -> tuple[str, str, str, str, int]:
    """Submits, waits and searches, each under a span of the caller as an application would have it."""
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    addresses = cluster.addresses
    with Readymark(addresses["ingest"], addresses["search"], addresses["embedder"]) as client:
        with tracer.start_as_current_span("caller submits") as span:
            submitting = span.get_span_context()
            submitted = client.submit(
                TEXT, display_name=f"{CANARY}.txt", metadata={"team": CANARY}, source_key=f"{CANARY}/1"
            )
        (document,) = client.wait([submitted.document_id], timeout_seconds=120)
        assert document.status == "READY"
        with tracer.start_as_current_span("caller searches") as span:
            searching = span.get_span_context()
            found = client.search(f"{CANARY} pump")
    return (
        f"{submitting.trace_id:032x}",
        f"{submitting.span_id:016x}",
        document.document_id,
        f"{searching.trace_id:032x}",
        len(found.hits),
    )


def get_by_command_line(cluster: Cluster, document_id: str) -> dict[str, Any]:
    addresses = {f"READYMARK_{name.upper()}_ADDRESS": where for name, where in cluster.addresses.items()}
    done = subprocess.run(
        [sys.executable, "-m", "readymark_client.cli", "get", document_id, "--json"],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([".", "client", "protos/generated"]),
            **addresses,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    (document,) = printed if isinstance(printed, list) else [printed]
    return document


def test_a_document_is_one_trace_from_the_client_to_the_commit(journey: Journey) -> None:
    trace = journey.trace(journey.trace_id)
    by_id = {span.span_id: span for span in journey.spans}
    (submitted,) = [span for span in trace if span.name == f"{INGEST}/CreateDocument"]
    assert (submitted.kind, submitted.parent_id) == ("SERVER", journey.caller_span_id)
    (processed,) = [span for span in trace if span.name == "process ingestion"]
    assert (processed.kind, processed.parent_id) == ("CONSUMER", submitted.span_id)
    assert processed.service != submitted.service
    for stage in ("parse", "chunk", "embed", "index"):
        (span,) = [span for span in trace if span.name == stage and span.service == processed.service]
        assert span.parent_id == processed.span_id, stage
        assert span.status != "ERROR"
    batches = [span for span in trace if span.name == f"{EMBEDDER}/Embed" and span.kind == "SERVER"]
    assert batches, "the embedder's own spans belong to the trace of the document"
    for batch in batches:
        calling = by_id[batch.parent_id]
        assert (calling.kind, calling.service) == ("CLIENT", processed.service)
        assert by_id[calling.parent_id].name == "embed"
    # Every span of the trace hangs together; only the caller's own is not exported.
    assert {span.parent_id for span in trace} - set(by_id) == {journey.caller_span_id}


def test_the_command_line_names_the_trace_of_the_document(journey: Journey) -> None:
    assert journey.document["trace_id"] == journey.trace_id


def test_a_search_is_one_trace_over_search_and_embedder(journey: Journey) -> None:
    assert journey.hits > 0
    trace = journey.trace(journey.search_trace_id)
    (served,) = [span for span in trace if span.name == SEARCH]
    for stage in ("embed", "retrieve"):
        assert served.span_id in {span.parent_id for span in trace if span.name == stage}, stage
    assert f"{EMBEDDER}/Embed" in {span.name for span in trace if span.kind == "SERVER"}
    assert len({span.service for span in trace}) == 2


def test_health_checks_and_empty_polls_leave_no_spans(journey: Journey) -> None:
    assert [span.name for span in journey.spans if "grpc.health" in span.name] == []
    assert [span.name for span in journey.spans if span.name == "process ingestion"] == ["process ingestion"]


def test_calls_are_measured_on_both_sides(journey: Journey) -> None:
    assert {"rpc.server.call.duration", "rpc.client.call.duration"} <= journey.metrics


def test_no_span_and_no_log_line_tells_what_a_document_or_a_query_says(journey: Journey) -> None:
    assert len(journey.spans) > 10
    assert [span for span in journey.spans if CANARY in repr(span)] == []
    assert len(journey.lines) > 10
    assert [line for line in journey.lines if CANARY in repr(line)] == []


def test_every_call_is_logged_under_its_trace(journey: Journey) -> None:
    calls = [line for line in journey.lines if line["event"] == "call ended"]
    assert {journey.trace_id, journey.search_trace_id} <= {line["trace_id"] for line in calls}


def test_every_process_ends_well(journey: Journey) -> None:
    assert journey.exit_codes == {0}
