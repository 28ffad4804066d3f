"""Log events of a process as JSON lines on stderr, each with the trace it belongs to.

Owns how a line looks and how it is written: by a thread of its own with a bounded queue,
so that a slow or stuck reader of stderr never blocks an event loop. Decides nothing about
what is logged, except that only the first line of an error's text is: PostgreSQL puts
whole rows into the others.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from typing import Any

from opentelemetry import trace

# About a second of a very busy service; beyond it lines are dropped and counted.
MAX_WAITING_LINES = 10_000
STOP_SECONDS = 1.0
MAX_ERROR_TEXT = 500


def log_event(logger: logging.Logger, event: str, level: int = logging.INFO, /, **fields: Any) -> None:
    """Logs an event with fields. Never pass document text, file names or queries."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={"fields": fields})


def configure_logging(service_name: str, level: str | None = None) -> None:
    """Sends the log of the whole process to stderr as JSON lines, warnings of Python included."""
    chosen = (level or os.environ.get("READYMARK_LOG_LEVEL") or "INFO").upper()
    writer = _LineWriter(sys.stderr.fileno())
    root = logging.getLogger()
    root.handlers[:] = [_JsonLineHandler(service_name, writer)]
    root.setLevel(chosen)
    logging.captureWarnings(True)
    atexit.register(writer.stop)


class _LineWriter:
    """Writes lines in a thread; `write` never waits."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING_LINES)
        self._dropped = 0
        # A daemon, and never inside a lock of Python's: a reader that takes nothing must not
        # keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="log-lines", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def take_dropped(self) -> int:
        """Returns how many lines were lost since the last time."""
        if self._dropped == 0 or self._lines.full():
            return 0
        dropped, self._dropped = self._dropped, 0
        return dropped

    def stop(self) -> None:
        """Waits for the lines that are left, at most a second."""
        try:
            self._lines.put(None, timeout=STOP_SECONDS)
        except queue.Full:
            return
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:
                # Nobody reads any more; the service goes on without a log.
                continue


class _JsonLineHandler(logging.Handler):
    """Renders where the record is made: there the trace is known, and fields cannot change any more."""

    def __init__(self, service_name: str, writer: _LineWriter) -> None:
        super().__init__()
        self._service_name = service_name
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        line = self._line(record)
        if dropped := self._writer.take_dropped():
            line["dropped_lines"] = dropped
        try:
            text = json.dumps(line, ensure_ascii=False, default=str)
        except (TypeError, ValueError, RecursionError):
            # A field that has no JSON form must not cost the event.
            text = json.dumps({name: str(value) for name, value in line.items()}, ensure_ascii=False)
        self._writer.write(text.encode("utf-8", "backslashreplace") + b"\n")

    def _line(self, record: logging.LogRecord) -> dict[str, Any]:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "service": self._service_name,
            "logger": record.name,
            "event": _event_of(record),
        }
        current = trace.get_current_span().get_span_context()
        if current.is_valid:
            line["trace_id"] = f"{current.trace_id:032x}"
            line["span_id"] = f"{current.span_id:016x}"
        for name, value in getattr(record, "fields", {}).items():
            line.setdefault(name, value)
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = _describe(record.exc_info[1])
        return line


def _event_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):
        # Somebody else's call with arguments that do not fit; its text says most of it.
        return str(record.msg)


def _describe(error: BaseException) -> str:
    """Returns the traceback, causes first, each error with the first line of its text only."""
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        text = (str(current).splitlines() or [""])[0][:MAX_ERROR_TEXT]
        frames = "".join(traceback.format_tb(current.__traceback__))
        parts.append(f"{frames}{type(current).__qualname__}: {text}")
        if isinstance(current, BaseExceptionGroup):
            parts[-1] += "".join(f"\n| {_describe(part)}" for part in current.exceptions)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\ncaused:\n".join(reversed(parts))
