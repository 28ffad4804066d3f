"""Reads of the search views, all of one search from one snapshot.

Owns every statement of the service. It can only read: the role behind the pool has no other
right, and no table, only views over chunks of READY versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from pgvector import HalfVector, SparseVector
from psycopg import AsyncCursor
from psycopg import sql as composing
from psycopg.rows import DictRow

from services.search.fusion import ChunkKey, RankedChunk
from services.search.keywords import KeywordQuery
from shared import postgres, sql
from shared.errors import (
    DeadlineExceededError,
    DependencyUnavailableError,
    OverloadedError,
    ResourceNotFoundError,
)
from shared.postgres import Connection, Pool
from shared.terms import TERM_SPACE

statements = sql.load(__file__)

# The tenant that the first migration makes; there is one for now.
DEFAULT_TENANT_ID = 1

# The role's setting; more is asked for when a search wants more rows, up to what pgvector takes.
EF_SEARCH = 100
MAX_EF_SEARCH = 1_000

KEPT_COLLECTIONS = 1_000

DocumentIds = tuple[uuid.UUID, ...] | None
Answer = TypeVar("Answer")


class CollectionChangedError(Exception):
    """The collection was deleted, made anew or moved to another model since it was looked up."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """`search_view`, `fingerprint` and `dimension` are None until the first vector."""

    collection_id: int
    name: str
    fingerprint: str | None
    dimension: int | None
    search_view: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class CandidateCount:
    """Chunks of the collection, and those of them that the filter admits."""

    ready_chunks: int
    candidate_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class KeywordChannel:
    """The best chunks by BM25, and all terms of the best one."""

    chunks: list[RankedChunk]
    best_terms: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FoundChunk:
    """What a hit shows of a chunk and its document."""

    version_id: int
    ordinal: int
    chunk_id: uuid.UUID
    content: str
    locator: Mapping[str, Any]
    document_id: uuid.UUID
    display_name: str
    metadata: Mapping[str, Any]
    version_number: int


class SearchableChunks:
    """The search views behind a pool of connections."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lent = 0
        self._known: dict[str, Collection] = {}

    async def get_collection(self, name: str) -> Collection:
        """Returns what is known of the collection; a snapshot finds out whether it still holds."""
        known = self._known.get(name)
        if known is not None:
            return known
        async with self._connect() as connection:
            values = {"tenant_id": DEFAULT_TENANT_ID, "name": name}
            cursor = await connection.execute(statements.find_collection, values)
            row = await cursor.fetchone()
        if row is None:
            raise ResourceNotFoundError("COLLECTION_NOT_FOUND", collection=name)
        collection = Collection(**row)
        if collection.fingerprint is not None:
            # Without a vector space it is about to change, with one it hardly ever does.
            self._known[name] = collection
            if len(self._known) > KEPT_COLLECTIONS:
                del self._known[next(iter(self._known))]
        return collection

    def forget_collection(self, name: str) -> None:
        self._known.pop(name, None)

    @contextlib.asynccontextmanager
    async def snapshot(
        self, collection: Collection, *, timeout_seconds: float, depth: int
    ) -> AsyncIterator[Snapshot]:
        """Lends the collection as it is now, whatever is committed later; `depth`: rows wanted by vector."""
        if timeout_seconds <= 0:
            raise DeadlineExceededError("DEADLINE_EXCEEDED")
        limits = {
            # 0 would mean no limit.
            "timeout_milliseconds": str(max(1, int(timeout_seconds * 1000))),
            "ef_search": str(min(MAX_EF_SEARCH, max(EF_SEARCH, depth))),
        }
        # In a pipeline a statement waits for the next answer that is asked for: a search is
        # nine statements and four round trips.
        async with self._connect() as connection, connection.pipeline(), connection.transaction():
            await connection.execute(statements.open_snapshot)
            await connection.execute(statements.limit_statements, limits)
            yield Snapshot(connection, collection)

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncIterator[Connection]:
        waiting = True
        if self._pool.closed:
            # Not opened yet, since the database was not ready; or closed by the end of the service.
            raise DependencyUnavailableError("DATABASE_UNAVAILABLE", retry_after_seconds=1.0)
        try:
            async with postgres.connect(self._pool) as connection:
                waiting = False
                self._lent += 1
                try:
                    yield connection
                finally:
                    self._lent -= 1
        except OverloadedError as error:
            # The pool waits in vain in two cases: all are lent, or the database gives none.
            if waiting and self._lent < self._pool.max_size:
                raise DependencyUnavailableError("DATABASE_UNAVAILABLE", retry_after_seconds=1.0) from error
            raise


