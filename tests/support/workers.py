"""Runs an IngestionWorker in this process over a real database, with the stages scripted by the test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from services.ingest.heartbeat import Heartbeat
from services.ingest.repository.jobs import Lease
from services.ingest.wake_up import WakeUp
from services.ingest.worker import IngestionWorker
from shared.postgres import Pool

Stages = Callable[[Lease], Awaitable[None]]


class ScriptedProcessing:
    """`process` is the test's own; `ready` waits while `is_away` is set."""

    def __init__(self, process: Stages) -> None:
        self._process = process
        self.available = asyncio.Event()
        self.available.set()

    async def ready(self) -> None:
        await self.available.wait()

    async def process(self, lease: Lease) -> None:
        await self._process(lease)


@contextlib.asynccontextmanager
async def running_worker(
    pool: Pool,
    process: Stages | ScriptedProcessing,
    *,
    name: str = "worker",
    slots: int = 4,
    lease_seconds: float = 60.0,
    poll_seconds: float = 0.05,
    beat_seconds: float | None = None,
) -> AsyncIterator[IngestionWorker]:
    processing = process if isinstance(process, ScriptedProcessing) else ScriptedProcessing(process)
    heartbeat = Heartbeat(
        pool.conninfo, beat_seconds=beat_seconds or lease_seconds / 3, application_name=f"{name}-heartbeat"
    )
    heartbeat.start()
    wake_up = WakeUp(pool.conninfo, poll_seconds=poll_seconds, application_name=f"{name}-listen")
    wake_up.start()
    worker = IngestionWorker(
        name=name,
        pool=pool,
        processing=processing,
        heartbeat=heartbeat,
        wake_up=wake_up,
        slots=slots,
        lease_seconds=lease_seconds,
    )
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        async with asyncio.timeout(20):
            await running
        await wake_up.stop()
        await asyncio.to_thread(heartbeat.stop)


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    """Returns as soon as `condition` holds; raises TimeoutError when it never does."""
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.02)
