"""The log of a process: JSON lines that name their trace, and never hold anybody up."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shared import log_lines, telemetry
from shared.log_lines import _JsonLineHandler, _LineWriter, log_event

REPOSITORY = Path(__file__).parents[2]


class Log:
    """A logger that writes to a pipe as a process writes to stderr."""

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        self.writer = _LineWriter(writing)
        self._writing = writing
        # Outside the tree of loggers, so that pytest does not read along.
        self.logger = logging.Logger("tests.log_lines", logging.INFO)
        self.logger.addHandler(_JsonLineHandler("test", self.writer))

    def lines(self) -> list[dict[str, Any]]:
        """Returns all lines; nothing can be logged afterwards."""
        self.writer.stop()
        os.close(self._writing)
        with os.fdopen(self._reading, "rb") as pipe:
            return [json.loads(line) for line in pipe]


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_line_has_the_event_its_fields_and_its_trace(log):
    with telemetry.span_from("00-" + "a" * 32 + "-" + "b" * 16 + "-01", None, "job") as span:
        log_event(log.logger, "job claimed", job_id="j1", attempt=2)
        expected = f"{span.get_span_context().span_id:016x}"
    (line,) = log.lines()
    assert (line["event"], line["job_id"], line["attempt"]) == ("job claimed", "j1", 2)
    assert (line["service"], line["level"], line["logger"]) == ("test", "INFO", "tests.log_lines")
    assert (line["trace_id"], line["span_id"]) == ("a" * 32, expected)
    assert line["time"].endswith("Z") and "exception" not in line


def test_outside_of_a_span_there_is_no_trace_in_the_line(log):
    log_event(log.logger, "started")
    assert "trace_id" not in log.lines()[0]


def test_threads_log_under_the_trace_that_is_carried_to_them(log, spans):
    with telemetry.span("stage"):
        expected = telemetry.current_trace_id()
        thread = threading.Thread(target=telemetry.carry_context(lambda: log_event(log.logger, "there")))
        thread.start()
        thread.join()
    assert log.lines()[0]["trace_id"] == expected


def test_fields_cannot_pretend_to_be_another_event(log):
    log_event(log.logger, "call ended", service="other", level="DEBUG", event="fine")
    (line,) = log.lines()
    assert (line["event"], line["service"], line["level"]) == ("call ended", "test", "INFO")


def test_a_field_that_has_no_json_form_does_not_cost_the_event(log):
    circle: list[Any] = []
    circle.append(circle)
    log_event(log.logger, "odd", key={(1, 2): 3})
    log_event(log.logger, "odd", circle=circle)
    log_event(log.logger, "odd", path=Path("/x"), text="lone \udcff surrogate\nand a second line")
    log.logger.info("wrong %d arguments", "of somebody else")
    lines = log.lines()
    assert [line["event"] for line in lines] == ["odd", "odd", "odd", "wrong %d arguments"]
    assert lines[2]["path"] == "/x"


def test_an_error_is_told_with_its_causes_but_only_the_first_line_of_its_text(log):
    text = "first line\nDETAIL: Failing row contains (CANARY)."

    def fail() -> None:
        try:
            raise ValueError(text)
        except ValueError as error:
            raise RuntimeError("outer") from error

    try:
        fail()
    except RuntimeError:
        log.logger.exception("unforeseen")
    (line,) = log.lines()
    told = line["exception"]
    assert "CANARY" not in told
    assert told.index("ValueError: first line") < told.index("RuntimeError: outer")
    assert "in fail" in told and __file__ in told


def test_a_group_of_errors_tells_each(log):
    try:
        raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])
    except ExceptionGroup:
        log.logger.exception("unforeseen")
    told = log.lines()[0]["exception"]
    assert "ValueError: one" in told and "KeyError: 'two'" in told


def test_a_reader_that_stands_still_costs_lines_but_no_time(log):
    count = log_lines.MAX_WAITING_LINES + 2_000
    began = time.monotonic()
    for number in range(count):
        log_event(log.logger, "x" * 100, number=number)
    assert time.monotonic() - began < 5
    # Only now somebody reads; what follows tells how many lines were lost.
    lines: list[dict[str, Any]] = []

    def read() -> None:
        with os.fdopen(os.dup(log._reading), "rb") as pipe:
            for line in pipe:
                lines.append(json.loads(line))
                if lines[-1]["event"] == "last":
                    return

    reader = threading.Thread(target=read)
    reader.start()
    while log.writer._lines.full():
        time.sleep(0.001)
    log_event(log.logger, "last")
    reader.join(10)
    lost = sum(line.get("dropped_lines", 0) for line in lines)
    assert lost > 0
    assert len(lines) == count + 1 - lost


PROGRAM = """
import logging, sys, warnings
from shared import telemetry
telemetry.configure_logging("probe")
for _ in range({lines}):
    telemetry.log_event(logging.getLogger("p"), "x" * 100)
warnings.warn("old")
"""


def start(lines: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(lines=lines)], cwd=REPOSITORY, stderr=subprocess.PIPE
    )


def test_a_process_writes_all_its_lines_before_it_ends_warnings_included():
    with start(5_000) as process:
        _, text = process.communicate(timeout=30)
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 5_001
    assert (lines[-1]["level"], lines[-1]["logger"], lines[-1]["service"]) == (
        "WARNING",
        "py.warnings",
        "probe",
    )
    assert process.returncode == 0


@pytest.mark.parametrize("lines", [5_000, 20_000])
def test_a_process_ends_although_nobody_reads_its_log(lines):
    with start(lines) as process:
        assert process.wait(30) == 0
        process.stderr.close()


def test_the_level_comes_from_the_environment():
    program = "import logging\nfrom shared import telemetry\ntelemetry.configure_logging('p')\n"
    program += "logging.getLogger().info('quiet')\nlogging.getLogger().error('loud')\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={**os.environ, "READYMARK_LOG_LEVEL": "error"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["loud"]
