"""The ingestion worker: claims jobs, renews their leases, runs them, settles how they end.

Knows nothing of parsing, chunks or vectors; that is DocumentProcessingService.process.
Owns the life of a lease: claimed -> held by the heartbeat -> ended in exactly one of
published, retry later, given up, handed back, or lost (then it writes nothing more).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from opentelemetry import trace

from services.ingest import retry
from services.ingest.heartbeat import Heartbeat
from services.ingest.repository import jobs
from services.ingest.repository.jobs import Lease
from services.ingest.wake_up import WakeUp
from shared import telemetry
from shared.errors import DependencyUnavailableError, LeaseLostError, OverloadedError, ReadymarkError
from shared.postgres import Pool
from shared.telemetry import log_event

_logger = logging.getLogger(__name__)

# How long a worker waits before it asks again for something that is down.
PAUSE_SECONDS = 1.0


class Processing(Protocol):
    """What the worker drives; `ready` returns when everything a job needs is there, or raises."""

    async def ready(self) -> None: ...

    async def process(self, lease: Lease) -> None: ...


class IngestionWorker:
    """Runs up to `slots` jobs at once until `stop` is called; then `run` returns soon."""

    def __init__(
        self,
        *,
        name: str,
        pool: Pool,
        processing: Processing,
        heartbeat: Heartbeat,
        wake_up: WakeUp,
        slots: int,
        lease_seconds: float,
    ) -> None:
        self._name = name
        self._pool = pool
        self._processing = processing
        self._heartbeat = heartbeat
        self._wake_up = wake_up
        self._slots = slots
        self._lease_seconds = lease_seconds
        self._running: dict[asyncio.Task[None], Lease] = {}
        self._lost: set[tuple[int, int]] = set()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Asks the worker to stop: nothing is claimed any more, running jobs are handed back (rule J15)."""
        self._stopping.set()
        self._wake_up.set()

    async def run(self) -> None:
        log_event(_logger, "worker started", worker=self._name, slots=self._slots)
        while not self._stopping.is_set():
            try:
                if not await self._claim_and_start():
                    await self._wake_up.wait()
            except ReadymarkError as error:
                # Nothing was claimed: whatever is away or slow is asked again a little later.
                log_event(_logger, "worker waits", logging.WARNING, reason=error.reason)
                await self._pause()
        await self._hand_back_all()
        log_event(_logger, "worker stopped", worker=self._name)

    async def _claim_and_start(self) -> bool:
        """Returns True when it is worth asking again at once."""
        free = self._slots - len(self._running)
        if free <= 0:
            return False
        # While the embedder is away no attempt is begun, so none is burned.
        if not await self._ready_or_stopping():
            return False
        claim = await jobs.claim_ingestion_jobs(
            self._pool, worker=self._name, lease_seconds=self._lease_seconds, max_jobs=free
        )
        if claim.converged:
            log_event(_logger, "expired jobs settled", count=claim.converged)
        for lease in claim.leases:
            self._start(lease)
        return bool(claim.converged or claim.leases)

    async def _ready_or_stopping(self) -> bool:
        ready = asyncio.ensure_future(self._processing.ready())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({ready, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                await ready
            return not self._stopping.is_set()
        finally:
            for task in (ready, stopping):
                task.cancel()
            await asyncio.gather(ready, stopping, return_exceptions=True)

    def _start(self, lease: Lease) -> None:
        task = asyncio.create_task(self._run_job(lease), name=f"job-{lease.job_id}")
        self._running[task] = lease

        def lost() -> None:
            self._lost.add((lease.job_id, lease.lease_epoch))
            task.cancel()

        self._heartbeat.hold(lease, lost)
        task.add_done_callback(lambda done: self._ended(done, lease))

    def _ended(self, task: asyncio.Task[None], lease: Lease) -> None:
        self._heartbeat.release(lease)
        self._lost.discard((lease.job_id, lease.lease_epoch))
        self._running.pop(task, None)
        # A slot is free.
        self._wake_up.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("a job ended by an error of the worker itself", exc_info=error)

    async def _run_job(self, lease: Lease) -> None:
        # Attempt 1 continues the submitter's trace; later ones start their own and link to it,
        # so that no trace is stretched over the waiting in between.
        with telemetry.span_from(
            lease.traceparent,
            lease.tracestate,
            "process ingestion",
            as_link=lease.attempt > 1,
            attributes={
                "readymark.document.id": lease.document_id,
                "readymark.job.id": lease.job_id,
                "readymark.job.attempt": lease.attempt,
                "readymark.job.lease_epoch": lease.lease_epoch,
            },
        ):
            log_event(
                _logger,
                "job claimed",
                job_id=lease.job_id,
                document_id=lease.document_id,
                attempt=lease.attempt,
                lease_epoch=lease.lease_epoch,
            )
            try:
                await self._processing.process(lease)
            except asyncio.CancelledError:
                await self._settle_cancelled(lease)
            except LeaseLostError:
                self._log_end(lease, "lease lost")
            except Exception as error:  # noqa: BLE001
                # A call that was cut off by the cancellation may report it as an error of its own.
                if self._stopping.is_set() or self._is_lost(lease):
                    await self._settle_cancelled(lease)
                else:
                    await self._settle_failure(lease, error)
            else:
                self._log_end(lease, "published")

    async def _settle_cancelled(self, lease: Lease) -> None:
        """A job is cancelled for two reasons only: its lease is lost, or the worker stops."""
        if self._is_lost(lease):
            self._log_end(lease, "lease lost")
        else:
            await self._settle(lease, "handed back", lambda: jobs.hand_back(self._pool, lease))

    def _is_lost(self, lease: Lease) -> bool:
        # Not `task.cancelling()`: a TaskGroup in which a task failed leaves that count raised
        # (Python 3.11), and a failure would be taken for a cancellation.
        return (lease.job_id, lease.lease_epoch) in self._lost

    async def _settle_failure(self, lease: Lease, error: Exception) -> None:
        span = trace.get_current_span()
        trace_id = telemetry.current_trace_id() or "unknown"
        span.set_status(trace.Status(trace.StatusCode.ERROR, type(error).__name__))
        decision = retry.decide(
            error,
            attempt=lease.attempt,
            max_attempts=lease.max_attempts,
            retry_delay_seconds=lease.retry_delay_seconds,
            trace_id=trace_id,
        )
        log_event(
            _logger,
            "attempt failed",
            logging.WARNING,
            job_id=lease.job_id,
            document_id=lease.document_id,
            attempt=lease.attempt,
            reason=decision.failure["reason"],
            retry_in_seconds=decision.delay_seconds,
        )
        if not isinstance(error, ReadymarkError):
            _logger.error("unforeseen error in an attempt", exc_info=error)
        delay = decision.delay_seconds
        if delay is None:
            await self._settle(
                lease,
                "given up",
                lambda: jobs.give_up(
                    self._pool, lease, error_message=decision.error_message, failure=decision.failure
                ),
            )
            return
        await self._settle(
            lease,
            "retry later",
            lambda: jobs.retry_later(
                self._pool,
                lease,
                delay_seconds=delay,
                error_message=decision.error_message,
                failure=decision.failure,
            ),
        )

    async def _settle(self, lease: Lease, outcome: str, write: Callable[[], Awaitable[None]]) -> None:
        """Writes how the attempt ended. Once begun it is not cancelled any more: it is short and bounded."""
        # Nobody needs to be told now that the lease is lost: the write itself will find out.
        self._heartbeat.release(lease)
        writing = asyncio.ensure_future(self._write_outcome(lease, outcome, write))
        while not writing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(writing)
        writing.result()

    async def _write_outcome(self, lease: Lease, outcome: str, write: Callable[[], Awaitable[None]]) -> None:
        """Goes through passing faults of the database for one lease; after that the job is anybody's."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + lease.lease_seconds
        while True:
            try:
                await write()
            except LeaseLostError:
                self._log_end(lease, "lease lost")
                return
            except (DependencyUnavailableError, OverloadedError) as error:
                if loop.time() > give_up_at:
                    self._log_end(lease, "left to expire")
                    return
                log_event(_logger, "outcome not written yet", logging.WARNING, reason=error.reason)
                await asyncio.sleep(min(PAUSE_SECONDS, lease.lease_seconds / 10))
            else:
                self._log_end(lease, outcome)
                return

    def _log_end(self, lease: Lease, outcome: str) -> None:
        log_event(
            _logger,
            "attempt ended",
            job_id=lease.job_id,
            document_id=lease.document_id,
            lease_epoch=lease.lease_epoch,
            outcome=outcome,
        )

    async def _hand_back_all(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pause(self) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({stopping}, timeout=PAUSE_SECONDS)
        stopping.cancel()
