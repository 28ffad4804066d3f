"""The system as separate processes that a test may stop, kill, pause and start again one by one.

Real PostgreSQL, real services, real gRPC; the embedder is the real one or the fake, as asked.
Ports are free ones on loopback. Every process is ended by the pid that started it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.local.embedded_postgres import INGEST, MIGRATOR, SEARCHER, EmbeddedPostgres

REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 60.0


class Process:
    """One started service; its JSON log lines are kept."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self.lines: list[dict[str, Any]] = []
        self._new_line = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, *command],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            try:
                line = json.loads(text)
            except ValueError:
                line = {"event": text.rstrip()}
            with self._new_line:
                self.lines.append(line if isinstance(line, dict) else {"event": text})
                self._new_line.notify_all()

    def wait_for_line(
        self, condition: Callable[[dict[str, Any]], bool], seconds: float = START_SECONDS
    ) -> dict[str, Any]:
        """Returns the first line that fulfils `condition`; fails with the whole log when none comes."""
        deadline = time.monotonic() + seconds
        seen = 0
        with self._new_line:
            while True:
                while seen < len(self.lines):
                    line = self.lines[seen]
                    seen += 1
                    if condition(line):
                        return line
                left = deadline - time.monotonic()
                if left <= 0 or (self._process.poll() is not None and not self._reader.is_alive()):
                    tail = "\n".join(json.dumps(line) for line in self.lines[-30:])
                    raise AssertionError(f"{self.name} did not log what was expected:\n{tail}")
                self._new_line.wait(min(left, 0.5))

    def wait_for_event(self, event: str, seconds: float = START_SECONDS) -> dict[str, Any]:
        return self.wait_for_line(lambda line: line.get("event") == event, seconds)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, to this process alone."""
        if self._process.poll() is None:
            # A stopped process takes SIGKILL all the same.
            self.send(signal.SIGKILL)
        self._process.wait(10)

    def stop(self, seconds: float = 30.0) -> int:
        """SIGTERM; returns the exit code."""
        if self._process.poll() is None:
            self.send(signal.SIGTERM)
        return self._process.wait(seconds)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None


@dataclasses.dataclass
class Cluster:
    """PostgreSQL and the processes of one test; `worker()` may be called many times."""

    folder: Path
    models: Path
    settings: dict[str, str]
    postgres: EmbeddedPostgres
    processes: list[Process] = dataclasses.field(default_factory=list)
    addresses: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def ingest_url(self) -> str:
        return self.postgres.uri(INGEST, "readymark")

    def environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("READYMARK_", "OTEL_"))}
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join([".", "client", "protos/generated"]),
            "READYMARK_MODELS": str(self.models),
            "READYMARK_INGEST_DATABASE_URL": self.ingest_url,
            "READYMARK_INGEST_BLOB_URL": str(self.folder / "blobs"),
            "READYMARK_INGEST_LISTEN": self.addresses.get("ingest", "127.0.0.1:0"),
            "READYMARK_EMBEDDER_ADDRESS": self.addresses.get("embedder", "127.0.0.1:1"),
            "READYMARK_EMBEDDER_LISTEN": self.addresses.get("embedder", "127.0.0.1:0"),
            "READYMARK_SEARCH_DATABASE_URL": self.postgres.uri(SEARCHER, "readymark"),
            "READYMARK_SEARCH_LISTEN": self.addresses.get("search", "127.0.0.1:0"),
            **self.settings,
        }

    def start_process(self, name: str, command: list[str]) -> Process:
        process = Process(name, command, self.environment())
        self.processes.append(process)
        return process

    def start_service(self, service: str, command: list[str]) -> Process:
        """Starts a service, waits until it serves, and remembers its address for the others and for restarts."""
        process = self.start_process(service, command)
        line = process.wait_for_line(lambda line: "address" in line)
        self.addresses[service] = line["address"]
        return process

    def embedder(self) -> Process:
        return self.start_service("embedder", ["-m", "services.embedder"])

    def fake_embedder(self, control: Path | None = None) -> Process:
        listen = self.addresses.get("embedder", "127.0.0.1:0")
        command = ["-m", "tests.support.fake_embedder", "--listen", listen]
        if control is not None:
            command += ["--control", str(control)]
        return self.start_service("embedder", command)

    def ingest(self) -> Process:
        return self.start_service("ingest", ["-m", "services.ingest", "serve"])

    def search(self) -> Process:
        return self.start_service("search", ["-m", "services.search"])

    def worker(self) -> Process:
        process = self.start_process("worker", ["-m", "services.ingest", "work"])
        process.wait_for_event("worker started")
        return process

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.kill()
        self.postgres.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)


def start_cluster(models: Path, settings: dict[str, str]) -> Cluster:
    """Returns a cluster with a migrated database and no service yet."""
    # Not pytest's own folder: that one is closed to the user that PostgreSQL runs as.
    folder = Path(tempfile.mkdtemp(prefix="readymark-system-"))
    folder.chmod(0o755)
    (folder / "blobs").mkdir()
    postgres = EmbeddedPostgres(folder / "postgres")
    postgres.start()
    postgres.create_database("readymark")
    subprocess.run(
        [sys.executable, "-m", "services.ingest", "migrate"],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([".", "client", "protos/generated"]),
            "READYMARK_INGEST_DATABASE_URL": postgres.uri(MIGRATOR, "readymark"),
        },
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return Cluster(folder, models, dict(settings), postgres)
