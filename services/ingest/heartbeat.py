"""Renews the leases of one worker process, from a thread of its own.

Owns its thread, its event loop and its one connection, so that neither a busy event loop
nor an exhausted pool of the worker can stop the beats. One failed beat is followed by the
next; a lease is given up here only when the database says it is lost, or when no beat got
through for a whole lease, since then it must be taken for lost (rule J14 holds either way:
every write checks the epoch).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from services.ingest.model import JobId
from services.ingest.repository import jobs
from services.ingest.repository.jobs import Lease
from shared import postgres
from shared.errors import DependencyUnavailableError
from shared.postgres import Connection
from shared.telemetry import log_event

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Held:
    lease: Lease
    on_lost: Callable[[], None]
    good_until: float


class Heartbeat:
    """`hold` begins to renew a lease, `release` ends it; `on_lost` is called in the worker's loop."""

    def __init__(self, database_url: str, *, beat_seconds: float, application_name: str) -> None:
        self._database_url = database_url
        self._beat_seconds = beat_seconds
        self._application_name = application_name
        self._held: dict[tuple[JobId, int], _Held] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._worker_loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._worker_loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; leases still held run out by themselves."""
        self._stop.set()
        self._thread.join(timeout=5)

    def hold(self, lease: Lease, on_lost: Callable[[], None]) -> None:
        held = _Held(lease, on_lost, time.monotonic() + lease.lease_seconds)
        with self._lock:
            self._held[lease.job_id, lease.lease_epoch] = held

    def release(self, lease: Lease) -> None:
        with self._lock:
            self._held.pop((lease.job_id, lease.lease_epoch), None)

    def _run(self) -> None:
        asyncio.run(self._beat_until_stopped())

    async def _beat_until_stopped(self) -> None:
        connection: Connection | None = None
        while not await asyncio.to_thread(self._stop.wait, self._beat_seconds):
            with self._lock:
                held = list(self._held.values())
            if not held:
                continue
            sent_at = time.monotonic()
            try:
                if connection is None:
                    connection = await postgres.dedicated(
                        self._database_url, application_name=self._application_name
                    )
                async with asyncio.timeout(max(self._beat_seconds, 1.0)):
                    await self._beat(connection, held, sent_at)
            except (DependencyUnavailableError, TimeoutError, *postgres.CONNECTION_ERRORS) as error:
                log_event(_logger, "heartbeat failed", logging.WARNING, error=type(error).__name__)
                await postgres.discard(connection)
                connection = None
            self._lose_what_ran_out(held)
        await postgres.discard(connection)

    async def _beat(self, connection: Connection, held: list[_Held], sent_at: float) -> None:
        by_key = {(item.lease.job_id, item.lease.lease_epoch): item for item in held}
        for renewal in await jobs.renew_leases(connection, list(by_key)):
            item = by_key[renewal.job_id, renewal.lease_epoch]
            if renewal.is_held:
                # Counted from before the statement was sent: the database stamped it later.
                item.good_until = sent_at + item.lease.lease_seconds
            else:
                self._lose(item, "taken over or ended by somebody else")

    def _lose_what_ran_out(self, held: list[_Held]) -> None:
        for item in held:
            if time.monotonic() > item.good_until:
                self._lose(item, "no heartbeat got through for a whole lease")

    def _lose(self, item: _Held, cause: str) -> None:
        key = (item.lease.job_id, item.lease.lease_epoch)
        with self._lock:
            if self._held.pop(key, None) is None:
                return
        log_event(_logger, "lease lost", logging.WARNING, job_id=key[0], lease_epoch=key[1], cause=cause)
        assert self._worker_loop is not None
        self._worker_loop.call_soon_threadsafe(item.on_lost)
