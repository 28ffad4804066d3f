"""Finds rows and files that nothing refers to any more. Used by services/ingest/sweep.py only."""

from __future__ import annotations

from collections.abc import Sequence

from shared import postgres, sql
from shared.postgres import Pool

statements = sql.load(__file__)
MAX_ROWS = 1000


async def list_unreferenced_blobs(pool: Pool, *, grace_seconds: float) -> list[str]:
    """Returns hashes of blobs that no version and no asset names, none of them young."""
    async with postgres.connect(pool) as connection:
        values = {"grace_seconds": grace_seconds, "max_rows": MAX_ROWS}
        cursor = await connection.execute(statements.list_unreferenced_blobs, values)
        return [str(row["sha256"]) for row in await cursor.fetchall()]


async def known_blobs(pool: Pool, sha256s: Sequence[str]) -> set[str]:
    async with postgres.connect(pool) as connection:
        cursor = await connection.execute(statements.list_known_blobs, {"sha256s": list(sha256s)})
        return {str(row["sha256"]) for row in await cursor.fetchall()}


async def known_snapshots(pool: Pool, file_keys: Sequence[str]) -> set[str]:
    async with postgres.connect(pool) as connection:
        cursor = await connection.execute(statements.list_known_snapshots, {"file_keys": list(file_keys)})
        return {str(row["file_key"]) for row in await cursor.fetchall()}


async def drop_old_rows(pool: Pool) -> int:
    """Removes request ids and tombstones older than a day; returns how many."""
    async with postgres.connect(pool) as connection:
        dropped = 0
        for statement in (statements.drop_old_request_ids, statements.drop_old_tombstones):
            cursor = await connection.execute(statement, {"max_rows": MAX_ROWS})
            dropped += cursor.rowcount
        return dropped
