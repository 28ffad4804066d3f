"""A whole system of processes for each test that asks for one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY, Cluster, start_cluster

LEASE_SECONDS = 2.0
POLL_SECONDS = 0.2


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder of the real models, built once from the installed packages."""
    folder = Path(os.environ.get("READYMARK_MODELS") or REPOSITORY / ".readymark" / "models").resolve()
    subprocess.run(
        [sys.executable, "-m", "services.embedder.model_build", str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", "client", "protos/generated"])},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return folder


@pytest.fixture
def cluster(models: Path) -> Iterator[Cluster]:
    """PostgreSQL is up and migrated; the test starts the services it wants."""
    made = start_cluster(
        models,
        {
            "READYMARK_INGEST_LEASE_SECONDS": str(LEASE_SECONDS),
            "READYMARK_INGEST_POLL_SECONDS": str(POLL_SECONDS),
            "READYMARK_INGEST_RETRY_DELAY_SECONDS": "0.2",
            "READYMARK_INGEST_CHUNK_MAX_TOKENS": "64",
            "READYMARK_INGEST_CHUNK_OVERLAP_TOKENS": "8",
        },
    )
    try:
        yield made
    finally:
        made.stop()
