"""Snapshot rows, staged vectors, and the one transaction that makes a version searchable.

Nothing written here before `publish_version` commits can be seen by search: staged vectors
lie in a table that search may not read, and the chunk table refuses rows of a version that
is not READY at commit.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pgvector import HalfVector, SparseVector
from psycopg import sql as composing
from psycopg.types.json import Jsonb

from services.ingest import lifecycle
from services.ingest.model import Asset, Chunk, VersionId, Warning, to_json
from services.ingest.repository import jobs
from services.ingest.repository.jobs import Lease
from shared import postgres, sql
from shared.errors import LeaseLostError, ModelMismatchError
from shared.postgres import Connection, Pool

statements = sql.load(__file__, lifecycle.sql_constants())

# Number space of shared/terms.py.
TERM_SPACE = 1_000_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRow:
    file_key: str
    file_sha256: str
    source_sha256: str
    parser_fingerprint: str
    chunker_fingerprint: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRecord:
    """What the row of a snapshot and its version tell about the file."""

    row: SnapshotRow
    size_bytes: int
    chunk_count: int
    token_count: int
    media_type: str
    title: str | None
    warnings: tuple[Warning, ...]
    assets: tuple[Asset, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class VectorSpace:
    vector_space_id: int
    fingerprint: str
    dimension: int
    chunk_table: str


@dataclasses.dataclass(frozen=True, slots=True)
class IndexedChunk:
    """A chunk with its hash and keyword weights (term id -> BM25 document weight)."""

    chunk: Chunk
    text_sha256: bytes
    weights: dict[int, float]


async def find_snapshot(pool: Pool, version_id: VersionId) -> SnapshotRow | None:
    async with postgres.connect(pool) as connection:
        cursor = await connection.execute(statements.find_snapshot, {"version_id": version_id})
        row = await cursor.fetchone()
        return None if row is None else SnapshotRow(**row)


async def save_snapshot(
    pool: Pool, lease: Lease, record: SnapshotRecord, store_asset: Callable[[Asset], Awaitable[None]]
) -> str | None:
    """Records the snapshot file and the assets, fenced; returns the key of the file it replaces.

    `store_asset` stores the bytes of one asset. It is called while the asset's blob row is locked:
    the removal of another document with the same asset cannot take the file away in between.
    """
    async with jobs.fenced(pool, lease) as connection:
        for asset in record.assets:
            await _save_asset(connection, lease, asset, store_asset)
        values = {"version_id": lease.version_id, "sha256s": [asset.sha256 for asset in record.assets]}
        await connection.execute(statements.drop_other_assets, values)
        cursor = await connection.execute(
            statements.save_snapshot,
            dataclasses.asdict(record.row)
            | {
                "version_id": lease.version_id,
                "lease_epoch": lease.lease_epoch,
                "size_bytes": record.size_bytes,
                "chunk_count": record.chunk_count,
                "token_count": record.token_count,
                "media_type": record.media_type,
                "title": record.title,
                "warnings": Jsonb(to_json(record.warnings)),
            },
        )
        replaced = await cursor.fetchone()
        return None if replaced is None else str(replaced["file_key"])


async def _save_asset(
    connection: Connection, lease: Lease, asset: Asset, store_asset: Callable[[Asset], Awaitable[None]]
) -> None:
    blob = {"sha256": asset.sha256, "size_bytes": asset.size_bytes}
    await connection.execute(statements.save_blob, blob)
    await store_asset(asset)
    values = dataclasses.asdict(asset) | {
        "version_id": lease.version_id,
        "asset_id": asset_id(str(lease.document_id), asset.sha256),
    }
    await connection.execute(statements.save_asset, values)


def asset_id(document_id: str, sha256: str) -> uuid.UUID:
    """Returns the stable id of an asset: the same bytes in the same document keep it."""
    return uuid.uuid5(uuid.UUID(document_id), sha256)


async def bind_vector_space(
    pool: Pool, lease: Lease, *, fingerprint: str, model_id: str, dimension: int
) -> VectorSpace:
    """Returns the vector space of the collection, bound to this model if it has none yet.

    Raises ModelMismatchError when the collection's vectors come from another model.
    """
    async with jobs.fenced(pool, lease) as connection:
        model = {"fingerprint": fingerprint, "model_id": model_id, "dimension": dimension}
        cursor = await connection.execute(statements.create_vector_space, model)
        made = await cursor.fetchone()
        assert made is not None
        collection = {"collection_id": lease.collection_id}
        await connection.execute(statements.bind_collection, made | collection)
        cursor = await connection.execute(statements.get_vector_space, collection)
        row = await cursor.fetchone()
        assert row is not None
        space = VectorSpace(**row)
    if space.fingerprint != fingerprint:
        raise ModelMismatchError(
            "EMBEDDING_MODEL_MISMATCH", expected=space.fingerprint[:12], actual=fingerprint[:12]
        )
    return space


async def adopt_served_vectors(
    pool: Pool, lease: Lease, space: VectorSpace, texts: Sequence[tuple[int, bytes]]
) -> None:
    """Stages vectors of the served version for chunks (ordinal, text hash) with the same text."""
    async with jobs.fenced(pool, lease) as connection:
        await connection.execute(
            _for_table(statements.adopt_served_vectors, space),
            {
                "version_id": lease.version_id,
                "collection_id": lease.collection_id,
                "document_id": lease.document_id,
                "fingerprint": space.fingerprint,
                "ordinals": [ordinal for ordinal, _ in texts],
                "text_sha256s": [text_sha256 for _, text_sha256 in texts],
            },
        )


async def list_staged(pool: Pool, lease: Lease, space: VectorSpace) -> dict[int, bytes]:
    """Returns ordinal -> text hash of the vectors that are there already."""
    async with postgres.connect(pool) as connection:
        values = {"version_id": lease.version_id, "fingerprint": space.fingerprint}
        cursor = await connection.execute(statements.list_staged, values)
        return {row["ordinal"]: bytes(row["text_sha256"]) for row in await cursor.fetchall()}


async def stage_vectors(
    pool: Pool,
    lease: Lease,
    space: VectorSpace,
    texts: Sequence[tuple[int, bytes]],
    vectors: NDArray[np.float32],
) -> None:
    """Stores `vectors` [n, dimension] for `texts` (ordinal, text hash), fenced."""
    assert vectors.shape == (len(texts), space.dimension)
    async with jobs.fenced(pool, lease) as connection, connection.cursor() as cursor:
        await cursor.executemany(
            statements.stage_vector,
            [
                {
                    "version_id": lease.version_id,
                    "ordinal": ordinal,
                    "text_sha256": text_sha256,
                    "fingerprint": space.fingerprint,
                    "embedding": HalfVector(vector),
                }
                for (ordinal, text_sha256), vector in zip(texts, vectors, strict=True)
            ],
        )


async def publish_version(
    pool: Pool,
    lease: Lease,
    space: VectorSpace,
    batches: Iterable[Sequence[IndexedChunk]],
    *,
    chunk_count: int,
) -> list[VersionId]:
    """Makes the version searchable, READY and its job SUCCEEDED: all of it or nothing.

    Returns the ids of the older versions that it replaced. Raises LeaseLostError when the
    epoch is not held any more. The order survives every crash, since there is one commit:
    1. the chunks go in, invisible to others;
    2. the job is finished, which checks and locks the epoch: from here on nobody can take it;
    3. the version is made READY, which checks that it was INDEXING with this many chunks;
    4. the document serves it, and older versions go, with their chunks;
    5. counters last, since that row is shared by the whole collection.
    """
    async with postgres.transaction(pool) as connection:
        inserted = 0
        for batch in batches:
            inserted += await _insert_chunks(connection, lease, space, batch)
        if inserted != chunk_count:
            # Staged vectors go when a document is cancelled or deleted: then the lease is lost too.
            await jobs.hold_lease(connection, lease)
        # Holds here: every chunk has a vector of its own text by this model.
        assert inserted == chunk_count, f"{inserted} of {chunk_count} chunks have a vector"
        if not await _hits_a_row(connection, statements.finish_job, _lease_values(lease)):
            raise LeaseLostError("LEASE_LOST")
        version = {
            "version_id": lease.version_id,
            "document_id": lease.document_id,
            "version_number": lease.version_number,
            "fingerprint": space.fingerprint,
            "chunk_count": chunk_count,
        }
        # The epoch is held and locked now, so only a bug can leave these two without a row.
        assert await _hits_a_row(connection, statements.make_ready, version)
        assert await _hits_a_row(connection, statements.serve_version, version)
        cursor = await connection.execute(statements.drop_older_versions, version)
        replaced = await cursor.fetchall()
        await connection.execute(statements.clear_staging, version)
        await connection.execute(statements.close_attempt, _lease_values(lease))
        added = chunk_count - sum(row["served_chunks"] for row in replaced)
        counted = {"collection_id": lease.collection_id, "added": added}
        await connection.execute(statements.count_chunks, counted)
    return [VersionId(row["version_id"]) for row in replaced]


async def _insert_chunks(
    connection: Connection, lease: Lease, space: VectorSpace, batch: Sequence[IndexedChunk]
) -> int:
    async with connection.cursor() as cursor:
        await cursor.executemany(
            _for_table(statements.insert_chunk, space), [_chunk_values(lease, space, item) for item in batch]
        )
        return cursor.rowcount


def _chunk_values(lease: Lease, space: VectorSpace, item: IndexedChunk) -> dict[str, Any]:
    chunk = item.chunk
    return {
        "collection_id": lease.collection_id,
        "document_id": lease.document_id,
        "version_id": lease.version_id,
        "fingerprint": space.fingerprint,
        "ordinal": chunk.ordinal,
        "chunk_id": chunk.chunk_id,
        "text_sha256": item.text_sha256,
        "kind": str(chunk.kind),
        "content": chunk.content,
        "prefix": chunk.prefix,
        "locator": Jsonb(to_json(chunk.locator)),
        "token_count": chunk.token_count,
        "terms": sorted(item.weights),
        # pgvector counts sparse positions from 0 in Python and from 1 in SQL.
        "lexical": SparseVector({term - 1: weight for term, weight in item.weights.items()}, TERM_SPACE),
    }


async def _hits_a_row(connection: Connection, statement: bytes, values: dict[str, Any]) -> bool:
    cursor = await connection.execute(statement, values)
    return await cursor.fetchone() is not None


def _lease_values(lease: Lease) -> dict[str, Any]:
    return {"job_id": lease.job_id, "lease_epoch": lease.lease_epoch}


def _for_table(statement: bytes, space: VectorSpace) -> composing.Composed:
    # The name comes from our own catalogue row, never from a caller.
    return composing.SQL(statement.decode()).format(chunk_table=composing.Identifier(space.chunk_table))
