"""Documents in any state, put straight into the tables, and what tests read back. No asserts here.

The submission code is not used on purpose: a fault in it must not hide one in the worker.
"""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from typing import Any

from services.ingest.repository import jobs
from services.ingest.repository.jobs import Lease
from shared.postgres import Pool


@dataclasses.dataclass(frozen=True, slots=True)
class Submitted:
    document_id: str
    version_id: int
    job_id: int
    collection_id: int


async def submit(
    pool: Pool,
    *,
    collection: str = "default",
    content: bytes = b"content",
    display_name: str = "a.txt",
    max_attempts: int = 3,
    retry_delay_seconds: float = 10.0,
    lease_seconds: float = 60.0,
    available_in_seconds: float = 0.0,
    document_id: str | None = None,
) -> Submitted:
    """Inserts a document, or a new version of `document_id`, with a due job."""
    sha256 = hashlib.sha256(content).hexdigest()
    async with pool.connection() as connection, connection.transaction():

        async def one(statement: str, **values: Any) -> dict[str, Any]:
            cursor = await connection.execute(statement, values)
            row = await cursor.fetchone()
            assert row is not None
            return row

        where = await one(
            "INSERT INTO collections (tenant_id, name) SELECT tenant_id, %(name)s FROM tenants WHERE name = 'default' "
            "ON CONFLICT (tenant_id, name) DO UPDATE SET name = excluded.name RETURNING collection_id, tenant_id",
            name=collection,
        )
        await connection.execute(
            "INSERT INTO blobs (sha256, size_bytes) VALUES (%s, %s) ON CONFLICT DO NOTHING",
            (sha256, len(content)),
        )
        if document_id is None:
            document_id = str(uuid.uuid4())
            await connection.execute(
                "INSERT INTO documents (document_id, tenant_id, collection_id, display_name) "
                "VALUES (%(id)s, %(tenant_id)s, %(collection_id)s, %(name)s)",
                {"id": document_id, "name": display_name, **where},
            )
        version = await one(
            "INSERT INTO document_versions (document_id, collection_id, number, status, blob_sha256, size_bytes) "
            "SELECT %(id)s, %(collection_id)s, coalesce(max(number), 0) + 1, 'PENDING', %(sha256)s, %(size)s "
            "FROM document_versions WHERE document_id = %(id)s RETURNING version_id",
            id=document_id,
            sha256=sha256,
            size=len(content),
            **where,
        )
        await connection.execute(
            "UPDATE documents SET newest_version_id = %s WHERE document_id = %s",
            (version["version_id"], document_id),
        )
        job = await one(
            "INSERT INTO ingestion_jobs (version_id, tenant_id, status, max_attempts, retry_delay_seconds, "
            "lease_seconds, available_at) VALUES (%(version_id)s, %(tenant_id)s, 'PENDING', %(max_attempts)s, "
            "%(delay)s, %(lease)s, now() + make_interval(secs => %(available)s)) RETURNING job_id",
            version_id=version["version_id"],
            tenant_id=where["tenant_id"],
            max_attempts=max_attempts,
            delay=retry_delay_seconds,
            lease=lease_seconds,
            available=available_in_seconds,
        )
    return Submitted(document_id, version["version_id"], job["job_id"], where["collection_id"])


async def claim(pool: Pool, *, worker: str = "worker-1", lease_seconds: float = 60.0) -> Lease:
    """Claims the one due job; fails when there is none or more."""
    result = await jobs.claim_ingestion_jobs(pool, worker=worker, lease_seconds=lease_seconds, max_jobs=10)
    (lease,) = result.leases
    return lease


async def expire_lease(pool: Pool, job_id: int) -> None:
    """Ages the row instead of waiting: its lease ran out a second ago."""
    await execute(
        pool,
        "UPDATE ingestion_jobs SET locked_at = now() - make_interval(secs => lease_seconds + 1) WHERE job_id = %s",
        job_id,
    )


async def execute(pool: Pool, statement: str, *values: Any) -> list[dict[str, Any]]:
    async with pool.connection() as connection:
        cursor = await connection.execute(statement, values)  # type: ignore[arg-type]
        return await cursor.fetchall() if cursor.description else []


async def job(pool: Pool, job_id: int) -> dict[str, Any]:
    (row,) = await execute(pool, "SELECT * FROM ingestion_jobs WHERE job_id = %s", job_id)
    return row


async def version(pool: Pool, version_id: int) -> dict[str, Any]:
    (row,) = await execute(pool, "SELECT * FROM document_versions WHERE version_id = %s", version_id)
    return row


async def attempts(pool: Pool, job_id: int) -> list[dict[str, Any]]:
    return await execute(
        pool, "SELECT * FROM ingestion_attempts WHERE job_id = %s ORDER BY lease_epoch", job_id
    )


async def pair(pool: Pool, submitted: Submitted) -> tuple[str, str]:
    """Returns the statuses of document and job as one snapshot shows them."""
    (row,) = await execute(
        pool,
        "SELECT v.status AS document, j.status AS job FROM document_versions v JOIN ingestion_jobs j USING (version_id) "
        "WHERE j.job_id = %s",
        submitted.job_id,
    )
    return row["document"], row["job"]


async def set_status(pool: Pool, submitted: Submitted, document: str, job_status: str) -> None:
    """Forces a pair of statuses, with what the table's checks ask for beside them."""
    async with pool.connection() as connection, connection.transaction():
        failure = (
            '{"code": "INTERNAL", "reason": "INTERNAL", "parameters": {}}' if document == "FAILED" else None
        )
        await connection.execute(
            "UPDATE document_versions SET status = %(status)s, error_message = %(message)s, failure = %(failure)s, "
            "ready_at = CASE WHEN %(status)s = 'READY' THEN now() END, "
            "chunk_count = CASE WHEN %(status)s = 'READY' THEN greatest(chunk_count, 1) ELSE chunk_count END "
            "WHERE version_id = %(version_id)s",
            {
                "status": document,
                "message": "failed" if failure else None,
                "failure": failure,
                "version_id": submitted.version_id,
            },
        )
        await connection.execute(
            "UPDATE ingestion_jobs SET status = %(status)s, "
            "locked_at = CASE WHEN %(status)s = 'RUNNING' THEN coalesce(locked_at, now()) END, "
            "locked_by = CASE WHEN %(status)s = 'RUNNING' THEN coalesce(locked_by, 'someone') END, "
            "finished_at = CASE WHEN %(status)s IN ('SUCCEEDED', 'FAILED') THEN now() END WHERE job_id = %(job_id)s",
            {"status": job_status, "job_id": submitted.job_id},
        )
