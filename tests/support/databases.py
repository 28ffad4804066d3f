"""A real PostgreSQL for a test session, and where one test's database is found."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deploy.local.embedded_postgres import EmbeddedPostgres

# Another release of PostgreSQL that the package carries, to run the same tests on it.
VERSION_VARIABLE = "READYMARK_TEST_POSTGRES"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """Connection URIs of one test's database, by role."""

    name: str
    ingest_url: str
    migrator_url: str
    searcher_url: str
    superuser_url: str


@contextlib.contextmanager
def running_server() -> Iterator[EmbeddedPostgres]:
    """A started server. Not crash safe on purpose: it only speeds up the disk."""
    # Not pytest's own folder: that one is closed to the user that the server runs as.
    folder = Path(tempfile.mkdtemp(prefix="readymark-pg-"))
    folder.chmod(0o755)
    server = EmbeddedPostgres(
        folder / "data",
        settings={"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"},
        version=int(os.environ.get(VERSION_VARIABLE, "18")),
    )
    server.start()
    try:
        yield server
    finally:
        server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)
