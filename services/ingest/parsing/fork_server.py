"""The process from which parser processes are forked: `python -m services.ingest.parsing.fork_server`.

Owns its children: it forks, kills and reaps them, so a process id is never used after its
process is gone. It has every parser loaded and no other library, one thread, a scrubbed
environment, and no connection but one socket to the worker. When that closes, it ends, and
the kernel ends its children with it.

Messages on the socket are one JSON object each. From the worker: {"start": id, "request": {...}}
with the child's pipe attached, {"kill": id}. To the worker: {"ready": 1}, {"exit": id,
"status": wait status, "peak_bytes": n} or {"exit": id, "fork_error": errno}.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any

from services.ingest.parsing import child, pdf_fonts
from services.ingest.parsing.limits import MAX_REQUEST_BYTES

_PARENT_CHECK_SECONDS = 2.0


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    worker_pid = int(sys.argv[2])
    # Loaded and warmed once here instead of once in each child.
    importlib.import_module("services.ingest.parsing.formats")
    pdf_fonts.has_cjk_font()
    # Children share these pages until one writes to them; the collector would write to all.
    gc.freeze()
    _Server(control, worker_pid).serve()


class _Server:
    def __init__(self, control: socket.socket, worker_pid: int) -> None:
        self._control = control
        self._worker_pid = worker_pid
        self._ids: dict[int, int] = {}
        """Request id by process id, of children that are not reaped yet."""

    def serve(self) -> None:
        """Returns when the worker has closed its end or is gone."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The worker decides when to stop; Ctrl-C in a terminal reaches this process too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._send({"ready": 1})
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            while os.getppid() == self._worker_pid:
                for key, _ in selector.select(_PARENT_CHECK_SECONDS):
                    if key.fd == wake_read:
                        os.read(wake_read, 4096)
                        self._reap()
                    elif not self._receive():
                        self._kill_all()
                        return
        self._kill_all()

    def _receive(self) -> bool:
        """Handles one message; False when the worker has closed its end."""
        size = array.array("i").itemsize
        data, ancillary, _, _ = self._control.recvmsg(MAX_REQUEST_BYTES, socket.CMSG_SPACE(size))
        if not data:
            return False
        descriptors = array.array("i")
        for _, kind, content in ancillary:
            if kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[:size])
        message = json.loads(data)
        if "start" in message:
            self._start(message["start"], message["request"], descriptors[0])
        else:
            for pid, request_id in self._ids.items():
                if request_id == message["kill"]:
                    os.kill(pid, signal.SIGKILL)
        return True

    def _start(self, request_id: int, request: dict[str, Any], pipe: int) -> None:
        server_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(pipe)
            self._send({"exit": request_id, "fork_error": error.errno})
            return
        if pid == 0:
            self._become_child(request, pipe, server_pid)
        os.close(pipe)
        self._ids[pid] = request_id

    def _become_child(self, request: dict[str, Any], pipe: int, server_pid: int) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        kept = os.dup2(pipe, 3 if pipe != 3 else pipe)
        os.closerange(4, 256)
        child.run(request, kept, server_pid)

    def _reap(self) -> None:
        while self._ids:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            request_id = self._ids.pop(pid)
            self._send({"exit": request_id, "status": status, "peak_bytes": usage.ru_maxrss * 1024})

    def _kill_all(self) -> None:
        for pid in self._ids:
            os.kill(pid, signal.SIGKILL)
        for pid in list(self._ids):
            os.waitpid(pid, 0)

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:
            # The worker is gone; the next turn of the loop sees it and ends.
            return


if __name__ == "__main__":
    main()
