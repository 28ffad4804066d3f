"""Removes what nothing refers to any more: blobs, snapshot files, broken uploads, old request ids.

Deleting and replacing documents leaves files behind when a process dies between the commit
and the removal; this duty finds them later. It only ever touches what is older than a grace
period, because a submission stores its bytes before its transaction names them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from services.ingest.blobs import BLOB_PREFIX, SNAPSHOT_PREFIX, UPLOAD_PREFIX, BlobStore, blob_key
from services.ingest.repository import sweeping
from shared.errors import ReadymarkError
from shared.postgres import Pool
from shared.telemetry import log_event

_logger = logging.getLogger(__name__)
BATCH = 500


async def sweep_once(pool: Pool, blobs: BlobStore, *, grace_seconds: float) -> int:
    """Returns how many files and rows were removed."""
    removed = await sweeping.drop_old_rows(pool)
    for sha256 in await sweeping.drop_unreferenced_blobs(pool, grace_seconds=grace_seconds):
        # Stored again since the row went? Then a newer row names it, and the file stays.
        if not await sweeping.known_blobs(pool, [sha256]):
            await blobs.delete(blob_key(sha256))
            removed += 1

    async def unknown_blobs(keys: Sequence[str]) -> list[str]:
        known = await sweeping.known_blobs(pool, [key.rsplit("/", 1)[-1] for key in keys])
        return [key for key in keys if key.rsplit("/", 1)[-1] not in known]

    async def unknown_snapshots(keys: Sequence[str]) -> list[str]:
        known = await sweeping.known_snapshots(pool, keys)
        return [key for key in keys if key not in known]

    async def every_key(keys: Sequence[str]) -> list[str]:
        return list(keys)

    removed += await _sweep_files(blobs, BLOB_PREFIX, grace_seconds, unknown_blobs)
    removed += await _sweep_files(blobs, SNAPSHOT_PREFIX, grace_seconds, unknown_snapshots)
    removed += await _sweep_files(blobs, UPLOAD_PREFIX, grace_seconds, every_key)
    return removed


async def _sweep_files(
    blobs: BlobStore,
    prefix: str,
    grace_seconds: float,
    orphans_of: Callable[[Sequence[str]], Awaitable[list[str]]],
) -> int:
    removed = 0
    batch: list[str] = []

    async def flush() -> int:
        orphans = await orphans_of(batch)
        for key in orphans:
            await blobs.delete(key)
        batch.clear()
        return len(orphans)

    async for entry in blobs.list_keys(prefix):
        if entry.age_seconds > grace_seconds:
            batch.append(entry.key)
        if len(batch) >= BATCH:
            removed += await flush()
    if batch:
        removed += await flush()
    return removed


async def sweep_for_ever(pool: Pool, blobs: BlobStore, *, every_seconds: float, grace_seconds: float) -> None:
    """Sweeps until cancelled; a fault is logged and the next round tries again."""
    while True:
        await asyncio.sleep(every_seconds)
        try:
            removed = await sweep_once(pool, blobs, grace_seconds=grace_seconds)
        except ReadymarkError as error:
            log_event(_logger, "sweep failed", logging.WARNING, reason=error.reason)
        else:
            if removed:
                log_event(_logger, "swept", removed=removed)