class Sent(Generic[Answer]):
    """A statement that was sent. Send all that do not need each other, then ask for the results.

    The last result may be asked for after the snapshot's end, which then takes no round trip.
    """

    def __init__(self, cursor: AsyncCursor[DictRow], read: Callable[[list[DictRow]], Answer]) -> None:
        self._cursor = cursor
        self._read = read

    async def result(self) -> Answer:
        return self._read(await self._cursor.fetchall())


class Snapshot:
    """One collection as it was at one moment. Lives as long as its transaction."""

    def __init__(self, connection: Connection, collection: Collection) -> None:
        assert collection.search_view is not None
        self._connection = connection
        self._collection = collection
        self.collection_id = collection.collection_id
        self._view = composing.Identifier(collection.search_view)

    async def count_candidates(self, document_ids: DocumentIds) -> CandidateCount:
        """Raises CollectionChangedError when the collection is not any more what the caller knows."""
        sent = await self._send(
            statements.count_candidates,
            list,
            name=self._collection.name,
            fingerprint=self._collection.fingerprint,
            document_ids=_array(document_ids),
        )
        rows = await sent.result()
        if not rows:
            raise CollectionChangedError(self._collection.name)
        return CandidateCount(**rows[0])

    async def nearest(
        self, embedding: NDArray[np.float32], limit: int, *, exact: bool, document_ids: DocumentIds = None
    ) -> Sent[list[RankedChunk]]:
        """Sends for the chunks by cosine similarity; `exact` compares every one, else an index may serve."""
        return await self._send(
            statements.nearest_exact if exact else statements.nearest_by_index,
            _ranked,
            embedding=HalfVector(embedding),
            limit=limit,
            document_ids=_array(document_ids),
        )

    async def count_terms(self, terms: Sequence[int], cap: int) -> dict[int, int]:
        sent = [await self._send(statements.count_term, _chunk_count, term=term, cap=cap) for term in terms]
        return {term: await count.result() for term, count in zip(terms, sent, strict=True)}

    async def sample_common_terms(self) -> dict[int, float]:
        sent = await self._send(statements.sample_common_terms, list)
        return {row["term"]: row["share"] for row in await sent.result()}

    async def best_by_keywords(
        self, keywords: KeywordQuery, limit: int, *, document_ids: DocumentIds = None
    ) -> Sent[KeywordChannel]:
        """Sends for the chunks that contain a term of the gate, by BM25 over all terms."""
        # pgvector counts sparse positions from 0 in Python and from 1 in SQL.
        weights = {term - 1: weight for term, weight in keywords.weights.items()}
        values: dict[str, Any] = {
            "query": SparseVector(weights, TERM_SPACE),
            "gate": list(keywords.gate),
            "limit": limit,
        }
        statement = statements.best_by_keywords
        if document_ids is not None:
            statement = statements.best_by_keywords_of_documents
            values["document_ids"] = list(document_ids)
        return await self._send(statement, _keyword_channel, **values)

    async def load_chunks(self, keys: Sequence[ChunkKey]) -> Sent[dict[ChunkKey, FoundChunk]]:
        return await self._send(
            statements.load_chunks,
            _found_chunks,
            version_ids=[version_id for version_id, _ in keys],
            ordinals=[ordinal for _, ordinal in keys],
        )

    async def _send(
        self, statement: bytes, read: Callable[[list[DictRow]], Answer], **values: Any
    ) -> Sent[Answer]:
        values["collection_id"] = self.collection_id
        return Sent(await self._connection.execute(self._for_view(statement), values), read)

    def _for_view(self, statement: bytes) -> composing.Composed:
        # The name comes from our own catalogue row, never from a caller.
        return composing.SQL(statement.decode()).format(search_view=self._view)


def _array(document_ids: DocumentIds) -> list[uuid.UUID] | None:
    return None if document_ids is None else list(document_ids)


def _ranked(rows: Sequence[Mapping[str, Any]]) -> list[RankedChunk]:
    return [
        RankedChunk((row["version_id"], row["ordinal"]), rank, row["score"])
        for rank, row in enumerate(rows, start=1)
    ]


def _keyword_channel(rows: Sequence[Mapping[str, Any]]) -> KeywordChannel:
    return KeywordChannel(_ranked(rows), frozenset(rows[0]["terms"]) if rows else frozenset())


def _chunk_count(rows: Sequence[Mapping[str, Any]]) -> int:
    return int(rows[0]["chunk_count"])


def _found_chunks(rows: Sequence[Mapping[str, Any]]) -> dict[ChunkKey, FoundChunk]:
    return {(row["version_id"], row["ordinal"]): FoundChunk(**row) for row in rows}
