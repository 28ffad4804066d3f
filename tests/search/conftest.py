"""What the tests of search may ask for: a filled corpus, a searcher on it, vectors by query."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deploy.local.embedded_postgres import INGEST, MIGRATOR, SEARCHER
from services.search.repository.searchable_chunks import SearchableChunks
from services.search.retrieval import Searcher
from shared import postgres
from shared.errors import ModelMismatchError, ReadymarkError
from shared.postgres import Pool
from tests.support.corpus import DIMENSION, FINGERPRINT, Corpus, unit
from tests.support.databases import Database


class Answer:
    """What the embedder client returns, for one text."""

    def __init__(self, vector: NDArray[np.float32], unknown_tokens: int) -> None:
        self.vectors = vector[np.newaxis, :]
        self.token_counts = [10]
        self.unknown_token_counts = [unknown_tokens]


class GivenVectors:
    """Stands where the embedder client stands: vectors by query, or a fault on purpose."""

    def __init__(self) -> None:
        self.vectors: dict[str, NDArray[np.float32]] = {}
        self.fingerprint = FINGERPRINT
        self.unknown_tokens = 0
        self.fault: ReadymarkError | None = None
        self.asked: list[tuple[str, str, float]] = []

    async def embed(
        self, texts: Sequence[str], kind: str, expected_fingerprint: str, timeout_seconds: float
    ) -> Answer:
        self.asked.append((texts[0], kind, timeout_seconds))
        if self.fault is not None:
            raise self.fault
        if expected_fingerprint != self.fingerprint:
            raise ModelMismatchError(
                "EMBEDDING_MODEL_MISMATCH", expected=expected_fingerprint, actual=self.fingerprint
            )
        default = unit([1.0] + [0.0] * (DIMENSION - 1))
        return Answer(self.vectors.get(texts[0], default), self.unknown_tokens)


@pytest.fixture
def database_urls(database: Database) -> Mapping[str, str]:
    """Connection URIs of one test's migrated database, by role."""
    return {
        INGEST: database.ingest_url,
        SEARCHER: database.searcher_url,
        MIGRATOR: database.migrator_url,
        "postgres": database.superuser_url,
    }


@pytest.fixture
def corpus(database_urls: Mapping[str, str]) -> Iterator[Corpus]:
    made = Corpus(database_urls[INGEST])
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
async def searcher_pool(database_urls: Mapping[str, str]) -> AsyncIterator[Pool]:
    pool = postgres.create_pool(
        database_urls[SEARCHER], application_name="test-search", max_size=4, timeout_seconds=2.0
    )
    await pool.open(wait=True)
    try:
        yield pool
    finally:
        await pool.close()


@pytest.fixture
def embedder() -> GivenVectors:
    return GivenVectors()


@pytest.fixture
def make_searcher(searcher_pool: Pool, embedder: GivenVectors) -> Callable[..., Searcher]:
    def make(**changes: Any) -> Searcher:
        settings = {"exact_max_candidates": 10_000, "embed_timeout_seconds": 2.0} | changes
        return Searcher(SearchableChunks(searcher_pool), embedder, **settings)

    return make


@pytest.fixture
def searcher(make_searcher: Callable[..., Searcher]) -> Searcher:
    return make_searcher()
