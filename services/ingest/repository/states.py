"""What users see of documents: states, lists, attempts, queue, changes. Reads only.

Owns the values that it returns; wire.py turns them into messages. Writes are in
documents.py (users) and jobs.py, publication.py (workers).
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from services.ingest.lifecycle import DocumentStatus, JobStatus
from services.ingest.model import CollectionId, DocumentId, VersionId
from shared import sql
from shared.postgres import Connection

statements = sql.load(__file__)

# Tenants are in the schema; until calls carry one, everything belongs to this.
TENANT = "default"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DocumentState:
    """A document with its newest version and that version's newest job, as of one moment."""

    document_id: DocumentId
    collection_id: CollectionId
    collection: str
    source_key: str | None
    display_name: str
    metadata: Mapping[str, Any]
    created_at: datetime.datetime
    version_id: VersionId
    version_number: int
    status: DocumentStatus
    blob_sha256: str
    size_bytes: int
    media_type: str
    title: str
    parser_fingerprint: str
    chunker_fingerprint: str
    model_fingerprint: str
    chunk_count: int
    token_count: int
    warnings: Sequence[Mapping[str, Any]]
    progress_done: int
    progress_total: int
    progress_unit: str
    failure: Mapping[str, Any] | None
    trace_id: str
    updated_at: datetime.datetime
    ready_at: datetime.datetime | None
    revision: int
    served_version_number: int
    job_status: JobStatus
    attempts: int
    max_attempts: int
    available_at: datetime.datetime

    @property
    def name(self) -> str:
        return f"collections/{self.collection}/documents/{self.document_id}"

    @property
    def etag(self) -> str:
        return f"{self.version_id}.{self.revision}"


@dataclasses.dataclass(frozen=True, slots=True)
class Collection:
    collection_id: CollectionId
    fingerprint: str | None
    """Of the model that its vectors come from; None before the first one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    job_id: int
    lease_epoch: int
    number: int
    version_number: int
    worker: str
    started_at: datetime.datetime
    ended_at: datetime.datetime | None
    last_stage: str
    outcome: str
    stages: Sequence[Mapping[str, Any]]
    failure: Mapping[str, Any] | None
    trace_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class SnapshotFile:
    version_number: int
    file_key: str
    file_sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class AssetFile:
    sha256: str
    media_type: str
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    documents_by_status: Mapping[str, int]
    jobs_by_status: Mapping[str, int]
    oldest_pending_seconds: float | None
    ready_last_minute: int
    live_workers: int
    served_chunks: int


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """Something happened to a document; `version_id` is None when it was deleted."""

    document_id: DocumentId
    collection_id: CollectionId
    version_id: VersionId | None
    revision: int | None


async def load_states(
    connection: Connection, document_ids: Sequence[DocumentId]
) -> dict[DocumentId, DocumentState]:
    """Returns the documents that exist, by id."""
    cursor = await connection.execute(statements.load_states, {"document_ids": list(document_ids)})
    states = [_state(row) for row in await cursor.fetchall()]
    return {state.document_id: state for state in states}


async def find_state(connection: Connection, document_id: DocumentId) -> DocumentState | None:
    return (await load_states(connection, [document_id])).get(document_id)


async def find_collection(connection: Connection, name: str) -> Collection | None:
    cursor = await connection.execute(statements.find_collection, {"tenant": TENANT, "collection": name})
    row = await cursor.fetchone()
    return None if row is None else Collection(CollectionId(row["collection_id"]), row["fingerprint"])


async def list_document_ids(
    connection: Connection,
    *,
    collection_id: CollectionId | None,
    status: DocumentStatus | None,
    before: tuple[datetime.datetime, DocumentId] | None,
    max_documents: int,
) -> list[tuple[datetime.datetime, DocumentId]]:
    """Returns keys of the documents older than `before`, newest first."""
    created_at, document_id = before or (None, None)
    values = {
        "collection_id": collection_id,
        "status": None if status is None else str(status),
        "before_created_at": created_at,
        "before_document_id": document_id,
        "max_documents": max_documents,
    }
    cursor = await connection.execute(statements.list_document_ids, values)
    return [(row["created_at"], DocumentId(str(row["document_id"]))) for row in await cursor.fetchall()]


async def list_attempts(
    connection: Connection, document_id: DocumentId, *, before: tuple[int, int] | None, max_attempts: int
) -> list[Attempt]:
    """Returns attempts older than `before` (job id, lease epoch), newest first."""
    job_id, lease_epoch = before or (None, None)
    values = {
        "document_id": document_id,
        "before_job_id": job_id,
        "before_lease_epoch": lease_epoch,
        "max_attempts": max_attempts,
    }
    cursor = await connection.execute(statements.list_attempts, values)
    return [Attempt(**row) for row in await cursor.fetchall()]


async def find_snapshot(
    connection: Connection, document_id: DocumentId, version_number: int
) -> SnapshotFile | None:
    """Returns the snapshot of that version; number 0 means the newest version that has one."""
    values = {"document_id": document_id, "version_number": version_number}
    cursor = await connection.execute(statements.find_snapshot, values)
    row = await cursor.fetchone()
    return None if row is None else SnapshotFile(**row)


async def find_asset(connection: Connection, document_id: DocumentId, asset_id: str) -> AssetFile | None:
    values = {"document_id": document_id, "asset_id": asset_id}
    cursor = await connection.execute(statements.find_asset, values)
    row = await cursor.fetchone()
    return None if row is None else AssetFile(**row)


async def measure_queue(connection: Connection, collection_id: CollectionId | None) -> QueueStats:
    values = {"collection_id": collection_id}
    counts = []
    for statement in (statements.count_documents, statements.count_jobs):
        cursor = await connection.execute(statement, values)
        counts.append({row["status"]: row["count"] for row in await cursor.fetchall()})
    cursor = await connection.execute(statements.measure_queue, values)
    row = await cursor.fetchone()
    assert row is not None
    return QueueStats(documents_by_status=counts[0], jobs_by_status=counts[1], **row)


async def get_position(connection: Connection) -> int:
    """Returns where a reader of changes starts that has just seen everything there is."""
    cursor = await connection.execute(statements.get_position)
    row = await cursor.fetchone()
    assert row is not None
    return int(row["position"])


async def list_changes(connection: Connection, position: int) -> tuple[int, list[Change]]:
    """Returns the position to read from next time, and what changed since `position`."""
    cursor = await connection.execute(statements.list_changes, {"position": str(position)})
    rows = await cursor.fetchall()
    changes = [
        Change(
            DocumentId(str(row["document_id"])),
            CollectionId(row["collection_id"]),
            row["version_id"],
            row["revision"],
        )
        for row in rows
        if row["document_id"] is not None
    ]
    return int(rows[0]["position"]), changes


def _state(row: dict[str, Any]) -> DocumentState:
    return DocumentState(
        **row
        | {
            "document_id": DocumentId(str(row["document_id"])),
            "status": DocumentStatus(row["status"]),
            "job_status": JobStatus(row["job_status"]),
        }
    )
