"""Documents as users change them: submit, replace, cancel, retry, delete. The only room with that SQL.

Functions take a connection that is inside a transaction and do one step of it; what is
allowed when is decided by submission.py and catalog.py, on the values returned here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import psycopg.errors
from psycopg.types.json import Jsonb

from services.ingest import lifecycle
from services.ingest.lifecycle import DocumentStatus, JobStatus
from services.ingest.model import CollectionId, DocumentId, JobId, VersionId
from services.ingest.repository.jobs import WAKE_UP_CHANNEL
from services.ingest.repository.states import TENANT, Collection, find_collection
from shared import messages, postgres, sql, telemetry
from shared.errors import OverloadedError
from shared.postgres import Connection, Pool

statements = sql.load(__file__, lifecycle.sql_constants())
Result = TypeVar("Result")

_MAX_TRIES = 5


class DocumentMovedError(Exception):
    """Somebody changed the document while it was being locked; `run_transaction` starts anew."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobTerms:
    """How the job of a new version is driven, and the trace that it belongs to."""

    max_attempts: int
    retry_delay_seconds: float
    lease_seconds: float
    traceparent: str | None = None
    tracestate: str | None = None

    def in_current_trace(self) -> JobTerms:
        return dataclasses.replace(
            self, traceparent=telemetry.current_traceparent(), tracestate=telemetry.current_tracestate()
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A version that is to be made."""

    collection_id: CollectionId
    source_key: str | None
    display_name: str
    metadata: Mapping[str, Any]
    declared_media_type: str | None
    sha256: str
    size_bytes: int
    trace_id: str | None
    terms: JobTerms


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LockedDocument:
    """A document, its newest version and that version's newest job, locked until the transaction ends."""

    document_id: DocumentId
    collection_id: CollectionId
    display_name: str
    metadata: Mapping[str, Any]
    version_id: VersionId
    version_number: int
    status: DocumentStatus
    revision: int
    blob_sha256: str
    declared_media_type: str | None
    job_id: JobId
    job_status: JobStatus


@dataclasses.dataclass(frozen=True, slots=True)
class RememberedRequest:
    digest: str
    document_id: DocumentId
    created: bool


@dataclasses.dataclass(frozen=True, slots=True)
class OrphanedFiles:
    """What nothing in the database names any more, unless somebody else does."""

    snapshot_keys: tuple[str, ...]
    blob_sha256s: tuple[str, ...]


async def run_transaction(pool: Pool, body: Callable[[Connection], Awaitable[Result]]) -> Result:
    """Returns what `body` returns, run in one transaction; anew when it met another change of the document.

    `body` may run several times and must not mind.
    """
    for _ in range(_MAX_TRIES):
        with contextlib.suppress(DocumentMovedError):
            async with postgres.transaction(pool) as connection:
                return await body(connection)
    raise OverloadedError("OVERLOADED", retry_after_seconds=1.0)


async def remember_request(
    connection: Connection, request_id: uuid.UUID, digest: str
) -> RememberedRequest | None:
    """Returns None when the id is new (settle_request has to follow), else what the first call led to."""
    values = {"tenant": TENANT, "request_id": request_id, "digest": digest, "document_id": request_id}
    cursor = await connection.execute(statements.remember_request, values)
    if await cursor.fetchone() is not None:
        return None
    cursor = await connection.execute(statements.find_request, values)
    row = await cursor.fetchone()
    assert row is not None
    return RememberedRequest(row["digest"], DocumentId(str(row["document_id"])), row["created"])


async def settle_request(
    connection: Connection, request_id: uuid.UUID, document_id: DocumentId, *, created: bool
) -> None:
    values = {"tenant": TENANT, "request_id": request_id, "document_id": document_id, "created": created}
    await connection.execute(statements.settle_request, values)


async def ensure_collection(connection: Connection, name: str) -> Collection:
    """Returns the collection, made if it was not there."""
    found = await find_collection(connection, name)
    if found is None:
        await connection.execute(statements.insert_collection, {"tenant": TENANT, "collection": name})
        found = await find_collection(connection, name)
    assert found is not None
    return found


async def hold_source_key(connection: Connection, collection_id: CollectionId, source_key: str) -> None:
    values = {"collection_id": collection_id, "source_key": source_key}
    await connection.execute(statements.hold_source_key, values)


async def hold_blob(connection: Connection, sha256: str, size_bytes: int) -> None:
    await connection.execute(statements.hold_blob, {"sha256": sha256, "size_bytes": size_bytes})


async def find_duplicate(
    connection: Connection, collection_id: CollectionId, *, source_key: str | None, sha256: str
) -> DocumentId | None:
    """Returns the document with this source key; without one, a document with these bytes."""
    statement = statements.find_by_bytes if source_key is None else statements.find_by_source_key
    values = {"collection_id": collection_id, "source_key": source_key, "sha256": sha256}
    cursor = await connection.execute(statement, values)
    row = await cursor.fetchone()
    return None if row is None else DocumentId(str(row["document_id"]))


async def lock_document(connection: Connection, document_id: DocumentId) -> LockedDocument | None:
    """Locks job, version and document, in this order; None when there is no such document.

    Raises DocumentMovedError when another version or job became the newest meanwhile.
    """
    await connection.execute(statements.hold_document, {"document_id": document_id})
    newest = await _find_newest(connection, document_id)
    if newest is None:
        return None
    row: dict[str, Any] = dict(newest)
    for statement in (statements.lock_job, statements.lock_version, statements.lock_document):
        cursor = await connection.execute(statement, newest | {"document_id": document_id})
        found = await cursor.fetchone()
        # Nobody adds a version or a job without the advisory lock. Looked at all the same: to wait
        # for the next lock on an outdated answer would be a deadlock with a delete.
        is_moved = statement is statements.lock_job and await _find_newest(connection, document_id) != newest
        if found is None or is_moved:
            raise DocumentMovedError
        row |= found
    row |= {
        "document_id": document_id,
        "status": DocumentStatus(row["status"]),
        "job_status": JobStatus(row["job_status"]),
    }
    return LockedDocument(**row)


async def _find_newest(connection: Connection, document_id: DocumentId) -> dict[str, Any] | None:
    cursor = await connection.execute(statements.find_newest, {"document_id": document_id})
    return await cursor.fetchone()


async def create_document(connection: Connection, draft: Draft) -> DocumentId:
    """Makes document, first version and job (rule J1)."""
    document_id = DocumentId(str(uuid.uuid4()))
    values = _draft_values(draft) | {"document_id": document_id}
    await _expect_row(connection, statements.create_document, values)
    return document_id


async def add_version(connection: Connection, locked: LockedDocument, draft: Draft) -> None:
    """Makes the next version of `locked` and its job; its older job must have ended."""
    values = _draft_values(draft) | {
        "document_id": locked.document_id,
        "version_number": locked.version_number + 1,
    }
    await _expect_row(connection, statements.add_version, values)


async def end_job(connection: Connection, locked: LockedDocument, reason: str) -> None:
    """Job and version FAILED with `reason`, the running attempt closed, staged vectors gone."""
    values = {
        "job_id": locked.job_id,
        "code": "CANCELLED",
        "reason": reason,
        "error_message": messages.render(reason, {}),
    }
    row = await _expect_row(connection, statements.end_job, values)
    assert (row["ended"], row["failed"]) == (1, 1), (
        "document and job do not stand where the transition starts"
    )


async def reopen_version(connection: Connection, locked: LockedDocument, terms: JobTerms) -> None:
    """Version PENDING, its error cleared, with a new job."""
    values = dataclasses.asdict(terms) | {"version_id": locked.version_id, "channel": WAKE_UP_CHANNEL}
    await _expect_row(connection, statements.reopen_version, values)


async def delete_document(connection: Connection, locked: LockedDocument) -> OrphanedFiles:
    """Removes all rows of the document; returns the files that they named."""
    values = {"document_id": locked.document_id}
    cursor = await connection.execute(statements.list_files, values)
    files = await cursor.fetchall()
    row = await _expect_row(connection, statements.delete_document, values)
    counted = {"collection_id": row["collection_id"], "removed": row["served_chunks"]}
    await connection.execute(statements.count_chunks, counted)
    return OrphanedFiles(
        tuple(file["name"] for file in files if file["kind"] == "snapshot"),
        tuple(file["name"] for file in files if file["kind"] == "blob"),
    )


async def drop_blob(pool: Pool, sha256: str, remove_file: Callable[[], Awaitable[None]]) -> bool:
    """Removes a blob that nothing refers to, row and file; returns False when something does.

    The file goes while the row is still locked: a submission of the same bytes waits in
    `hold_blob` and stores them again.
    """
    with contextlib.suppress(psycopg.errors.ForeignKeyViolation):
        async with postgres.transaction(pool) as connection:
            cursor = await connection.execute(statements.drop_blob, {"sha256": sha256})
            if await cursor.fetchone() is None:
                return False
            await remove_file()
        return True
    return False


async def _expect_row(connection: Connection, statement: bytes, values: Mapping[str, Any]) -> dict[str, Any]:
    cursor = await connection.execute(statement, values)
    row = await cursor.fetchone()
    assert row is not None, "a locked row moved"
    return row


def _draft_values(draft: Draft) -> dict[str, Any]:
    values = {field.name: getattr(draft, field.name) for field in dataclasses.fields(draft)}
    terms = dataclasses.asdict(values.pop("terms"))
    return values | terms | {"metadata": Jsonb(dict(draft.metadata)), "channel": WAKE_UP_CHANNEL}
