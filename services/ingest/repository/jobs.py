"""The job table as workers see it: claim, renew, move, release. The only room with that SQL.

Functions take a connection or pool and return values of this file. A worker's write that
hits no row raises LeaseLostError: the worker has lost the job and must stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import AsyncIterator, Sequence
from typing import Any

from psycopg.types.json import Jsonb

from services.ingest import lifecycle
from services.ingest.lifecycle import DocumentStatus
from services.ingest.model import CollectionId, DocumentId, JobId, VersionId
from shared import messages, postgres, sql
from shared.errors import LeaseLostError
from shared.postgres import Connection, Pool

statements = sql.load(__file__, lifecycle.sql_constants())

WAKE_UP_CHANNEL = "readymark_jobs"
# One sweep settles at most so many: the claim that does it stays short.
MAX_CONVERGED = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to a job, and what the stages need to know of its document."""

    job_id: JobId
    lease_epoch: int
    attempt: int
    max_attempts: int
    lease_seconds: float
    retry_delay_seconds: float
    traceparent: str | None
    tracestate: str | None
    version_id: VersionId
    version_number: int
    document_id: DocumentId
    collection_id: CollectionId
    blob_sha256: str
    size_bytes: int
    declared_media_type: str | None
    display_name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ClaimResult:
    """Either jobs were settled (then none are claimed, rule J12) or `leases` were claimed."""

    converged: int
    leases: tuple[Lease, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Renewal:
    job_id: JobId
    lease_epoch: int
    is_renewed: bool
    is_held: bool
    """False: the lease is lost. True without `is_renewed`: the worker's own write holds the row."""


async def claim_ingestion_jobs(
    pool: Pool, *, worker: str, lease_seconds: float, max_jobs: int
) -> ClaimResult:
    """Takes up to `max_jobs` due or abandoned jobs for `worker`; settles exhausted ones first."""
    async with postgres.connect(pool) as connection:
        converged = await _converge_expired(connection)
        if converged:
            return ClaimResult(converged, ())
        cursor = await connection.execute(
            statements.claim_ingestion_jobs,
            {"worker": worker, "lease_seconds": lease_seconds, "max_jobs": max_jobs},
        )
        return ClaimResult(0, tuple(_lease(row) for row in await cursor.fetchall()))


async def _converge_expired(connection: Connection) -> int:
    cursor = await connection.execute(
        statements.converge_expired,
        {
            "max_jobs": MAX_CONVERGED,
            "code": "LEASE_EXPIRED",
            "reason": "LEASE_EXPIRED",
            "error_message": messages.render("LEASE_EXPIRED", {}),
        },
    )
    return len(await cursor.fetchall())


async def renew_leases(connection: Connection, leases: Sequence[tuple[JobId, int]]) -> list[Renewal]:
    """Renews all `leases` (job id, epoch) at once; says of each whether it is still held."""
    cursor = await connection.execute(
        statements.renew_leases,
        {"job_ids": [job for job, _ in leases], "lease_epochs": [epoch for _, epoch in leases]},
    )
    return [
        Renewal(JobId(row["job_id"]), row["lease_epoch"], row["is_renewed"], row["is_held"])
        for row in await cursor.fetchall()
    ]


@contextlib.asynccontextmanager
async def fenced(pool: Pool, lease: Lease) -> AsyncIterator[Connection]:
    """Lends a transaction that commits only while `lease` is held; raises LeaseLostError otherwise.

    The job row stays locked until commit, so nobody can claim the job in between.
    """
    async with postgres.transaction(pool) as connection:
        await hold_lease(connection, lease)
        yield connection


async def hold_lease(connection: Connection, lease: Lease) -> None:
    cursor = await connection.execute(statements.hold_lease, _identity(lease))
    if await cursor.fetchone() is None:
        raise LeaseLostError("LEASE_LOST")


async def begin_stage(
    pool: Pool, lease: Lease, stage: DocumentStatus, *, trace_id: str | None
) -> datetime.datetime:
    """Commits that `stage` begins and returns when, by the database's clock.

    The caller starts the work after this returns (rule D2).
    """
    transition = lifecycle.STAGE_TRANSITIONS[stage]
    values = _identity(lease) | {
        "document_from": [str(status) for status in transition.document_from],
        "document_to": str(transition.document_to),
        "job_from": [str(status) for status in transition.job_from],
        "trace_id": trace_id,
    }
    row = await _move(pool, statements.begin_stage, values)
    began_at: datetime.datetime = row["written_at"]
    return began_at


async def report_progress(pool: Pool, lease: Lease, *, done: int, total: int, unit: str) -> None:
    async with postgres.connect(pool) as connection:
        values = _identity(lease) | {"done": done, "total": total, "unit": unit}
        cursor = await connection.execute(statements.report_progress, values)
        if await cursor.fetchone() is None:
            raise LeaseLostError("LEASE_LOST")


async def retry_later(
    pool: Pool, lease: Lease, *, delay_seconds: float, error_message: str, failure: dict[str, Any]
) -> None:
    """Job and document PENDING again, due after `delay_seconds` (rule J8)."""
    values = _identity(lease) | {
        "delay_seconds": delay_seconds,
        "error_message": error_message,
        "failure": Jsonb(failure),
    }
    await _move(pool, statements.retry_later, values)


async def give_up(pool: Pool, lease: Lease, *, error_message: str, failure: dict[str, Any]) -> None:
    """Job and document FAILED for good (rule J10)."""
    values = _identity(lease) | {"error_message": error_message, "failure": Jsonb(failure)}
    await _move(pool, statements.give_up, values)


async def hand_back(pool: Pool, lease: Lease) -> None:
    """Job and document PENDING, due now, the attempt not counted (rule J15)."""
    await _move(pool, statements.hand_back, _identity(lease))


async def _move(pool: Pool, statement: bytes, values: dict[str, Any]) -> dict[str, Any]:
    async with postgres.connect(pool) as connection:
        cursor = await connection.execute(statement, values)
        row = await cursor.fetchone()
        assert row is not None
        if row["moved"]:
            return row
        cursor = await connection.execute(statements.is_held, values)
        assert await cursor.fetchone() is None, "the document does not stand where the transition starts"
    raise LeaseLostError("LEASE_LOST")


def _identity(lease: Lease) -> dict[str, Any]:
    return {"job_id": lease.job_id, "lease_epoch": lease.lease_epoch}


def _lease(row: dict[str, Any]) -> Lease:
    return Lease(
        job_id=JobId(row["job_id"]),
        lease_epoch=row["lease_epoch"],
        attempt=row["attempts"],
        max_attempts=row["max_attempts"],
        lease_seconds=row["lease_seconds"],
        retry_delay_seconds=row["retry_delay_seconds"],
        traceparent=row["traceparent"],
        tracestate=row["tracestate"],
        version_id=VersionId(row["version_id"]),
        version_number=row["number"],
        document_id=DocumentId(str(row["document_id"])),
        collection_id=CollectionId(row["collection_id"]),
        blob_sha256=row["blob_sha256"],
        size_bytes=row["size_bytes"],
        declared_media_type=row["declared_media_type"],
        display_name=row["display_name"],
    )
