"""The worker process: builds what a worker needs, runs it until SIGTERM, takes it down in order.

Order of stopping: claim nothing more, hand the jobs back, then the heartbeat, parsers,
connections, and telemetry last, since a collector that is away may take its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import sys

from services.ingest.blobs import BlobStore, BlobStoreError, open_blob_store
from services.ingest.heartbeat import Heartbeat
from services.ingest.parsing.limits import ParseLimits
from services.ingest.parsing.sandbox import ParserPool
from services.ingest.processing import ChunkPolicy, DocumentProcessingService
from services.ingest.readiness import wait_for_database
from services.ingest.repository.migrating import SchemaTooOldError
from services.ingest.sweep import sweep_for_ever
from services.ingest.wake_up import WakeUp
from services.ingest.work_settings import WorkSettings
from services.ingest.worker import IngestionWorker
from shared import postgres, settings, telemetry
from shared.embedder_client import EmbedderClient, Patience
from shared.postgres import Pool, UnsupportedServerError
from shared.telemetry import log_event

_logger = logging.getLogger(__name__)


def worker_name() -> str:
    """Returns a name that no other process ever has, not even after a restart on the same host."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


async def work(options: WorkSettings) -> int:
    """Runs one worker process; returns its exit code."""
    observed = telemetry.setup("readymark-ingest-worker")
    log_event(_logger, "starting", **settings.describe(options))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Only a flag: a signal must never break into a transaction.
        loop.add_signal_handler(number, stopping.set)
    name = worker_name()
    pool = postgres.create_pool(
        options.database_url, application_name="readymark-worker", max_size=options.slots * 2 + 2
    )
    try:
        if not await wait_for_database(pool, stopping):
            return 0
        await _run_worker(options, name, pool, stopping)
    except (SchemaTooOldError, UnsupportedServerError, BlobStoreError) as error:
        print(f"readymark worker cannot start: {error}", file=sys.stderr)  # noqa: T201
        return 1
    finally:
        await pool.close()
        observed.shutdown()
    return 0


async def _run_worker(options: WorkSettings, name: str, pool: Pool, stopping: asyncio.Event) -> None:
    async with contextlib.AsyncExitStack() as stack:
        blobs = open_blob_store(options.blob_url)
        parsers = ParserPool()
        stack.push_async_callback(parsers.close)
        patience = Patience(retry_budget_seconds=options.embed_patience_seconds)
        embedder = EmbedderClient(options.embedder_address, patience=patience)
        stack.push_async_callback(embedder.close)
        heartbeat = Heartbeat(
            options.database_url,
            beat_seconds=options.heartbeat_seconds,
            application_name="readymark-worker-heartbeat",
        )
        heartbeat.start()
        stack.callback(heartbeat.stop)
        wake_up = WakeUp(
            options.database_url,
            poll_seconds=options.poll_seconds,
            application_name="readymark-worker-listen",
        )
        wake_up.start()
        stack.push_async_callback(wake_up.stop)
        worker = IngestionWorker(
            name=name,
            pool=pool,
            processing=_processing(options, pool, blobs, parsers, embedder),
            heartbeat=heartbeat,
            wake_up=wake_up,
            slots=options.slots,
            lease_seconds=options.lease_seconds,
        )
        sweeping = asyncio.create_task(
            sweep_for_ever(
                pool,
                blobs,
                every_seconds=options.sweep_seconds,
                grace_seconds=options.orphan_grace_seconds,
            )
        )
        running = asyncio.create_task(worker.run())
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        worker.stop()
        waiting.cancel()
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
        await running


def _processing(
    options: WorkSettings, pool: Pool, blobs: BlobStore, parsers: ParserPool, embedder: EmbedderClient
) -> DocumentProcessingService:
    return DocumentProcessingService(
        pool=pool,
        blobs=blobs,
        parsers=parsers,
        embedder=embedder,
        chunk_policy=ChunkPolicy(
            max_tokens=options.chunk_max_tokens, overlap_tokens=options.chunk_overlap_tokens
        ),
        parse_limits=ParseLimits(
            wall_seconds=options.parse_timeout_seconds,
            cpu_seconds=math.ceil(options.parse_timeout_seconds),
            memory_bytes=options.parse_memory_bytes,
            max_input_bytes=options.max_upload_bytes,
        ),
    )
