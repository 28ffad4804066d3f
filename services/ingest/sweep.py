"""Removes what nothing refers to any more: blobs, snapshot files, broken uploads, old request ids.

Deleting and replacing documents leaves files behind when a process dies between the commit
and the removal; this duty finds them later. It only ever touches what is older than a grace
period, because a submission stores its bytes before its transaction names them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from services.ingest.blobs import BLOB_PREFIX, SNAPSHOT_PREFIX, BlobStore, blob_key
from services.ingest.repository import documents, sweeping
from shared import postgres
from shared.errors import ReadymarkError
from shared.postgres import Pool
from shared.telemetry import log_event

_logger = logging.getLogger(__name__)
BATCH = 500


async def sweep_once(pool: Pool, blobs: BlobStore, *, grace_seconds: float) -> int:
    """Returns how many files and rows were removed."""
    removed = await sweeping.drop_old_rows(pool)
    removed += await blobs.remove_abandoned_uploads(grace_seconds)
    for sha256 in await sweeping.list_unreferenced_blobs(pool, grace_seconds=grace_seconds):
        removed += await _drop_blob(pool, blobs, sha256)

    async def unknown_blobs(keys: Sequence[str]) -> list[str]:
        known = await sweeping.known_blobs(pool, [key.rsplit("/", 1)[-1] for key in keys])
        return [key for key in keys if key.rsplit("/", 1)[-1] not in known]

    async def drop_unknown_blob(key: str) -> bool:
        # A row first: a submission of the same bytes then waits for its lock, as for any other blob.
        sha256 = key.rsplit("/", 1)[-1]
        async with postgres.transaction(pool) as connection:
            await documents.hold_blob(connection, sha256, 1)
        return await _drop_blob(pool, blobs, sha256)

    async def unknown_snapshots(keys: Sequence[str]) -> list[str]:
        known = await sweeping.known_snapshots(pool, keys)
        return [key for key in keys if key not in known]

    async def drop_snapshot(key: str) -> bool:
        await blobs.delete(key)
        return True

    removed += await _sweep_files(blobs, BLOB_PREFIX, grace_seconds, unknown_blobs, drop_unknown_blob)
    return removed + await _sweep_files(
        blobs, SNAPSHOT_PREFIX, grace_seconds, unknown_snapshots, drop_snapshot
    )


async def _drop_blob(pool: Pool, blobs: BlobStore, sha256: str) -> bool:
    return await documents.drop_blob(pool, sha256, lambda: blobs.delete(blob_key(sha256)))


async def _sweep_files(
    blobs: BlobStore,
    prefix: str,
    grace_seconds: float,
    orphans_of: Callable[[Sequence[str]], Awaitable[list[str]]],
    drop: Callable[[str], Awaitable[bool]],
) -> int:
    removed = 0
    batch: list[str] = []

    async def flush() -> int:
        dropped = [await drop(key) for key in await orphans_of(batch)]
        batch.clear()
        return sum(dropped)

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
