"""The running local stack: what is started in which order, watched, and stopped in which order.

Owns both orders. The command line is in `stack.py`.

Start:
1. PostgreSQL, roles, database, migrations. 2. The model, built when it is missing.
3. Embedder, ingest API, search and workers together; ready when all serve.

Stop, each step after the one before has ended:
1. Workers, which hand their jobs back. 2. Ingest API. 3. Search. 4. Embedder.
5. PostgreSQL, then the word to the guard that it has nothing to do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from deploy.local.child_process import ChildProcess, adopt_orphans, describe_exit, reap_orphans
from deploy.local.console import StackError, tell
from deploy.local.data_folder import DataFolder, process_lives
from deploy.local.embedded_postgres import INGEST, MIGRATOR, SEARCHER, EmbeddedPostgres
from deploy.local.guard import STOPPED

DATABASE = "readymark"
DEFAULT_MODEL = "multilingual-e5-small"
# Built from installed packages when they are not there; any other name or path is the caller's own.
PACKAGED_MODELS = (DEFAULT_MODEL, "all-MiniLM-L6-v2")
START_SECONDS = 180.0
LOOK_SECONDS = 0.2
# Longer than the services' own grace: it ends what hangs, not what finishes.
STOP_SECONDS = 40.0


class Stack:
    """One run of all services on one data folder."""

    def __init__(
        self,
        folder: DataFolder,
        ports: Mapping[str, int],
        *,
        workers: int,
        verbose: bool,
        stopping: threading.Event,
    ) -> None:
        self._folder = folder
        self._workers = workers
        self._verbose = verbose
        self._stopping = stopping
        self._postgres = EmbeddedPostgres(folder.postgres)
        self._guard: subprocess.Popen[bytes] | None = None
        self._children: list[ChildProcess] = []
        self._last_postmaster_pid = 0
        self.addresses = {service: f"127.0.0.1:{port}" for service, port in ports.items()}

    @property
    def database_uri(self) -> str:
        return self._postgres.uri(INGEST, DATABASE)

    def start(self) -> None:
        """Returns when all serve, or when asked to stop meanwhile; raises StackError."""
        adopt_orphans()
        self._start_guard()
        self._start_postgres()
        self._run_step("migrations", ["services.ingest", "migrate"], self._environment_of_migrator())
        self._build_model()
        if self._stopping.is_set():
            return
        tell(f"starting embedder, ingest, search and {self._workers} workers")
        self._children = self._make_children()
        for child in self._children:
            child.rotate_log()
            child.start()
        self._wait_serving()

    def watch(self) -> None:
        """Returns when asked to stop; until then whatever dies is started again."""
        while not self._stopping.wait(LOOK_SECONDS):
            for child in self._children:
                told = child.supervise()
                if told is not None:
                    tell(told)
            reap_orphans(self._own_pids())
            if not process_lives(self._postmaster_pid()):
                self._restart_postgres()

    def stop(self) -> None:
        """Stops what runs, in order; safe after a start that failed half way."""
        for prefix in ("worker", "ingest", "search", "embedder"):
            leaving = [child for child in self._children if child.name.startswith(prefix)]
            for child in leaving:
                child.ask_to_stop()
            for child in leaving:
                if not child.wait_stopped(STOP_SECONDS):
                    tell(f"{child.name} did not stop within {STOP_SECONDS:g} s and was killed")
        self._stop_postgres()
        self._dismiss_guard()

    def _own_pids(self) -> set[int | None]:
        guard_pid = None if self._guard is None else self._guard.pid
        return {guard_pid, *(child.pid for child in self._children)}

    def pids(self) -> dict[str, int | None]:
        return {"postgres": self._postmaster_pid(), **{child.name: child.pid for child in self._children}}

    def _start_postgres(self) -> None:
        tell("starting PostgreSQL")
        try:
            self._postgres.start()
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            log = self._folder.postgres / "log"
            raise StackError(f"PostgreSQL does not start: {error}\nits log is {log}") from error
        self._last_postmaster_pid = self._postgres.pid
        self._postgres.create_database(DATABASE)

    def _restart_postgres(self) -> None:
        tell("PostgreSQL ended; it starts again")
        try:
            self._postgres.restart()
        except subprocess.CalledProcessError:
            # Its own lock forbids a start while processes of the crashed server still end.
            tell("PostgreSQL did not start yet; it is tried again")
            self._stopping.wait(1.0)

    def _stop_postgres(self) -> None:
        if self._last_postmaster_pid == 0:
            return
        try:
            self._postgres.stop()
        except subprocess.CalledProcessError:
            # pg_ctl may not reach the folder any more, when somebody changed its permissions.
            # SIGINT is the same "fast" stop, and never leaves the server behind.
            pid = self._postmaster_pid()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
            deadline = time.monotonic() + STOP_SECONDS
            while process_lives(pid) and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)
            if process_lives(pid):
                tell(f"PostgreSQL (process {pid}) did not stop within {STOP_SECONDS:g} s")

    def _postmaster_pid(self) -> int:
        """Returns the server's process, or that of the last one when it is gone."""
        # Read anew each time: the package remembers the first server of this process.
        try:
            text = (self._folder.postgres / "postmaster.pid").read_text(encoding="ascii")
            self._last_postmaster_pid = int(text.splitlines()[0])
        except (OSError, ValueError, IndexError):
            # Gone, or being written at this moment; the process decides.
            pass
        return self._last_postmaster_pid

    def _make_children(self) -> list[ChildProcess]:
        assert self._guard is not None and self._guard.stdin is not None
        kept_fds = (self._guard.stdin.fileno(),)
        environment = self._environment()

        def make(name: str, *arguments: str, address: str | None = None) -> ChildProcess:
            log_path = None if self._verbose else self._folder.logs / f"{name}.log"
            return ChildProcess(
                name, arguments, environment, log_path=log_path, address=address, kept_fds=kept_fds
            )

        return [
            make("embedder", "services.embedder", address=self.addresses["embedder"]),
            make("ingest", "services.ingest", "serve", address=self.addresses["ingest"]),
            make("search", "services.search", address=self.addresses["search"]),
            *(make(f"worker-{number}", "services.ingest", "work") for number in range(1, self._workers + 1)),
        ]

    def _environment(self) -> dict[str, str]:
        """Returns what the caller set, over it what only the stack knows."""
        return {
            "READYMARK_MODELS": str(self._folder.models),
            "READYMARK_EMBEDDER_MODEL": DEFAULT_MODEL,
            **os.environ,
            "READYMARK_INGEST_DATABASE_URL": self.database_uri,
            "READYMARK_INGEST_BLOB_URL": self._folder.blobs.as_uri(),
            "READYMARK_INGEST_LISTEN": self.addresses["ingest"],
            "READYMARK_EMBEDDER_ADDRESS": self.addresses["embedder"],
            "READYMARK_EMBEDDER_LISTEN": self.addresses["embedder"],
            "READYMARK_SEARCH_DATABASE_URL": self._postgres.uri(SEARCHER, DATABASE),
            "READYMARK_SEARCH_LISTEN": self.addresses["search"],
        }

    def _environment_of_migrator(self) -> dict[str, str]:
        return {**os.environ, "READYMARK_INGEST_DATABASE_URL": self._postgres.uri(MIGRATOR, DATABASE)}

    def _build_model(self) -> None:
        environment = self._environment()
        models, model = Path(environment["READYMARK_MODELS"]), environment["READYMARK_EMBEDDER_MODEL"]
        if model not in PACKAGED_MODELS or (models / model).is_dir():
            # A model of the caller's own is the embedder's matter; it says what is missing.
            return
        tell(f"building the model {model} (once)")
        self._run_step(
            "the model", ["services.embedder.model_build", str(models), "--model", model], environment
        )

    def _run_step(self, subject: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        finished = subprocess.run(
            [sys.executable, "-m", *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if finished.returncode != 0:
            said = (finished.stderr or finished.stdout).strip()[-2000:]
            raise StackError(f"{subject} failed with {describe_exit(finished.returncode)}:\n{said}")

    def _wait_serving(self) -> None:
        waiting = list(self._children)
        deadline = time.monotonic() + START_SECONDS
        while waiting and not self._stopping.wait(LOOK_SECONDS):
            for child in self._children:
                code = child.exit_code()
                if code is not None:
                    raise StackError(
                        f"{child.name} ended with {describe_exit(code)} while starting:\n{child.log_tail()}"
                    )
            waiting = [child for child in waiting if not child.is_serving()]
            if waiting and time.monotonic() > deadline:
                names = ", ".join(child.name for child in waiting)
                raise StackError(
                    f"not serving after {START_SECONDS:g} s: {names}; look at {self._folder.logs}"
                )

    def _start_guard(self) -> None:
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "deploy.local.guard", str(self._folder.postgres)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(self._folder.lock_fd,),
        )

    def _dismiss_guard(self) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            try:
                self._guard.stdin.write(STOPPED)
                self._guard.stdin.close()
            except BrokenPipeError:
                pass
            self._guard.wait()
            self._guard = None
