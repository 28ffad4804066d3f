"""Parses each document in a process of its own that can do no harm. Owns the worker's side.

A parser that hangs, crashes or eats memory on a hostile document takes nobody with it: the
worker's own memory does not grow, and the process is killed on timeout and on cancellation.
Forking from a server that has the parsers loaded costs about 10 ms a document; a fresh
interpreter costs half a second.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.ingest.model import ParsedDocument
from services.ingest.parsing import results
from services.ingest.parsing.accepted import NAMES, MediaType
from services.ingest.parsing.fork_server_client import ForkServer, Outcome
from services.ingest.parsing.limits import ParseLimits
from services.ingest.parsing.sniffing import claimed_type
from shared.errors import DependencyUnavailableError, InvalidDocumentError, ReadymarkError
from shared.messages import SENTENCES

PARSER = "services.ingest.parsing.formats:parse"
# A crash with this much of the allowed memory in use was most likely an allocation that failed:
# PDFium and Rust abort then.
_MEMORY_SHARE = 0.5
_MAX_LINE_BYTES = 16_384
# A killed process is gone within milliseconds; the wait only has to end some time.
_EXIT_SECONDS = 10.0
_ERRORS = {error.code: error for error in (InvalidDocumentError, DependencyUnavailableError)}

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Report:
    """What the child has said so far."""

    on_progress: Callable[[int, int], None] | None
    error: ReadymarkError | None = None
    is_done: bool = False
    is_unconfined: bool = False
    is_garbled: bool = False
    buffer: bytearray = dataclasses.field(default_factory=bytearray)


class ParserPool:
    """Runs up to `max_processes` parsers at a time, for one event loop.

    `parser` names the function that the children run; tests name ones that misbehave.
    """

    def __init__(self, *, max_processes: int | None = None, parser: str = PARSER) -> None:
        self._slots = asyncio.Semaphore(max_processes or os.cpu_count() or 1)
        self._parser = parser
        self._server: ForkServer | None = None
        self._starting = asyncio.Lock()
        self._ids = itertools.count(1)
        self._is_closed = False
        self._has_warned = False

    async def parse(
        self,
        path: Path,
        output_dir: Path,
        *,
        display_name: str,
        declared_media_type: str | None,
        limits: ParseLimits,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ParsedDocument:
        """Returns the document in the file `path`; bytes of its assets lie in `output_dir` (`asset_path`).

        Raises InvalidDocumentError for what the document is to blame for (PARSE_TIMEOUT, PARSE_MEMORY
        and PARSE_CRASH too), DependencyUnavailableError PARSER_UNAVAILABLE if the machine is. When
        this returns, raises or is cancelled, no process of it is left. Removing the files is the
        caller's.
        """
        request = {
            "parser": self._parser,
            # The fork server stands in the directory in which the worker was started.
            "path": str(path),
            "output_dir": str(output_dir),
            "display_name": display_name[-255:],
            "declared_media_type": declared_media_type[:255] if declared_media_type else None,
            "limits": dataclasses.asdict(limits),
        }
        async with self._slots:
            await asyncio.to_thread(output_dir.mkdir, mode=0o700, parents=True, exist_ok=True)
            server = await self._running_server()
            report, outcome = await self._run(server, request, limits, on_progress)
        self._warn_once(report)
        if report.error is not None:
            raise report.error
        if not report.is_done or report.is_garbled or outcome.status != 0:
            raise _failure(outcome, limits, claimed_type(display_name, declared_media_type))
        try:
            return await asyncio.to_thread(results.read_result, output_dir, limits)
        except results.ResultInvalidError as error:
            _log.warning("parser result refused", extra={"cause": str(error)})
            raise _crash(claimed_type(display_name, declared_media_type)) from error

    async def close(self) -> None:
        """Kills what still runs and ends the fork server. Parsing after this raises SHUTTING_DOWN."""
        self._is_closed = True
        async with self._starting:
            if self._server is not None:
                await self._server.close()
                self._server = None

    async def _running_server(self) -> ForkServer:
        async with self._starting:
            if self._is_closed:
                raise DependencyUnavailableError("SHUTTING_DOWN")
            if self._server is None or not self._server.is_alive:
                if self._server is not None:
                    await self._server.close()
                self._server = await ForkServer.start()
            return self._server

    async def _run(
        self,
        server: ForkServer,
        request: dict[str, Any],
        limits: ParseLimits,
        on_progress: Callable[[int, int], None] | None,
    ) -> tuple[_Report, Outcome]:
        loop = asyncio.get_running_loop()
        request_id = next(self._ids)
        report = _Report(on_progress)
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        try:
            try:
                exited = server.submit(request_id, request, write_end)
            finally:
                os.close(write_end)
            loop.add_reader(read_end, _read, read_end, report, lambda: server.kill(request_id))
            try:
                await asyncio.wait({exited}, timeout=limits.wall_seconds)
                if not exited.done():
                    raise InvalidDocumentError("PARSE_TIMEOUT", limit=_seconds(limits.wall_seconds))
            finally:
                # Timeout and cancellation alike: the caller may remove the files after this.
                if not exited.done():
                    server.kill(request_id)
                    await asyncio.wait({exited}, timeout=_EXIT_SECONDS)
            # The last lines may have come after the loop last looked.
            _read(read_end, report, lambda: None)
            return report, exited.result()
        finally:
            loop.remove_reader(read_end)
            os.close(read_end)

    def _warn_once(self, report: _Report) -> None:
        if report.is_unconfined and not self._has_warned:
            self._has_warned = True
            _log.warning("parser processes run without a system call filter: this system offers none")


def remove_output(output_dir: Path) -> None:
    """Removes what a parse has left; for the caller, in a thread, when the assets are stored."""
    shutil.rmtree(output_dir, ignore_errors=True)


def _read(pipe: int, report: _Report, kill: Callable[[], None]) -> None:
    """Takes what the child has written. A child that writes anything but its lines is killed."""
    while True:
        try:
            data = os.read(pipe, 65_536)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(pipe)
            return
        if report.is_garbled:
            continue
        report.buffer += data
        *lines, rest = bytes(report.buffer).split(b"\n")
        report.buffer = bytearray(rest)
        try:
            if len(rest) > _MAX_LINE_BYTES:
                raise ValueError("a line without end")
            for line in lines:
                _take(line.decode(), report)
        except (ValueError, KeyError, TypeError, AttributeError):
            report.is_garbled = True
            kill()


def _take(line: str, report: _Report) -> None:
    word, _, rest = line.partition(" ")
    match word:
        case "progress":
            done, total = (int(number) for number in rest.split(" "))
            if report.on_progress is not None:
                report.on_progress(done, total)
        case "unconfined":
            report.is_unconfined = True
        case "done":
            report.is_done = True
        case "error":
            facts = json.loads(rest)
            reason = str(facts["reason"])
            if reason not in SENTENCES:
                raise ValueError("an unknown reason")
            parameters = {str(name): str(value)[:200] for name, value in facts["parameters"].items()}
            report.error = _ERRORS[facts["code"]](reason, retry_after_seconds=None, **parameters)
        case _:
            raise ValueError("an unknown line")


def _failure(outcome: Outcome, limits: ParseLimits, claimed: MediaType | None) -> ReadymarkError:
    """Returns the error for a child that did not say how it ended, from its wait status."""
    if outcome.fork_error is not None:
        return DependencyUnavailableError("PARSER_UNAVAILABLE")
    if os.WIFSIGNALED(outcome.status):
        number = os.WTERMSIG(outcome.status)
        if number == signal.SIGXCPU:
            return InvalidDocumentError("PARSE_TIMEOUT", limit=_seconds(limits.cpu_seconds))
        if number == signal.SIGKILL and not outcome.was_killed_by_us:
            # The machine was short of memory, or somebody pulled the plug.
            return DependencyUnavailableError("PARSER_UNAVAILABLE")
        if outcome.peak_bytes > _MEMORY_SHARE * limits.memory_bytes:
            return InvalidDocumentError("PARSE_MEMORY")
    return _crash(claimed)


def _crash(claimed: MediaType | None) -> InvalidDocumentError:
    # Only the child knew what it was; of our parsers the one for PDF is the one that can crash.
    return InvalidDocumentError("PARSE_CRASH", file_type=NAMES[claimed or MediaType.PDF])


def _seconds(value: float) -> str:
    return f"{value:g}"
