"""Fills a migrated database with searchable documents, through the real schema and no service.

What the ingest worker's publication does in one transaction, this does too: chunks, READY,
served version, counter. So the constraints of the schema hold for every row made here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psycopg
from numpy.typing import NDArray
from pgvector import HalfVector, SparseVector
from pgvector.psycopg import register_vector
from psycopg.types.json import Jsonb

from shared import terms

DIMENSION = 8
FINGERPRINT = "f" * 64

_COLUMNS = (
    "collection_id, document_id, version_id, ordinal, chunk_id, text_sha256, kind, content, prefix, locator, "
    "token_count, terms, lexical, embedding"
)
_TYPES = [
    "int8", "uuid", "int8", "int4", "uuid", "bytea", "text", "text", "text", "jsonb",
    "int4", "int4[]", "sparsevec", "halfvec",
]  # fmt: skip


def unit(values: Sequence[float] | NDArray[Any]) -> NDArray[np.float32]:
    vector = np.asarray(values, dtype=np.float32)
    return vector / np.linalg.norm(vector)


def random_units(count: int, dimension: int = DIMENSION, *, seed: int = 0) -> NDArray[np.float32]:
    vectors = np.random.default_rng(seed).normal(size=(count, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def create_partial_index(owner_url: str, space: Space) -> None:
    """Makes the collection's own HNSW index, as a collection above the threshold has."""
    with psycopg.connect(owner_url, autocommit=True, options="-c search_path=readymark,public") as owner:
        owner.execute(
            f"CREATE INDEX ON {space.chunk_table} USING hnsw (embedding halfvec_cosine_ops) "
            f"WITH (m = 16, ef_construction = 128) WHERE collection_id = {space.collection_id}"
        )
        owner.execute(f"VACUUM ANALYZE {space.chunk_table}")


@dataclasses.dataclass(frozen=True)
class Space:
    collection_id: int
    chunk_table: str
    search_view: str


