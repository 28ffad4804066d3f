"""Traces: real ids without a collector, export to a real one, and an end that does not wait for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from shared import telemetry
from tests.support.otlp_sink import running_sink

REPOSITORY = Path(__file__).parents[2]
STORED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

# A process that makes a trace and a metric, shuts down, and says how long that took.
PROGRAM = """
import json, sys, time
from shared import telemetry
began = telemetry.setup("probe")
with telemetry.span("outer", {"stage": "parse"}):
    with telemetry.span("inner"):
        trace_id = telemetry.current_trace_id()
telemetry.meter().create_counter("probe.count").add(1)
started = time.monotonic()
if "crash" not in sys.argv:
    began.shutdown()
loaded = any("otlp" in name for name in sys.modules)
print(json.dumps({"trace_id": trace_id, "seconds": time.monotonic() - started, "exporter": loaded}))
"""


def run_program(*arguments: str, **environment: str) -> dict[str, object]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=REPOSITORY,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


@pytest.fixture
def silent_address() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_without_a_collector_spans_have_ids_and_no_exporter_is_loaded() -> None:
    answer = run_program()
    assert int(str(answer["trace_id"]), 16) != 0
    assert answer["exporter"] is False


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_spans_reach_the_collector_that_the_standard_variables_name(variable: str) -> None:
    with running_sink() as (endpoint, sink):
        answer = run_program(**{variable: endpoint})
        sink.wait_until(lambda spans: len(spans) == 2)
    (outer,), (inner,) = sink.spans("outer"), sink.spans("inner")
    assert (outer.service, outer.attributes["stage"], outer.parent_id) == ("probe", "parse", "")
    assert (inner.parent_id, inner.trace_id) == (outer.span_id, answer["trace_id"])
    assert ("probe.count" in sink.metric_names()) is (variable == "OTEL_EXPORTER_OTLP_ENDPOINT")


def test_the_operators_own_service_name_wins() -> None:
    with running_sink() as (endpoint, sink):
        run_program(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_SERVICE_NAME="theirs")
        sink.wait_until(lambda spans: len(spans) == 2)
    assert {span.service for span in sink.spans()} == {"theirs"}


@pytest.mark.parametrize(
    "off",
    [
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"},
    ],
    ids=["disabled", "none"],
)
def test_the_standard_variables_switch_the_export_off(off: dict[str, str]) -> None:
    with running_sink() as (endpoint, sink):
        answer = run_program(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, **off)
    assert answer["exporter"] is False
    assert sink.spans() == []


def test_the_end_of_a_process_waits_three_seconds_for_a_silent_collector(silent_address: str) -> None:
    started = time.monotonic()
    answer = run_program(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://{silent_address}")
    whole = time.monotonic() - started
    assert float(str(answer["seconds"])) < telemetry.SHUTDOWN_SECONDS + 0.5
    # Nothing of the SDK may wait again when the interpreter ends.
    assert whole < telemetry.SHUTDOWN_SECONDS + 7


def test_a_process_that_ends_without_a_shutdown_does_not_wait_for_the_collector(silent_address: str) -> None:
    started = time.monotonic()
    run_program(
        "crash", OTEL_EXPORTER_OTLP_ENDPOINT=f"http://{silent_address}", OTEL_EXPORTER_OTLP_TIMEOUT="30"
    )
    assert time.monotonic() - started < 15


def test_the_end_of_a_process_does_not_wait_long_for_an_absent_collector() -> None:
    # Port 1 refuses; the SDK by itself would go on trying for half a minute.
    answer = run_program(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert float(str(answer["seconds"])) < telemetry.SHUTDOWN_SECONDS + 0.5


def test_two_processes_of_one_service_are_told_apart() -> None:
    program = "from shared import telemetry\n"
    program += "print(telemetry.setup('s').traces.resource.attributes['service.instance.id'])"
    command = [sys.executable, "-c", program]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    given = inherited | {"OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=pod-1"}
    seen = [
        subprocess.run(
            command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=True
        ).stdout.strip()
        for env in (inherited, inherited, given)
    ]
    assert len(set(seen)) == 3
    assert seen[2] == "pod-1"


def test_the_sink_as_a_process_writes_a_line_for_each_span(tmp_path: Path) -> None:
    out = tmp_path / "spans.jsonl"
    command = [sys.executable, "-m", "tests.support.otlp_sink", "--port", "0", "--out", str(out)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        endpoint = json.loads(process.stdout.readline())["endpoint"]
        run_program(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert sorted(json.loads(line)["name"] for line in out.read_text().splitlines()) == ["inner", "outer"]


def test_an_error_marks_the_span_by_its_type_and_keeps_its_text_out(spans) -> None:
    with pytest.raises(KeyError), telemetry.span("stage"):
        raise KeyError("SECRET-CANARY")
    (ended,) = spans.named("stage")
    assert (ended.status.status_code, ended.attributes["error.type"]) == (StatusCode.ERROR, "KeyError")
    assert "CANARY" not in ended.to_json()


def test_a_cancellation_is_no_fault_of_the_stage(spans) -> None:
    with pytest.raises(asyncio.CancelledError), telemetry.span("stage"):
        raise asyncio.CancelledError
    assert spans.named("stage")[0].status.status_code is StatusCode.UNSET


def test_a_stored_trace_is_continued(spans) -> None:
    with telemetry.span_from(STORED, "vendor=1", "process"):
        assert telemetry.current_tracestate() == "vendor=1"
    (ended,) = spans.named("process")
    assert f"{ended.context.trace_id:032x}" == STORED.split("-")[1]
    assert f"{ended.parent.span_id:016x}" == STORED.split("-")[2]
    assert ended.kind is SpanKind.CONSUMER


def test_a_linked_span_begins_a_trace_of_its_own_wherever_it_is_begun(spans) -> None:
    with telemetry.span("unrelated"):
        with telemetry.span_from(STORED, None, "process", as_link=True):
            pass
        assert trace.get_current_span().name == "unrelated", "the context before is restored"
    (ended,) = spans.named("process")
    assert ended.parent is None
    assert [f"{link.context.trace_id:032x}" for link in ended.links] == [STORED.split("-")[1]]
    assert ended.context.trace_id != spans.named("unrelated")[0].context.trace_id


@pytest.mark.parametrize(
    "traceparent",
    [
        None,
        "",
        "nonsense",
        STORED + "\n",
        STORED.upper(),
        STORED + "-00",
        "ff" + STORED[2:],
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        "0" * 100_000,
    ],
    ids=range(10),
)
def test_what_is_no_traceparent_begins_a_new_trace_without_links(spans, traceparent: str | None) -> None:
    with telemetry.span_from(traceparent, None, "process"):
        pass
    (ended,) = spans.named("process")
    assert ended.parent is None
    assert not ended.links


def test_a_giant_tracestate_is_dropped_and_the_trace_kept(spans) -> None:
    # Each member is valid by itself; OpenTelemetry would take them all.
    giant = ",".join(f"vendor{number}={'x' * 50}" for number in range(10))
    with telemetry.span_from(STORED, giant, "process"):
        assert telemetry.current_tracestate() is None
        assert telemetry.current_trace_id() == STORED.split("-")[1]


def test_outside_of_a_span_there_is_no_trace_to_pass_on() -> None:
    assert telemetry.current_traceparent() is None
    assert telemetry.current_trace_id() is None


async def test_a_trace_goes_along_into_threads_when_it_is_carried(spans) -> None:
    with telemetry.span("stage"):
        expected = telemetry.current_trace_id()
        carried = telemetry.carry_context(telemetry.current_trace_id)
        with ThreadPoolExecutor(1) as executor:
            loop = asyncio.get_running_loop()
            assert await loop.run_in_executor(executor, telemetry.current_trace_id) is None
            assert await loop.run_in_executor(executor, carried) == expected
        # Several threads may run it at the same time.
        barrier = threading.Barrier(2)
        both = telemetry.carry_context(lambda: (barrier.wait(5), telemetry.current_trace_id())[1])
        assert await asyncio.gather(asyncio.to_thread(both), asyncio.to_thread(both)) == [expected] * 2
