"""What every test of ingest may ask for: a real PostgreSQL with a database of its own, and a blob folder.

One server a session, started once and migrated once; a test's database is a copy of the
migrated one, which takes a tenth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from readymark.ingest.v1 import ingest_service_pb2_grpc as pb_grpc

from deploy.local.embedded_postgres import INGEST, MIGRATOR, SEARCHER, EmbeddedPostgres
from services.ingest.blobs import BlobStore, open_blob_store
from services.ingest.repository import migrating
from services.ingest.serving import IngestApi
from services.ingest.settings import ServeSettings
from shared import postgres, telemetry
from shared.postgres import Pool
from shared.rpc.channel import create_channel

_TEMPLATE = "readymark_template"
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """Connection URIs of one test's database, by role."""

    name: str
    ingest_url: str
    migrator_url: str
    searcher_url: str
    superuser_url: str


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[EmbeddedPostgres]:
    """A started server of this session. Not crash safe on purpose: it only speeds up the disk."""
    # Not pytest's own folder: that one is closed to the user that the server runs as.
    folder = Path(tempfile.mkdtemp(prefix="readymark-pg-"))
    folder.chmod(0o755)
    server = EmbeddedPostgres(
        folder / "data",
        settings={"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"},
    )
    server.start()
    try:
        yield server
    finally:
        server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def template_database(postgres_server: EmbeddedPostgres) -> str:
    """Name of the migrated database that tests copy. Nobody may be connected to it."""
    postgres_server.create_database(_TEMPLATE)
    asyncio.run(migrating.migrate(postgres_server.uri(MIGRATOR, _TEMPLATE)))
    return _TEMPLATE


@pytest.fixture
def database(postgres_server: EmbeddedPostgres, template_database: str) -> Iterator[Database]:
    """A migrated, empty database for one test."""
    name = f"readymark_test_{os.getpid()}_{next(_numbers)}"
    postgres_server.create_database(name, template=template_database)
    try:
        yield Database(
            name=name,
            ingest_url=postgres_server.uri(INGEST, name),
            migrator_url=postgres_server.uri(MIGRATOR, name),
            searcher_url=postgres_server.uri(SEARCHER, name),
            superuser_url=postgres_server.uri("postgres", name),
        )
    finally:
        postgres_server.drop_database(name)


@pytest.fixture
async def pool(database: Database) -> AsyncIterator[Pool]:
    """An open pool of the ingest role on the test's database."""
    opened = postgres.create_pool(database.ingest_url, application_name="test", max_size=24)
    await opened.open(wait=True)
    try:
        yield opened
    finally:
        await opened.close()


@pytest.fixture
def blob_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "blobs"
    folder.mkdir()
    return folder


@pytest.fixture
def blob_store(blob_folder: Path) -> BlobStore:
    return open_blob_store(str(blob_folder))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """A running API on a port of its own, and a stub that raises our errors."""

    address: str
    stub: pb_grpc.IngestServiceAsyncStub
    pool: Pool
    blobs: BlobStore
    blob_folder: Path
    server: IngestApi


StartApi = Callable[..., Awaitable[Api]]


@pytest.fixture
async def start_api(
    database: Database, pool: Pool, blob_store: BlobStore, blob_folder: Path
) -> AsyncIterator[StartApi]:
    """Starts an API with settings of the test's choice; all are stopped at the end."""
    observed = telemetry.setup("test")
    async with contextlib.AsyncExitStack() as stack:

        async def start(**settings: Any) -> Api:
            values = {"listen": "127.0.0.1:0", "watch_poll_seconds": 0.02, "shutdown_grace_seconds": 1.0}
            options = ServeSettings(
                database_url=database.ingest_url, blob_url=str(blob_folder), **(values | settings)
            )
            server = IngestApi(options, pool, blob_store, observed)
            address = await server.start()
            stack.push_async_callback(server.stop)
            channel = await stack.enter_async_context(create_channel(address))
            stub: pb_grpc.IngestServiceAsyncStub = pb_grpc.IngestServiceStub(channel)
            return Api(
                address=address,
                stub=stub,
                pool=pool,
                blobs=blob_store,
                blob_folder=blob_folder,
                server=server,
            )

        yield start


@pytest.fixture
async def api(start_api: StartApi) -> Api:
    return await start_api()