class Corpus:
    """Writes as the ingest role over one connection of its own."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        register_vector(self.connection)

    def close(self) -> None:
        self.connection.close()

    def create_collection(
        self, name: str, *, fingerprint: str | None = FINGERPRINT, dimension: int = DIMENSION
    ) -> Space:
        """Makes a collection; without a fingerprint it has no vector space yet."""
        space_id, chunk_table, search_view = None, "", ""
        if fingerprint is not None:
            space_id = self._one("SELECT create_vector_space(%s, 'test-model', %s)", fingerprint, dimension)[
                0
            ]
            chunk_table, search_view = self._one(
                "SELECT chunk_table, search_view FROM vector_spaces WHERE vector_space_id = %s", space_id
            )
        collection_id = self._one(
            "INSERT INTO collections (tenant_id, name, vector_space_id) VALUES (1, %s, %s) "
            "RETURNING collection_id",
            name,
            space_id,
        )[0]
        return Space(collection_id, chunk_table, search_view)

    def add_document(
        self,
        space: Space,
        texts: Sequence[str],
        vectors: NDArray[np.float32],
        *,
        document_id: uuid.UUID | None = None,
        display_name: str = "a.txt",
        metadata: Mapping[str, Any] | None = None,
        locator: Mapping[str, Any] | None = None,
    ) -> uuid.UUID:
        """Publishes a document in one transaction; for an existing id the new version replaces the old."""
        document_id = document_id or uuid.uuid4()
        with self.connection.transaction():
            self.connection.execute(
                "INSERT INTO documents (document_id, tenant_id, collection_id, display_name, metadata) "
                "VALUES (%s, 1, %s, %s, %s) ON CONFLICT (document_id) DO NOTHING",
                (document_id, space.collection_id, display_name, Jsonb(dict(metadata or {}))),
            )
            version_id = self.add_version(space, document_id, status="INDEXING")
            self.copy_chunks(space, document_id, version_id, texts, vectors, locator=locator)
            self.connection.execute(
                "UPDATE document_versions SET status = 'READY', ready_at = now(), chunk_count = %s "
                "WHERE version_id = %s",
                (len(texts), version_id),
            )
            self.connection.execute(
                "UPDATE documents SET served_version_id = %s WHERE document_id = %s",
                (version_id, document_id),
            )
            replaced = self.connection.execute(
                "DELETE FROM document_versions WHERE document_id = %s AND version_id < %s "
                "RETURNING chunk_count",
                (document_id, version_id),
            ).fetchall()
            self._count(space, len(texts) - sum(row[0] for row in replaced))
        return document_id

    def add_unready_document(self, space: Space, status: str) -> tuple[uuid.UUID, int]:
        """Makes a document whose only version stands at `status`; returns it and its version."""
        document_id = uuid.uuid4()
        with self.connection.transaction():
            self.connection.execute(
                "INSERT INTO documents (document_id, tenant_id, collection_id, display_name) "
                "VALUES (%s, 1, %s, 'b.txt')",
                (document_id, space.collection_id),
            )
            version_id = self.add_version(space, document_id, status=status)
        return document_id, version_id

    def add_version(self, space: Space, document_id: uuid.UUID, *, status: str) -> int:
        self.connection.execute(
            "INSERT INTO blobs (sha256, size_bytes) VALUES (repeat('0', 64), 1) ON CONFLICT DO NOTHING"
        )
        failure = ("It broke.", Jsonb({"reason": "INTERNAL"})) if status == "FAILED" else (None, None)
        version_id: int = self._one(
            "INSERT INTO document_versions (document_id, collection_id, number, status, blob_sha256, "
            "  size_bytes, error_message, failure) "
            "SELECT %s, %s, coalesce(max(number), 0) + 1, %s, repeat('0', 64), 1, %s, %s "
            "FROM document_versions WHERE document_id = %s RETURNING version_id",
            document_id, space.collection_id, status, *failure, document_id,
        )[0]  # fmt: skip
        self.connection.execute(
            "UPDATE documents SET newest_version_id = %s WHERE document_id = %s", (version_id, document_id)
        )
        return version_id

    def copy_chunks(
        self,
        space: Space,
        document_id: uuid.UUID,
        version_id: int,
        texts: Sequence[str],
        vectors: NDArray[np.float32],
        *,
        locator: Mapping[str, Any] | None = None,
    ) -> None:
        statement = f"COPY {space.chunk_table} ({_COLUMNS}) FROM STDIN (FORMAT binary)"
        with self.connection.cursor() as cursor, cursor.copy(statement) as copy:
            copy.set_types(_TYPES)
            for row in _rows(space, document_id, version_id, texts, vectors, locator):
                copy.write_row(row)

    def delete_document(self, space: Space, document_id: uuid.UUID) -> None:
        with self.connection.transaction():
            gone = self._one(
                "DELETE FROM documents d USING document_versions v "
                "WHERE d.document_id = %s AND v.version_id = d.served_version_id RETURNING v.chunk_count",
                document_id,
            )[0]
            self._count(space, -gone)

    def _count(self, space: Space, added: int) -> None:
        self.connection.execute(
            "UPDATE collections SET ready_chunks = ready_chunks + %s WHERE collection_id = %s",
            (added, space.collection_id),
        )

    def _one(self, statement: str, *values: Any) -> tuple[Any, ...]:
        row = self.connection.execute(statement, values).fetchone()
        assert row is not None
        return row


def _rows(
    space: Space,
    document_id: uuid.UUID,
    version_id: int,
    texts: Sequence[str],
    vectors: NDArray[np.float32],
    locator: Mapping[str, Any] | None,
) -> Iterator[tuple[Any, ...]]:
    for ordinal, (text, vector) in enumerate(zip(texts, vectors, strict=True)):
        weights = terms.document_weights(text, space.collection_id)
        sparse = SparseVector({term - 1: weight for term, weight in weights.items()}, terms.TERM_SPACE)
        place = dict(locator or {"start_char": 0, "end_char": len(text)})
        yield (
            space.collection_id, document_id, version_id, ordinal, uuid.uuid4(),
            hashlib.sha256(text.encode()).digest(), "paragraph", text, "", Jsonb(place),
            len(text), sorted(weights), sparse, HalfVector(vector),
        )  # fmt: skip
