"""From staged vectors to searchable chunks: all of a version or nothing, on a real PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid

import numpy as np
import psycopg
import pytest

from services.ingest.lifecycle import STAGES, DocumentStatus
from services.ingest.model import Asset, BlockKind, Chunk, Locator
from services.ingest.repository import jobs, publication
from services.ingest.repository.jobs import Lease
from services.ingest.repository.publication import IndexedChunk, SnapshotRecord, SnapshotRow, VectorSpace
from shared.errors import LeaseLostError, ModelMismatchError
from shared.postgres import Pool
from tests.support import rows

DIMENSION = 8


def chunks_of(*texts: str) -> list[IndexedChunk]:
    return [
        IndexedChunk(
            Chunk(
                chunk_id=str(uuid.uuid5(uuid.NAMESPACE_URL, f"{ordinal}{text}")),
                ordinal=ordinal,
                content=text,
                prefix="",
                kind=BlockKind.PARAGRAPH,
                locator=Locator(0, len(text), page=1),
                token_count=3,
            ),
            hashlib.sha256(text.encode()).digest(),
            {7: 1.5, 900_000_000: 0.25},
        )
        for ordinal, text in enumerate(texts)
    ]


def vectors_of(chunks: list[IndexedChunk]) -> np.ndarray:
    drawn = np.random.default_rng(1).normal(size=(len(chunks), DIMENSION)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


async def bind(pool: Pool, lease: Lease, fingerprint: str = "f" * 64) -> VectorSpace:
    return await publication.bind_vector_space(
        pool, lease, fingerprint=fingerprint, model_id="test", dimension=DIMENSION
    )


async def store_nothing(asset: Asset) -> None:
    """For documents without assets."""
    raise AssertionError(f"unexpected asset {asset.sha256}")


async def save_snapshot(pool: Pool, lease: Lease, chunk_count: int) -> str | None:
    row = SnapshotRow(
        file_key=f"snapshots/{lease.job_id}-{lease.lease_epoch}",
        file_sha256="0" * 64,
        source_sha256=lease.blob_sha256,
        parser_fingerprint="parser",
        chunker_fingerprint="chunker",
    )
    record = SnapshotRecord(
        row=row,
        size_bytes=1,
        chunk_count=chunk_count,
        token_count=3 * chunk_count,
        media_type="text/plain",
        title=None,
        warnings=(),
        assets=(),
    )
    return await publication.save_snapshot(pool, lease, record, store_nothing)


async def upto_indexing(pool: Pool, lease: Lease, chunks: list[IndexedChunk]) -> VectorSpace:
    for stage in (DocumentStatus.PARSING, DocumentStatus.CHUNKING):
        await jobs.begin_stage(pool, lease, stage, trace_id=None)
    await save_snapshot(pool, lease, len(chunks))
    await jobs.begin_stage(pool, lease, DocumentStatus.EMBEDDING, trace_id=None)
    space = await bind(pool, lease)
    texts = [(item.chunk.ordinal, item.text_sha256) for item in chunks]
    await publication.stage_vectors(pool, lease, space, texts, vectors_of(chunks))
    await jobs.begin_stage(pool, lease, DocumentStatus.INDEXING, trace_id=None)
    return space


async def publish_document(pool: Pool, *texts: str, document_id: str | None = None) -> rows.Submitted:
    submitted = await rows.submit(pool, document_id=document_id, content=" ".join(texts).encode())
    lease = await rows.claim(pool)
    chunks = chunks_of(*texts)
    space = await upto_indexing(pool, lease, chunks)
    await publication.publish_version(pool, lease, space, [chunks], chunk_count=len(chunks))
    return submitted


async def visible(pool: Pool) -> list[str]:
    contents: list[str] = []
    for space in await rows.execute(pool, "SELECT chunk_table FROM vector_spaces"):
        query = f"SELECT content FROM {space['chunk_table']} ORDER BY version_id, ordinal"
        contents += [row["content"] for row in await rows.execute(pool, query)]
    return contents


async def test_d1_j7_j16_publishing_makes_everything_visible_at_once(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool)
    chunks = chunks_of("one", "two", "three")
    space = await upto_indexing(pool, lease, chunks)
    assert await visible(pool) == []
    await publication.publish_version(pool, lease, space, [chunks[:2], chunks[2:]], chunk_count=3)
    assert await visible(pool) == ["one", "two", "three"]
    assert await rows.pair(pool, submitted) == ("READY", "SUCCEEDED")
    version = await rows.version(pool, submitted.version_id)
    assert version["model_fingerprint"] == space.fingerprint
    (row,) = await rows.execute(
        pool,
        "SELECT d.served_version_id, c.ready_chunks FROM documents d JOIN collections c USING (collection_id)",
    )
    assert (row["served_version_id"], row["ready_chunks"]) == (submitted.version_id, 3)
    assert await rows.execute(pool, "SELECT ordinal FROM chunk_staging") == []
    (attempt,) = await rows.attempts(pool, submitted.job_id)
    assert (attempt["outcome"], attempt["last_stage"]) == ("SUCCEEDED", "INDEXING")


async def test_j16_a_publication_closes_its_own_attempt_only(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    await rows.claim(pool)
    await rows.expire_lease(pool, submitted.job_id)
    lease = await rows.claim(pool)
    before = (await rows.attempts(pool, submitted.job_id))[0]
    chunks = chunks_of("one")
    space = await upto_indexing(pool, lease, chunks)
    await publication.publish_version(pool, lease, space, [chunks], chunk_count=1)
    first, second = await rows.attempts(pool, submitted.job_id)
    assert first == before
    assert (first["outcome"], second["outcome"]) == ("LEASE_EXPIRED", "SUCCEEDED")


async def test_d1_a_missing_vector_publishes_nothing(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool)
    chunks = chunks_of("one", "two")
    space = await upto_indexing(pool, lease, chunks)
    await rows.execute(pool, "DELETE FROM chunk_staging WHERE ordinal = 1")
    with pytest.raises(AssertionError, match="1 of 2 chunks have a vector"):
        await publication.publish_version(pool, lease, space, [chunks], chunk_count=2)
    assert await visible(pool) == []
    assert await rows.pair(pool, submitted) == ("INDEXING", "RUNNING")


async def test_d1_fewer_chunks_than_the_snapshot_has_publish_nothing(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool)
    chunks = chunks_of("one", "two")
    space = await upto_indexing(pool, lease, chunks)
    with pytest.raises(AssertionError):
        await publication.publish_version(pool, lease, space, [chunks[:1]], chunk_count=1)
    assert await visible(pool) == []
    assert await rows.pair(pool, submitted) == ("INDEXING", "RUNNING")


@pytest.mark.parametrize("stage", [s for s in STAGES if s is not DocumentStatus.INDEXING])
async def test_d1_only_an_indexing_document_can_be_published(pool: Pool, stage: DocumentStatus) -> None:
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool)
    chunks = chunks_of("one")
    space = await upto_indexing(pool, lease, chunks)
    await rows.set_status(pool, submitted, stage, "RUNNING")
    with pytest.raises(AssertionError):
        await publication.publish_version(pool, lease, space, [chunks], chunk_count=1)
    assert await visible(pool) == []
    assert await rows.pair(pool, submitted) == (stage, "RUNNING")


@pytest.mark.parametrize("status", ["PENDING", *STAGES, "FAILED"])
async def test_d3_the_database_refuses_chunks_of_a_document_that_is_not_ready(
    pool: Pool, status: str
) -> None:
    submitted = await publish_document(pool, "one")
    job = "FAILED" if status == "FAILED" else "RUNNING"
    # Out of READY while it has chunks: refused.
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        await rows.set_status(pool, submitted, status, job)
    # Into the chunk table while it is not READY: refused.
    await rows.execute(pool, "UPDATE documents SET served_version_id = NULL")
    moved = await rows.execute(pool, "DELETE FROM chunks_1 RETURNING *")
    await rows.set_status(pool, submitted, status, job)
    names = ", ".join(moved[0])
    with pytest.raises(psycopg.errors.ForeignKeyViolation, match="only_of_ready_versions"):
        await rows.execute(
            pool,
            f"INSERT INTO chunks_1 ({names}) VALUES ({', '.join(['%s'] * len(moved[0]))})",
            *_plain(moved[0]),
        )
    # Not by claiming another status in the row either.
    changed = dict(moved[0], version_status=status)
    with pytest.raises(psycopg.errors.CheckViolation):
        await rows.execute(
            pool,
            f"INSERT INTO chunks_1 ({names}) VALUES ({', '.join(['%s'] * len(changed))})",
            *_plain(changed),
        )


def _plain(row: dict[str, object]) -> list[object]:
    return [psycopg.types.json.Jsonb(value) if isinstance(value, dict) else value for value in row.values()]


async def test_d3_a_document_that_is_not_ready_cannot_be_served(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    with pytest.raises(psycopg.errors.ForeignKeyViolation, match="serves_only_ready"):
        await rows.execute(pool, "UPDATE documents SET served_version_id = %s", submitted.version_id)


async def test_j14_a_publication_without_the_lease_leaves_nothing(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    sleeper = await rows.claim(pool, worker="sleeper")
    chunks = chunks_of("one", "two")
    space = await upto_indexing(pool, sleeper, chunks)
    await rows.expire_lease(pool, submitted.job_id)
    other = await rows.claim(pool, worker="other")
    await jobs.begin_stage(pool, other, DocumentStatus.EMBEDDING, trace_id=None)
    await jobs.begin_stage(pool, other, DocumentStatus.INDEXING, trace_id=None)
    for write in (
        publication.publish_version(pool, sleeper, space, [chunks], chunk_count=2),
        publication.stage_vectors(pool, sleeper, space, [(0, b"x")], vectors_of(chunks[:1])),
        save_snapshot(pool, sleeper, 5),
        bind(pool, sleeper, "e" * 64),
        publication.adopt_served_vectors(pool, sleeper, space, [(0, b"x")]),
    ):
        with pytest.raises(LeaseLostError):
            await write
    assert await visible(pool) == []
    assert await rows.pair(pool, submitted) == ("INDEXING", "RUNNING")
    await publication.publish_version(pool, other, space, [chunks], chunk_count=2)
    assert await visible(pool) == ["one", "two"]


async def test_j14_two_publications_at_once_end_in_one(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    sleeper = await rows.claim(pool)
    chunks = chunks_of(*(f"text {number}" for number in range(50)))
    space = await upto_indexing(pool, sleeper, chunks)
    await rows.expire_lease(pool, submitted.job_id)
    other = await rows.claim(pool)
    await jobs.begin_stage(pool, other, DocumentStatus.EMBEDDING, trace_id=None)
    await jobs.begin_stage(pool, other, DocumentStatus.INDEXING, trace_id=None)
    results = await asyncio.gather(
        publication.publish_version(pool, sleeper, space, [chunks], chunk_count=50),
        publication.publish_version(pool, other, space, [chunks], chunk_count=50),
        return_exceptions=True,
    )
    # The sleeper is refused either by its epoch or because its rows are there already.
    assert isinstance(results[0], Exception)
    if isinstance(results[1], Exception):
        # It may have waited for the sleeper's rows and lost them to its rollback: then it succeeds now.
        await publication.publish_version(pool, other, space, [chunks], chunk_count=50)
    assert len(await visible(pool)) == 50
    assert await rows.pair(pool, submitted) == ("READY", "SUCCEEDED")


async def test_d1_a_backend_that_dies_in_the_middle_of_publishing_leaves_nothing_and_the_retry_succeeds(
    pool: Pool,
) -> None:
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool)
    chunks = chunks_of(*(f"text {number}" for number in range(20)))
    space = await upto_indexing(pool, lease, chunks)

    def batches_that_kill() -> object:
        yield chunks[:10]
        with psycopg.connect(pool.conninfo, autocommit=True) as killer:
            killer.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE state LIKE 'idle in transaction%%' AND datname = current_database()"
            )
        yield chunks[10:]

    with pytest.raises(Exception, match="database does not answer"):
        await publication.publish_version(pool, lease, space, batches_that_kill(), chunk_count=20)  # type: ignore[arg-type]
    assert await visible(pool) == []
    assert await rows.pair(pool, submitted) == ("INDEXING", "RUNNING")
    await publication.publish_version(pool, lease, space, [chunks], chunk_count=20)
    assert len(await visible(pool)) == 20


async def test_d3_a_new_version_replaces_the_served_one_at_once(pool: Pool) -> None:
    first = await publish_document(pool, "old one", "old two", "same")
    seen: set[tuple[str, ...]] = set()
    done = asyncio.Event()

    async def watch() -> None:
        while not done.is_set():
            seen.add(tuple(await visible(pool)))

    watching = asyncio.create_task(watch())
    second = await publish_document(pool, "new", "same", document_id=first.document_id)
    done.set()
    await watching
    assert await visible(pool) == ["new", "same"]
    assert seen <= {("old one", "old two", "same"), ("new", "same")}
    found = await rows.execute(pool, "SELECT version_id FROM document_versions")
    assert [row["version_id"] for row in found] == [second.version_id]
    (row,) = await rows.execute(pool, "SELECT ready_chunks FROM collections")
    assert row["ready_chunks"] == 2


async def test_a_failed_new_version_leaves_the_served_one_searchable(pool: Pool) -> None:
    first = await publish_document(pool, "old")
    await rows.submit(pool, document_id=first.document_id, content=b"new")
    lease = await rows.claim(pool)
    failure = {"code": "INVALID_DOCUMENT", "reason": "CORRUPT_FILE", "parameters": {}}
    await jobs.give_up(pool, lease, error_message="damaged", failure=failure)
    assert await visible(pool) == ["old"]
    (row,) = await rows.execute(pool, "SELECT served_version_id FROM documents")
    assert row["served_version_id"] == first.version_id


async def test_unchanged_text_takes_its_vector_from_the_served_version(pool: Pool) -> None:
    first = await publish_document(pool, "same", "old")
    (kept,) = await rows.execute(pool, "SELECT embedding::text FROM chunks_1 WHERE content = 'same'")
    await rows.submit(pool, document_id=first.document_id, content=b"new")
    lease = await rows.claim(pool)
    space = await bind(pool, lease)
    chunks = chunks_of("new", "same")
    wanted = [(item.chunk.ordinal, item.text_sha256) for item in chunks]
    await publication.adopt_served_vectors(pool, lease, space, wanted)
    assert await publication.list_staged(pool, lease, space) == {1: chunks[1].text_sha256}
    (staged,) = await rows.execute(pool, "SELECT embedding::text FROM chunk_staging")
    assert staged == kept


async def test_staged_vectors_of_another_model_or_text_are_not_used(pool: Pool) -> None:
    await rows.submit(pool)
    lease = await rows.claim(pool)
    chunks = chunks_of("one")
    space = await bind(pool, lease)
    other = VectorSpace(space.vector_space_id, "e" * 64, DIMENSION, space.chunk_table)
    await publication.stage_vectors(pool, lease, other, [(0, chunks[0].text_sha256)], vectors_of(chunks))
    assert await publication.list_staged(pool, lease, space) == {}
    await publication.stage_vectors(pool, lease, space, [(0, b"another text")], vectors_of(chunks))
    for stage in (DocumentStatus.EMBEDDING, DocumentStatus.INDEXING):
        await jobs.begin_stage(pool, lease, stage, trace_id=None)
    with pytest.raises(AssertionError, match="0 of 1"):
        await publication.publish_version(pool, lease, space, [chunks], chunk_count=1)


async def test_a_collection_keeps_the_model_that_embedded_for_it_first(pool: Pool) -> None:
    """Cases D29 and E17: another model is refused by its fingerprint, even with the same dimension."""
    await publish_document(pool, "one")
    await rows.submit(pool)
    lease = await rows.claim(pool)
    with pytest.raises(ModelMismatchError) as refused:
        await bind(pool, lease, "e" * 64)
    assert refused.value.parameters == {"expected": "f" * 12, "actual": "e" * 12}
    await rows.submit(pool, collection="other")
    elsewhere = await rows.claim(pool)
    assert (await bind(pool, elsewhere, "e" * 64)).fingerprint == "e" * 64


async def test_workers_that_meet_a_new_model_together_make_one_space(pool: Pool) -> None:
    for number in range(8):
        await rows.submit(pool, collection=f"c{number}")
    result = await jobs.claim_ingestion_jobs(pool, worker="w", lease_seconds=60, max_jobs=8)
    spaces = await asyncio.gather(*(bind(pool, lease) for lease in result.leases))
    assert len({space.vector_space_id for space in spaces}) == 1


@pytest.mark.parametrize(
    ("vector", "refusal"),
    [
        (np.zeros(DIMENSION), psycopg.errors.CheckViolation),
        (np.full(DIMENSION, 2.0), psycopg.errors.CheckViolation),
        (np.full(DIMENSION, np.nan), psycopg.errors.DataException),
    ],
)
async def test_a_vector_that_is_not_of_length_one_never_becomes_searchable(
    pool: Pool, vector: np.ndarray, refusal: type[Exception]
) -> None:
    await rows.submit(pool)
    lease = await rows.claim(pool)
    chunks = chunks_of("one")
    space = await upto_indexing(pool, lease, chunks)
    staged = [(0, chunks[0].text_sha256)]
    with pytest.raises(refusal):
        await publication.stage_vectors(pool, lease, space, staged, vector.astype(np.float32)[None, :])
        await publication.publish_version(pool, lease, space, [chunks], chunk_count=1)
    assert await visible(pool) == []


async def test_a_snapshot_row_names_the_newest_file_and_returns_the_replaced_one(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    first = await rows.claim(pool)
    assert await save_snapshot(pool, first, 2) is None
    await jobs.hand_back(pool, first)
    second = await rows.claim(pool)
    assert await save_snapshot(pool, second, 3) == f"snapshots/{first.job_id}-1"
    found = await publication.find_snapshot(pool, second.version_id)
    assert found is not None
    assert found.file_key == f"snapshots/{submitted.job_id}-2"
    assert (await rows.version(pool, submitted.version_id))["chunk_count"] == 3


async def test_the_searcher_may_select_the_search_views_and_nothing_else(
    pool: Pool, database: object
) -> None:
    await publish_document(pool, "one")
    async with await psycopg.AsyncConnection.connect(database.searcher_url, autocommit=True) as searcher:  # type: ignore[attr-defined]
        allowed, refused = set(), set()
        cursor = await searcher.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'readymark'::regnamespace AND relkind IN ('r', 'v', 'S')"
        )
        for (name,) in await cursor.fetchall():
            try:
                await searcher.execute(f"SELECT * FROM {name} LIMIT 1")
                allowed.add(name)
            except psycopg.errors.InsufficientPrivilege:
                refused.add(name)
        assert allowed == {"search_collections", "search_documents", "search_chunks_1"}
        assert {"chunks_1", "documents", "document_versions", "ingestion_jobs", "chunk_staging"} <= refused
        for statement in (
            "DELETE FROM search_chunks_1",
            "CREATE TABLE mine (x int)",
            "SELECT create_vector_space('x', 'x', 3)",
        ):
            with pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction)):
                await searcher.execute(statement)
        with contextlib.suppress(psycopg.Error):
            await searcher.execute("SET default_transaction_read_only = off")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await searcher.execute("DELETE FROM search_chunks_1")
