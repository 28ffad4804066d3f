"""The API process: builds what the RPCs need, serves until SIGTERM, takes it down in order.

Order of stopping: not ready any more, no new calls, watches ended with SHUTTING_DOWN (their
clients resume elsewhere), running calls finished, connections, telemetry last.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys

from readymark.ingest.v1 import ingest_service_pb2_grpc as pb_grpc

from services.ingest.blobs import BlobStore, open_blob_store
from services.ingest.catalog import CatalogService
from services.ingest.change_feed import ChangeFeed
from services.ingest.model_check import ModelCheck
from services.ingest.readiness import wait_for_database
from services.ingest.repository.documents import JobTerms
from services.ingest.repository.migrating import SchemaTooOldError
from services.ingest.servicer import SERVICE_NAME, IngestServicer
from services.ingest.settings import ServeSettings
from services.ingest.submission import SubmissionService
from services.ingest.watching import WatchService
from shared import postgres, settings, telemetry
from shared.embedder_client import EmbedderClient
from shared.errors import ReadymarkError
from shared.postgres import Pool, UnsupportedServerError
from shared.rpc.server import PortTakenError, Serving, create_server, wait_for_signal
from shared.telemetry import Telemetry, log_event

_logger = logging.getLogger(__name__)
# An upload that is still running is touched all the time; an hour without is a dead one.
ABANDONED_UPLOAD_SECONDS = 3600.0


class IngestApi:
    """The server with all that it needs, on a pool that is open. `start` and `stop` once each."""

    def __init__(self, options: ServeSettings, pool: Pool, blobs: BlobStore, observed: Telemetry) -> None:
        self._options = options
        self._embedder = EmbedderClient(options.embedder_address) if options.embedder_address else None
        self._feed = ChangeFeed(pool, poll_seconds=options.watch_poll_seconds)
        server = create_server(service_name=SERVICE_NAME, telemetry=observed)
        servicer = _servicer(options, pool, blobs, self._feed, self._embedder)
        pb_grpc.add_IngestServiceServicer_to_server(servicer, server)
        self._serving = Serving(
            server,
            listen=options.listen,
            health_listen=options.health_listen or None,
            service_names=(SERVICE_NAME,),
        )

    async def start(self) -> str:
        """Returns host:port of the API; raises PortTakenError."""
        address = await self._serving.start()
        self._serving.set_serving(True)
        return address

    async def stop(self) -> None:
        self._serving.set_serving(False)
        # Watches never end by themselves, so they are ended while the server waits for the rest.
        stopping = asyncio.create_task(self._serving.stop(self._options.shutdown_grace_seconds))
        await self._feed.close()
        await stopping
        if self._embedder is not None:
            await self._embedder.close()


def _servicer(
    options: ServeSettings,
    pool: Pool,
    blobs: BlobStore,
    feed: ChangeFeed,
    embedder: EmbedderClient | None,
) -> IngestServicer:
    terms = JobTerms(
        max_attempts=options.max_attempts,
        retry_delay_seconds=options.retry_delay_seconds,
        lease_seconds=options.lease_seconds,
    )
    return IngestServicer(
        SubmissionService(
            pool,
            blobs,
            model_check=ModelCheck(embedder),
            terms=terms,
            max_upload_bytes=options.max_upload_bytes,
            idle_seconds=options.upload_idle_seconds,
            max_uploads=options.max_uploads,
        ),
        CatalogService(pool, blobs, terms=terms),
        WatchService(pool, feed, heartbeat_seconds=options.watch_heartbeat_seconds),
    )


async def serve(options: ServeSettings) -> int:
    """Runs the API until it is asked to stop; returns the exit code of the process."""
    observed = telemetry.setup("readymark-ingest-api")
    log_event(_logger, "starting", **settings.describe(options))
    asked = asyncio.create_task(wait_for_signal(), name="signal")
    try:
        await _serve(options, observed, asked)
    except (SchemaTooOldError, UnsupportedServerError, PortTakenError, ValueError) as error:
        print(f"readymark ingest cannot serve: {error}", file=sys.stderr)  # noqa: T201
        return 1
    finally:
        asked.cancel()
        observed.shutdown()
    return 0


async def _serve(options: ServeSettings, observed: Telemetry, asked: asyncio.Task[None]) -> None:
    blobs = open_blob_store(options.blob_url)
    stopping = asyncio.Event()
    asked.add_done_callback(lambda _: stopping.set())
    pool = postgres.create_pool(
        options.database_url, application_name="readymark-ingest-api", max_size=options.pool_size
    )
    try:
        if not await wait_for_database(pool, stopping):
            return
        # What is left over is only lost space; a store that is down is no reason not to start.
        with contextlib.suppress(ReadymarkError):
            await blobs.remove_abandoned_uploads(ABANDONED_UPLOAD_SECONDS)
        api = IngestApi(options, pool, blobs, observed)
        log_event(_logger, "serving", address=await api.start())
        try:
            await stopping.wait()
            log_event(_logger, "stopping")
        finally:
            await api.stop()
    finally:
        await pool.close()
