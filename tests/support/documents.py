"""Documents in every state, made through the real API and the real transitions of a worker."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from readymark.ingest.v1 import ingest_service_pb2 as pb
from readymark.ingest.v1 import ingest_service_pb2_grpc as pb_grpc

from services.ingest.blobs import BlobStore, snapshot_key
from services.ingest.lifecycle import STAGES, DocumentStatus
from services.ingest.model import Asset, BlockKind, Chunk, Locator
from services.ingest.repository import jobs, publication
from services.ingest.repository.jobs import Lease
from services.ingest.repository.publication import IndexedChunk, SnapshotRecord, SnapshotRow
from shared import postgres
from shared.postgres import Pool

DIMENSION = 4
FINGERPRINT = "f" * 64


def header(**fields: Any) -> pb.DocumentHeader:
    values = {"parent": "collections/tests", "display_name": "note.txt"}
    return pb.DocumentHeader(**(values | fields))


def upload_requests(
    content: bytes | Iterable[bytes], *, trailer: pb.UploadTrailer | None = None, **fields: Any
) -> AsyncIterator[pb.UploadDocumentRequest]:
    """Yields header, data and a trailer that matches, unless another one is given."""
    pieces = [content] if isinstance(content, bytes) else list(content)

    async def requests() -> AsyncIterator[pb.UploadDocumentRequest]:
        yield pb.UploadDocumentRequest(header=header(**fields))
        for piece in pieces:
            yield pb.UploadDocumentRequest(data=piece)
        data = b"".join(pieces)
        matching = pb.UploadTrailer(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
        yield pb.UploadDocumentRequest(trailer=trailer or matching)

    return requests()


async def upload(
    stub: pb_grpc.IngestServiceAsyncStub, content: bytes = b"some text", **fields: Any
) -> pb.UploadDocumentResponse:
    return await stub.UploadDocument(upload_requests(content, **fields))


async def claim(pool: Pool, *, lease_seconds: float = 60.0, worker: str = "tester") -> Lease:
    """Claims the one job that is due."""
    result = await jobs.claim_ingestion_jobs(pool, worker=worker, lease_seconds=lease_seconds, max_jobs=1)
    (lease,) = result.leases
    return lease


async def advance(pool: Pool, lease: Lease, to: DocumentStatus) -> None:
    """Goes through the stages up to `to`."""
    for stage in STAGES[: STAGES.index(to) + 1]:
        await jobs.begin_stage(pool, lease, stage, trace_id=None)


async def fail(pool: Pool, lease: Lease, reason: str = "NO_TEXT") -> None:
    failure = {
        "code": "INVALID_DOCUMENT",
        "reason": reason,
        "parameters": {},
        "attempt": lease.attempt,
        "max_attempts": lease.max_attempts,
        "retryable": False,
        "next_attempt_at": None,
    }
    await jobs.give_up(pool, lease, error_message=reason, failure=failure)


async def retry_later(pool: Pool, lease: Lease, *, delay_seconds: float = 3600) -> None:
    """Ends the attempt with a failure that will be tried again."""
    failure = {
        "code": "UNAVAILABLE",
        "reason": "EMBEDDER_UNAVAILABLE",
        "parameters": {},
        "attempt": lease.attempt,
        "max_attempts": lease.max_attempts,
        "retryable": True,
        "next_attempt_at": None,
    }
    await jobs.retry_later(pool, lease, delay_seconds=delay_seconds, error_message="later", failure=failure)


def make_chunk(lease: Lease, ordinal: int) -> Chunk:
    content = f"chunk {ordinal} of version {lease.version_number}"
    return Chunk(
        chunk_id=str(publication.asset_id(lease.document_id, content)),
        ordinal=ordinal,
        content=content,
        prefix="",
        kind=BlockKind.PARAGRAPH,
        locator=Locator(0, len(content)),
        token_count=5,
    )


async def store_nothing(asset: Asset) -> None:
    """For documents without assets."""
    raise AssertionError(f"unexpected asset {asset.sha256}")


async def publish(
    pool: Pool, blobs: BlobStore, lease: Lease, *, chunk_count: int = 3, snapshot: bytes = b"s"
) -> None:
    """Takes a claimed job to READY, with a snapshot file, vectors and chunks."""
    await advance(pool, lease, DocumentStatus.CHUNKING)
    chunks = [make_chunk(lease, ordinal) for ordinal in range(chunk_count)]
    key = snapshot_key(lease.job_id, lease.lease_epoch)
    await blobs.put_bytes(key, snapshot)
    row = SnapshotRow(
        file_key=key,
        file_sha256=hashlib.sha256(snapshot).hexdigest(),
        source_sha256=lease.blob_sha256,
        parser_fingerprint="parser",
        chunker_fingerprint="chunker",
    )
    record = SnapshotRecord(
        row=row,
        size_bytes=len(snapshot),
        chunk_count=chunk_count,
        token_count=5 * chunk_count,
        media_type="text/plain",
        title=None,
        warnings=(),
        assets=(),
    )
    await publication.save_snapshot(pool, lease, record, store_nothing)
    space = await publication.bind_vector_space(
        pool, lease, fingerprint=FINGERPRINT, model_id="test", dimension=DIMENSION
    )
    await jobs.begin_stage(pool, lease, DocumentStatus.EMBEDDING, trace_id=None)
    texts = [(chunk.ordinal, hashlib.sha256(chunk.embed_text.encode()).digest()) for chunk in chunks]
    vectors = np.tile(np.array([1, 0, 0, 0], np.float32), (chunk_count, 1))
    await publication.stage_vectors(pool, lease, space, texts, vectors)
    await jobs.begin_stage(pool, lease, DocumentStatus.INDEXING, trace_id=None)
    indexed = [
        IndexedChunk(chunk, text_sha256, {1: 1.0})
        for chunk, (_, text_sha256) in zip(chunks, texts, strict=True)
    ]
    await publication.publish_version(pool, lease, space, [indexed], chunk_count=chunk_count)


def files(folder: Path) -> list[str]:
    """Returns the paths of all files under `folder`, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


async def count_rows(pool: Pool) -> dict[str, int]:
    """Returns how many rows each table holds that a document leaves traces in."""
    async with postgres.connect(pool) as connection:
        cursor = await connection.execute(
            "SELECT c.relname AS name FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = 'readymark' AND c.relkind = 'r' ORDER BY 1"
        )
        names = [row["name"] for row in await cursor.fetchall()]
        counts = {}
        for name in names:
            cursor = await connection.execute(f"SELECT count(*) AS count FROM readymark.{name}".encode())
            row = await cursor.fetchone()
            assert row is not None
            counts[name] = row["count"]
    return counts


async def pairs(pool: Pool) -> list[tuple[str, str]]:
    """Returns status of version and of its newest job, for every version."""
    async with postgres.connect(pool) as connection:
        cursor = await connection.execute(
            b"SELECT v.status AS version_status, (SELECT j.status FROM ingestion_jobs j "
            b"WHERE j.version_id = v.version_id ORDER BY j.job_id DESC LIMIT 1) AS job_status "
            b"FROM document_versions v ORDER BY v.version_id"
        )
        return [(row["version_status"], row["job_status"]) for row in await cursor.fetchall()]
