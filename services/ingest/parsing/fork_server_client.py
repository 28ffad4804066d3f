"""The worker's end of a fork server: starts it, sends requests, hands out how children ended.

Owns the socket and the server's process. Nothing of the worker's environment but what
Python itself needs goes into it: no settings, no passwords, no cloud keys.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
from typing import Any

from services.ingest.parsing.limits import MAX_REQUEST_BYTES
from shared.errors import DependencyUnavailableError

_KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONHASHSEED", "TMPDIR")
_START_SECONDS = 60.0
_STOP_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How a child ended; `status` as of os.waitpid."""

    status: int = -1
    peak_bytes: int = 0
    fork_error: int | None = None
    was_killed_by_us: bool = False


class ForkServer:
    """One running server. Made by `start`; dead when the process or its socket is."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._control = control
        self._process = process
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._killed: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self.is_alive = True
        self._loop.add_reader(control, self._receive)

    @classmethod
    async def start(cls) -> ForkServer:
        """Returns a server that has loaded its parsers; raises PARSER_UNAVAILABLE."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [sys.executable, "-P", "-m", "services.ingest.parsing.fork_server"]
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - a few milliseconds, once a worker
                [*command, str(theirs.fileno()), str(os.getpid())],
                env=_environment(),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            ours.close()
            raise DependencyUnavailableError("PARSER_UNAVAILABLE") from error
        finally:
            theirs.close()
        server = cls(ours, process)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await server._ready
        except (TimeoutError, DependencyUnavailableError) as error:
            await server.close()
            raise DependencyUnavailableError("PARSER_UNAVAILABLE") from error
        except asyncio.CancelledError:
            await server.close()
            raise
        return server

    def submit(self, request_id: int, request: dict[str, Any], pipe: int) -> asyncio.Future[Outcome]:
        """Asks for a child that writes to `pipe`; returns the future of its end."""
        message = json.dumps({"start": request_id, "request": request}).encode()
        if len(message) > MAX_REQUEST_BYTES:
            raise DependencyUnavailableError("PARSER_UNAVAILABLE")
        rights = array.array("i", [pipe])
        try:
            self._control.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except OSError as error:
            raise DependencyUnavailableError("PARSER_UNAVAILABLE") from error
        future: asyncio.Future[Outcome] = self._loop.create_future()
        # Somebody may have been cancelled before they asked how it ended.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting[request_id] = future
        return future

    def kill(self, request_id: int) -> None:
        """Has the child killed; its future ends when it is gone."""
        if request_id in self._waiting:
            self._killed.add(request_id)
            with contextlib.suppress(OSError):
                self._control.send(json.dumps({"kill": request_id}).encode())

    async def close(self) -> None:
        """Ends the server and waits for it; its children end with it."""
        self._lose()
        try:
            await asyncio.to_thread(self._process.wait, _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _receive(self) -> None:
        try:
            data = self._control.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        message = json.loads(data)
        if "ready" in message:
            if not self._ready.done():
                self._ready.set_result(None)
            return
        request_id = message["exit"]
        future = self._waiting.pop(request_id, None)
        outcome = Outcome(
            message.get("status", -1),
            message.get("peak_bytes", 0),
            message.get("fork_error"),
            request_id in self._killed,
        )
        self._killed.discard(request_id)
        if future is not None and not future.done():
            future.set_result(outcome)

    def _lose(self) -> None:
        """The socket is gone, so the server ends, if it has not yet, and its children with it."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._loop.remove_reader(self._control)
        self._control.close()
        waiting: list[asyncio.Future[Any]] = [*self._waiting.values(), self._ready]
        self._waiting.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(DependencyUnavailableError("PARSER_UNAVAILABLE"))
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    # The worker's own search path: it may have been started from a checkout.
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
