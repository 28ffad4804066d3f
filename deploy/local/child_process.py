"""One supervised service process: start, log file, health, stop, restart with backoff.

Owns a process's life. Never knows what the process does, nor the order among several.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
# A process that lived this long was well; its next fault starts with a short pause again.
STABLE_SECONDS = 60.0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Loaded at once and not in a child: between fork and exec nothing may be imported.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
TAIL_BYTES = 2000


class ChildProcess:
    """A process in a session of its own, so that Ctrl-C reaches only the one who orders the stop."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        log_path: Path | None,
        address: str | None = None,
        kept_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.address = address
        self._arguments = [sys.executable, "-m", *arguments]
        self._environment = dict(environment)
        self._log_path = log_path
        self._kept_fds = tuple(kept_fds)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._backoff_seconds = FIRST_BACKOFF_SECONDS
        self._restart_at: float | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def rotate_log(self) -> None:
        """Keeps the log of the run before as NAME.log.1."""
        if self._log_path is not None and self._log_path.exists():
            self._log_path.replace(self._log_path.with_name(self._log_path.name + ".1"))

    def start(self) -> None:
        log: IO[bytes] | None = None if self._log_path is None else self._log_path.open("ab")
        try:
            self._process = subprocess.Popen(
                self._arguments,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log if log is not None else sys.stderr.fileno(),
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=self._kept_fds,
                preexec_fn=_DieWithParent(os.getpid()),
            )
        finally:
            if log is not None:
                log.close()
        self._started_at = time.monotonic()
        self._restart_at = None

    def is_serving(self) -> bool:
        """Returns whether the health service says so; a process without an address serves while it lives."""
        if self.address is None:
            return self.exit_code() is None
        with grpc.insecure_channel(self.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            try:
                answer = check(health_pb2.HealthCheckRequest(), timeout=1.0)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def exit_code(self) -> int | None:
        """Returns None while it runs; minus the signal's number when a signal ended it."""
        return None if self._process is None else self._process.poll()

    def supervise(self) -> str | None:
        """Starts it again when it has died and its pause is over; returns what there is to tell."""
        code = self.exit_code()
        if code is None:
            return None
        now = time.monotonic()
        if self._restart_at is None:
            if now - self._started_at >= STABLE_SECONDS:
                self._backoff_seconds = FIRST_BACKOFF_SECONDS
            pause = self._backoff_seconds
            self._backoff_seconds = min(pause * 2, MAX_BACKOFF_SECONDS)
            self._restart_at = now + pause
            told = f"{self.name} ended with {describe_exit(code)}; it starts again in {pause:g} s"
            return told if self._log_path is None else f"{told} (see {self._log_path})"
        if now >= self._restart_at:
            self.start()
        return None

    def ask_to_stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait_stopped(self, seconds: float) -> bool:
        """Returns True when it ended by itself; kills it after `seconds`."""
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True

    def log_tail(self) -> str:
        """Returns the end of the log, for the person whose stack does not start."""
        if self._log_path is None or not self._log_path.exists():
            return ""
        with self._log_path.open("rb") as file:
            file.seek(max(self._log_path.stat().st_size - TAIL_BYTES, 0))
            return file.read().decode("utf-8", "replace").strip()


class _DieWithParent:
    """Runs in the child before exec: SIGTERM for it when the stack dies, even by SIGKILL."""

    def __init__(self, parent_pid: int) -> None:
        self._parent_pid = parent_pid

    def __call__(self) -> None:
        if _LIBC is not None:
            _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            # It may have died before the line above; then nobody would ever tell.
            if os.getppid() != self._parent_pid:
                os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of daemons that its children leave behind, PostgreSQL above all.

    In a container nobody else may take note of their death, and a dead server that counts as
    alive cannot be started again.
    """
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(own_pids: Collection[int | None]) -> None:
    """Takes note of every dead process that was adopted; the caller's own children are left to it."""
    with contextlib.suppress(ChildProcessError):
        while True:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if dead is None or dead.si_pid in own_pids:
                return
            os.waitpid(dead.si_pid, os.WNOHANG)


def describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
