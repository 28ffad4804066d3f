"""The statements of search: what the role may do, which plans run, and that BM25 is BM25."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping

import numpy as np
import psycopg
import pytest
from psycopg import errors

from deploy.local.embedded_postgres import SEARCHER
from services.search.keywords import KeywordQuery, inverse_document_frequency
from services.search.repository.searchable_chunks import Collection, SearchableChunks, Snapshot, statements
from shared import postgres, terms
from shared.errors import DeadlineExceededError, DependencyUnavailableError, OverloadedError
from shared.postgres import Pool
from tests.support.corpus import Corpus, Space, create_partial_index, random_units

TABLES = [
    "tenants", "vector_spaces", "collections", "blobs", "documents", "document_versions", "ingestion_jobs",
    "ingestion_attempts", "assets", "snapshots", "chunk_staging", "request_ids", "deleted_documents",
]  # fmt: skip

ROLE_SETTINGS = {
    "hnsw.iterative_scan": "relaxed_order",
    "hnsw.ef_search": "100",
    "plan_cache_mode": "force_custom_plan",
    "jit": "off",
    "default_transaction_read_only": "on",
    "statement_timeout": "10s",
}


def collection_of(space: Space, name: str = "c") -> Collection:
    return Collection(
        collection_id=space.collection_id,
        name=name,
        fingerprint="f" * 64,
        dimension=8,
        search_view=space.search_view,
    )


# --- READY by construction -------------------------------------------------------------------


@pytest.mark.parametrize("status", ["PENDING", "PARSING", "CHUNKING", "EMBEDDING", "INDEXING", "FAILED"])
def test_d3_the_database_refuses_a_chunk_of_a_version_that_is_not_ready(corpus: Corpus, status: str) -> None:
    space = corpus.create_collection("c")
    document_id, version_id = corpus.add_unready_document(space, status)
    with pytest.raises(errors.ForeignKeyViolation), corpus.connection.transaction():
        corpus.copy_chunks(space, document_id, version_id, ["word"], random_units(1))
    assert corpus.connection.execute(f"SELECT count(*) FROM {space.chunk_table}").fetchone() == (0,)


def test_d3_the_database_refuses_a_chunk_that_lies_about_its_status(corpus: Corpus) -> None:
    space = corpus.create_collection("c")
    corpus.add_document(space, ["word"], random_units(1))
    with pytest.raises(errors.CheckViolation):
        corpus.connection.execute(
            f"INSERT INTO {space.chunk_table} "
            f"SELECT collection_id, document_id, version_id, 99, 'INDEXING', chunk_id, text_sha256, kind, "
            f"content, prefix, locator, token_count, terms, lexical, embedding FROM {space.chunk_table}"
        )


@pytest.mark.parametrize("status", ["PENDING", "INDEXING"])
def test_a_version_with_chunks_cannot_leave_ready(corpus: Corpus, status: str) -> None:
    space = corpus.create_collection("c")
    corpus.add_document(space, ["word"], random_units(1))
    with pytest.raises(errors.ForeignKeyViolation):
        corpus.connection.execute("UPDATE document_versions SET status = %s, ready_at = NULL", (status,))


def test_a_chunk_of_another_collection_than_its_version_is_refused(corpus: Corpus) -> None:
    space, other = corpus.create_collection("c"), corpus.create_collection("other")
    corpus.add_document(space, ["word"], random_units(1))
    row = corpus.connection.execute("SELECT document_id, version_id FROM document_versions").fetchone()
    assert row is not None
    with pytest.raises(errors.ForeignKeyViolation):
        corpus.copy_chunks(other, *row, ["word"], random_units(1))


# --- The role --------------------------------------------------------------------------------


def test_d3_the_search_role_reads_views_and_nothing_else(
    database_urls: Mapping[str, str], corpus: Corpus
) -> None:
    space = corpus.create_collection("c")
    corpus.add_document(space, ["word"], random_units(1))
    with psycopg.connect(database_urls[SEARCHER], autocommit=True) as searcher:
        for view in ("search_collections", "search_documents", space.search_view):
            assert searcher.execute(f"SELECT count(*) FROM {view}").fetchone() == (1,)
        for table in [*TABLES, space.chunk_table]:
            with pytest.raises(errors.InsufficientPrivilege):
                searcher.execute(f"SELECT 1 FROM {table}")
        # Even a role that switches its own default off may not write.
        searcher.execute("SET default_transaction_read_only = off")
        for statement in (
            f"DELETE FROM {space.search_view}",
            f"UPDATE {space.search_view} SET content = ''",
            "CREATE TABLE mine (id int)",
            "SELECT create_vector_space('x', 'y', 8)",
        ):
            with pytest.raises(errors.InsufficientPrivilege):
                searcher.execute(statement)


def test_every_table_of_the_schema_is_in_the_list_of_refused_ones(corpus: Corpus) -> None:
    found = corpus.connection.execute(
        "SELECT tablename FROM pg_tables WHERE schemaname = 'readymark' ORDER BY 1"
    ).fetchall()
    assert {row[0] for row in found} == set(TABLES)


async def test_every_connection_of_the_pool_has_the_settings_of_the_role(searcher_pool: Pool) -> None:
    async def read() -> dict[str, str]:
        async with postgres.connect(searcher_pool) as connection:
            await connection.execute("SELECT pg_sleep(0.05)")
            found = {}
            for name in ROLE_SETTINGS:
                cursor = await connection.execute("SELECT current_setting(%s) AS value", (name,))
                row = await cursor.fetchone()
                assert row is not None
                found[name] = row["value"]
            return found

    for settings in await asyncio.gather(*(read() for _ in range(searcher_pool.max_size))):
        assert settings == ROLE_SETTINGS


# --- Keyword scores --------------------------------------------------------------------------

WORDS = [f"w{number}" for number in range(120)] + ["队列", "端口", "部署失败"]


def _texts(count: int) -> list[str]:
    random = np.random.default_rng(4)
    shares = 1 / np.arange(1, len(WORDS) + 1)
    shares /= shares.sum()
    return [" ".join(random.choice(WORDS, size=random.integers(3, 60), p=shares)) for _ in range(count)]


def _bm25(texts: list[str], query: str, collection_id: int) -> dict[int, float]:
    """BM25 of each matching text, by its definition: term frequencies, lengths, idf."""
    bags = [terms.terms_of(text) for text in texts]
    lengths = [sum(1 for term in bag if not _is_single_of_run(term)) for bag in bags]
    scores: dict[int, float] = {}
    for term, count in terms.query_terms(query, collection_id).items():
        frequencies = [sum(1 for t in bag if terms.term_id(t, collection_id) == term) for bag in bags]
        documents = sum(1 for frequency in frequencies if frequency)
        idf = math.log(1 + (len(texts) - documents + 0.5) / (documents + 0.5))
        for index, frequency in enumerate(frequencies):
            if frequency:
                norm = terms.K1 * (1 - terms.B + terms.B * lengths[index] / terms.AVERAGE_LENGTH)
                scores[index] = scores.get(index, 0.0) + count * idf * frequency * (terms.K1 + 1) / (
                    frequency + norm
                )
    return scores


def _is_single_of_run(term: str) -> bool:
    return len(term) == 1 and term > "\u2e80"


@pytest.mark.parametrize("query", ["w3 w50 w100", "w0", "w7 w7 端口", "部署失败", "w119 nowhere"])
async def test_keyword_scores_are_bm25(corpus: Corpus, searcher_pool: Pool, query: str) -> None:
    space = corpus.create_collection("c")
    texts = _texts(300)
    corpus.add_document(space, texts, random_units(len(texts)))
    expected = _bm25(texts, query, space.collection_id)
    asked = terms.query_terms(query, space.collection_id)
    chunks = SearchableChunks(searcher_pool)
    async with chunks.snapshot(collection_of(space), timeout_seconds=5, depth=10) as snapshot:
        counted = await snapshot.count_terms(list(asked), cap=1_000)
        weights = {
            term: count * inverse_document_frequency(len(texts), counted[term])
            for term, count in asked.items()
        }
        found = await (await snapshot.best_by_keywords(KeywordQuery(weights, tuple(weights)), 400)).result()
    scores = {chunk.key[1]: chunk.score for chunk in found.chunks}
    assert scores.keys() == expected.keys()
    for ordinal, score in scores.items():
        assert math.isclose(score, expected[ordinal], rel_tol=1e-5), ordinal
    assert [chunk.rank for chunk in found.chunks] == list(range(1, len(scores) + 1))
    assert all(a.score >= b.score for a, b in itertools.pairwise(found.chunks))


async def test_common_terms_are_estimated_from_a_sample(corpus: Corpus, searcher_pool: Pool) -> None:
    space = corpus.create_collection("c")
    for start in range(0, 600, 100):
        texts = ["always" + (" half" if n % 2 else "") + f" once{n}" for n in range(start, start + 100)]
        corpus.add_document(space, texts, random_units(100))
    chunks = SearchableChunks(searcher_pool)
    async with chunks.snapshot(collection_of(space), timeout_seconds=5, depth=10) as snapshot:
        shares = await snapshot.sample_common_terms()
    half, always = (terms.term_id(term, space.collection_id) for term in ("half", "always"))
    assert shares[always] == 1.0
    assert 0.3 < shares[half] < 0.7
    assert len(shares) < 30


# --- Plans -----------------------------------------------------------------------------------


async def _plan(snapshot: Snapshot, statement: bytes, **values: object) -> str:
    sent = await snapshot._send(b"EXPLAIN (COSTS OFF) " + statement, list, **values)
    return "\n".join(row["QUERY PLAN"] for row in await sent.result())


@pytest.fixture
def large_space(database_urls: Mapping[str, str], corpus: Corpus) -> Space:
    """6,000 chunks beside as many of another collection, with an index of its own."""
    space, other = corpus.create_collection("c"), corpus.create_collection("other")
    for number in range(12):
        texts = [f"common w{n % 50} only{number}x{n}" for n in range(500)]
        for target in (space, other):
            corpus.add_document(target, texts, random_units(500, seed=number))
    create_partial_index(database_urls["postgres"], space)
    return space


async def test_large_collections_are_searched_through_their_indexes(
    large_space: Space, searcher_pool: Pool
) -> None:
    from pgvector import HalfVector, SparseVector

    chunks = SearchableChunks(searcher_pool)
    vector = HalfVector(random_units(1)[0])
    term = terms.term_id("w7", large_space.collection_id)
    query = SparseVector({term - 1: 1.0}, terms.TERM_SPACE)
    async with chunks.snapshot(collection_of(large_space), timeout_seconds=10, depth=10) as snapshot:
        for limit in (10, 50, 200, 500):
            plan = await _plan(
                snapshot, statements.nearest_by_index, embedding=vector, limit=limit, document_ids=None
            )
            assert f"{large_space.chunk_table}_embedding_idx" in plan, plan
            assert "Seq Scan" not in plan
        exact = await _plan(snapshot, statements.nearest_exact, embedding=vector, limit=10, document_ids=None)
        assert "embedding_idx" not in exact
        assert "Seq Scan" not in exact, exact
        keyword = await _plan(snapshot, statements.best_by_keywords, query=query, gate=[term], limit=50)
        assert f"{large_space.chunk_table}_terms_idx" in keyword, keyword
        assert "Seq Scan" not in keyword
        # One index finds the rows; intersecting with all rows of the collection would cost more.
        assert "BitmapAnd" not in keyword, keyword
        count = await _plan(snapshot, statements.count_term, term=term, cap=1_000)
        assert f"{large_space.chunk_table}_terms_idx" in count, count
        assert "Seq Scan" not in count
        load = await _plan(snapshot, statements.load_chunks, version_ids=[1, 2], ordinals=[1, 2])
        assert f"{large_space.chunk_table}_pkey" in load, load
        assert "Seq Scan" not in load.replace("Function Scan", "")


async def test_plans_stay_after_many_executions_of_the_same_statement(
    large_space: Space, searcher_pool: Pool
) -> None:
    # From the sixth execution on, a prepared statement may get a plan that knows no values.
    chunks = SearchableChunks(searcher_pool)
    for _ in range(12):
        async with chunks.snapshot(collection_of(large_space), timeout_seconds=10, depth=10) as snapshot:
            await (await snapshot.nearest(random_units(1)[0], 10, exact=False)).result()
            cursor = await snapshot._connection.execute(
                "SELECT count(*) AS prepared, sum(generic_plans) AS generic FROM pg_prepared_statements "
                "WHERE statement LIKE %s",
                ("%embedding <=>%",),
            )
            row = await cursor.fetchone()
            assert row is not None
            assert not row["generic"]
    assert row["prepared"] == 1


# --- Limits and faults -----------------------------------------------------------------------


async def test_a_statement_ends_with_the_time_of_its_call(corpus: Corpus, searcher_pool: Pool) -> None:
    space = corpus.create_collection("c")
    chunks = SearchableChunks(searcher_pool)
    with pytest.raises(DeadlineExceededError):
        async with chunks.snapshot(collection_of(space), timeout_seconds=0.05, depth=10) as snapshot:
            cursor = await snapshot._connection.execute("SELECT pg_sleep(5)")
            await cursor.fetchall()
    with pytest.raises(DeadlineExceededError):
        async with chunks.snapshot(collection_of(space), timeout_seconds=0.0, depth=10):
            pass
    async with postgres.connect(searcher_pool) as connection:
        cursor = await connection.execute("SELECT current_setting('statement_timeout') AS value")
        assert await cursor.fetchone() == {"value": "10s"}


async def test_a_wait_in_vain_for_a_connection_is_overload_only_when_all_are_lent(
    database_urls: Mapping[str, str], corpus: Corpus
) -> None:
    space = corpus.create_collection("c")
    pool = postgres.create_pool(
        database_urls[SEARCHER], application_name="test", max_size=1, timeout_seconds=0.2
    )
    chunks = SearchableChunks(pool)
    with pytest.raises(DependencyUnavailableError):
        await chunks.get_collection("c")
    await pool.open(wait=True)
    try:
        async with chunks.snapshot(collection_of(space), timeout_seconds=5, depth=10):
            with pytest.raises(OverloadedError):
                await chunks.get_collection("c")
        assert (await chunks.get_collection("c")).collection_id == space.collection_id
    finally:
        await pool.close()


async def test_a_database_that_is_gone_is_unavailable_not_overloaded() -> None:
    pool = postgres.create_pool(
        "postgresql://nobody@/nothing?host=/nonexistent", application_name="test", timeout_seconds=0.3
    )
    await pool.open(wait=False)
    try:
        with pytest.raises(DependencyUnavailableError) as caught:
            await SearchableChunks(pool).get_collection("c")
        assert caught.value.reason == "DATABASE_UNAVAILABLE"
    finally:
        await pool.close()
