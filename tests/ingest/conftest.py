"""What every test of ingest may ask for: a pool on its own database, a blob folder, a running API."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from readymark.ingest.v1 import ingest_service_pb2_grpc as pb_grpc

from services.ingest.blobs import BlobStore, open_blob_store
from services.ingest.serving import IngestApi
from services.ingest.settings import ServeSettings
from shared import postgres, telemetry
from shared.postgres import Pool
from shared.rpc.channel import create_channel
from tests.support.databases import Database


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
