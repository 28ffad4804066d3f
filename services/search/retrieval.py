"""One search from question to hits: embed, look by both channels in one snapshot, fuse, load.

Owns the promises of an answer: as many hits as exist up to top_k, `exhausted` never wrong,
a channel that is left out always named, vectors of different models never compared.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from services.search import fusion
from services.search.fusion import FusedChunk, RankedChunk
from services.search.keywords import KeywordQuery, TermFrequencies, weigh
from services.search.query import SearchMode, SearchQuery
from services.search.repository.searchable_chunks import (
    CandidateCount,
    Collection,
    CollectionChangedError,
    FoundChunk,
    SearchableChunks,
    Snapshot,
)
from shared import terms
from shared.errors import (
    DeadlineExceededError,
    DependencyUnavailableError,
    InvalidArgumentError,
    ModelMismatchError,
    OverloadedError,
)
from shared.telemetry import span

VECTOR_UNAVAILABLE = "VECTOR_UNAVAILABLE"

# Each channel looks deeper than top_k: a chunk that is 30th in both lists belongs to the best ten.
MIN_DEPTH = 50
# The embedder may take this share of a hybrid search's time; the rest is for the keyword channel.
EMBED_SHARE = 0.5
# A collection that changes under every look is being rebuilt; the caller may come again.
MAX_LOOK_UPS = 3
# An index scan that the filter leaves less than a tenth of its rows loses hits and takes longer
# than comparing them all, up to a limit where it does not.
SELECTIVE_SHARE = 0.1
SELECTIVE_MAX_FACTOR = 10


class QueryEmbedding(Protocol):
    """What the embedder answers: one row a text, and tokens that the model does not know."""

    @property
    def vectors(self) -> NDArray[np.float32]: ...
    @property
    def token_counts(self) -> Sequence[int]: ...
    @property
    def unknown_token_counts(self) -> Sequence[int]: ...


class Embedder(Protocol):
    """The part of shared.embedder_client that a search uses."""

    async def embed(
        self, texts: Sequence[str], kind: Literal["QUERY"], expected_fingerprint: str, timeout_seconds: float
    ) -> QueryEmbedding: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    fused: FusedChunk
    chunk: FoundChunk


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    hits: list[Hit]
    applied_mode: SearchMode
    candidate_count: int
    exhausted: bool
    # Of the vector space that was searched; empty when there is none yet.
    fingerprint: str = ""
    degraded_reasons: tuple[str, ...] = ()
    stage_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class _QueryVector:
    """The query's vector and how much its channel may say."""

    embedding: NDArray[np.float32]
    weight: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Keywords:
    """What the keyword channel found; no more chunks than its depth, which is above top_k."""

    chunks: list[RankedChunk]
    coverage: float


_NO_KEYWORDS = _Keywords([], 0.0)


class Searcher:
    """Answers questions. `exact_max_candidates`: up to so many, every vector is compared."""

    def __init__(
        self,
        chunks: SearchableChunks,
        embedder: Embedder,
        *,
        exact_max_candidates: int,
        embed_timeout_seconds: float,
    ) -> None:
        self._chunks = chunks
        self._embedder = embedder
        self._exact_max_candidates = exact_max_candidates
        self._embed_timeout_seconds = embed_timeout_seconds
        self._frequencies = TermFrequencies()

    async def search(self, query: SearchQuery, timeout_seconds: float) -> SearchResult:
        """Returns the answer within `timeout_seconds`, or raises the error that says why not."""
        ends_at = time.monotonic() + timeout_seconds
        for _ in range(MAX_LOOK_UPS):
            collection = await self._chunks.get_collection(query.collection)
            try:
                return await self._search(query, collection, ends_at)
            except CollectionChangedError:
                self._chunks.forget_collection(query.collection)
            except ModelMismatchError:
                # It may be the collection that has moved on, and the embedder with it.
                self._chunks.forget_collection(query.collection)
                if await self._chunks.get_collection(query.collection) == collection:
                    raise
        raise OverloadedError("OVERLOADED", retry_after_seconds=1.0)

    async def _search(self, query: SearchQuery, collection: Collection, ends_at: float) -> SearchResult:
        if collection.fingerprint is None:
            # No document has come as far as its first vector.
            return SearchResult(hits=[], applied_mode=query.mode, candidate_count=0, exhausted=True)
        started = time.monotonic()
        vector = None
        if query.mode is not SearchMode.KEYWORD:
            with span("embed"):
                vector = await self._embed(query, collection, ends_at - started)
        embedded = time.monotonic()
        with span("retrieve"):
            result = await self._retrieve(query, collection, vector, ends_at - embedded)
        stages = {"embed": embedded - started, "retrieve": time.monotonic() - embedded}
        return dataclasses.replace(result, fingerprint=collection.fingerprint, stage_seconds=stages)

    async def _embed(
        self, query: SearchQuery, collection: Collection, remaining_seconds: float
    ) -> _QueryVector | None:
        """Returns None when a hybrid search has to do without a vector."""
        is_hybrid = query.mode is SearchMode.HYBRID
        share = remaining_seconds * EMBED_SHARE if is_hybrid else remaining_seconds
        assert collection.fingerprint is not None
        try:
            answer = await self._embedder.embed(
                [query.text],
                kind="QUERY",
                expected_fingerprint=collection.fingerprint,
                timeout_seconds=min(share, self._embed_timeout_seconds),
            )
        except (DependencyUnavailableError, OverloadedError, DeadlineExceededError) as error:
            if is_hybrid:
                return None
            raise DependencyUnavailableError(
                "EMBEDDER_UNAVAILABLE", retry_after_seconds=error.retry_after_seconds or 1.0
            ) from error
        except InvalidArgumentError as error:
            facts = dict(error.parameters) | {"field": "query"}
            raise InvalidArgumentError(error.reason, retry_after_seconds=None, **facts) from error
        embedding = answer.vectors[0]
        if embedding.shape != (collection.dimension,):
            raise ModelMismatchError(
                "EMBEDDING_MODEL_MISMATCH",
                expected=f"{collection.fingerprint} ({collection.dimension})",
                actual=f"({embedding.shape[0]})",
            )
        unknown_share = answer.unknown_token_counts[0] / max(1, answer.token_counts[0])
        return _QueryVector(embedding, fusion.vector_weight(unknown_share))

    async def _retrieve(
        self,
        query: SearchQuery,
        collection: Collection,
        vector: _QueryVector | None,
        remaining_seconds: float,
    ) -> SearchResult:
        depth = max(MIN_DEPTH, 2 * query.top_k)
        async with self._chunks.snapshot(
            collection, timeout_seconds=remaining_seconds, depth=depth
        ) as snapshot:
            count = await snapshot.count_candidates(query.document_ids)
            near, keywords = await self._look(snapshot, query, count, vector, depth)
            vector_weight, keyword_weight = _weights(query.mode, vector, keywords)
            fused = fusion.fuse(
                near,
                keywords.chunks,
                vector_weight=vector_weight,
                keyword_weight=keyword_weight,
                limit=query.top_k,
            )
            loading = await snapshot.load_chunks([chunk.key for chunk in fused])
        found = await loading.result()
        # Holds here: a chunk row exists only for the served version of its document.
        assert len(found) == len(fused), f"{len(fused) - len(found)} chunks have no served document"
        # By vector every candidate is a hit in the end, by keyword only what matches.
        hits_in_all = len(keywords.chunks) if vector is None else count.candidate_count
        is_degraded = vector is None and query.mode is SearchMode.HYBRID
        return SearchResult(
            hits=[Hit(chunk, found[chunk.key]) for chunk in fused],
            applied_mode=SearchMode.KEYWORD if vector is None else query.mode,
            candidate_count=count.candidate_count,
            exhausted=len(fused) >= hits_in_all,
            degraded_reasons=(VECTOR_UNAVAILABLE,) if is_degraded else (),
        )

    async def _look(
        self,
        snapshot: Snapshot,
        query: SearchQuery,
        count: CandidateCount,
        vector: _QueryVector | None,
        depth: int,
    ) -> tuple[list[RankedChunk], _Keywords]:
        """Returns what both channels found; they share a round trip."""
        words = await self._weigh(snapshot, query, count)
        exact = is_exact(count, self._exact_max_candidates)
        documents = query.document_ids
        near_sent = matching_sent = None
        if vector is not None:
            near_sent = await snapshot.nearest(vector.embedding, depth, exact=exact, document_ids=documents)
        if words is not None:
            matching_sent = await snapshot.best_by_keywords(words, depth, document_ids=documents)
        near: list[RankedChunk] = []
        keywords = _NO_KEYWORDS
        if vector is not None and near_sent is not None:
            near = await near_sent.result()
            if not exact and len(near) < min(depth, count.candidate_count):
                # An index scan gives up at its limits of memory and tuples; comparing all does not.
                again = await snapshot.nearest(vector.embedding, depth, exact=True, document_ids=documents)
                near = await again.result()
        if words is not None and matching_sent is not None:
            matching = await matching_sent.result()
            if vector is None and not words.is_wide and len(matching.chunks) <= query.top_k:
                # The gate hides chunks that contain only common terms. The vector channel would
                # fill up with them; without it they are hits all the same.
                wide = await snapshot.best_by_keywords(words.widened(), depth, document_ids=documents)
                matching = await wide.result()
            coverage = fusion.keyword_coverage(words.weights, matching.best_terms)
            keywords = _Keywords(matching.chunks, coverage)
        return near, keywords

    async def _weigh(
        self, snapshot: Snapshot, query: SearchQuery, count: CandidateCount
    ) -> KeywordQuery | None:
        """Returns None when the keyword channel has nothing to look for."""
        if query.mode is SearchMode.VECTOR:
            return None
        asked = terms.query_terms(query.text, snapshot.collection_id)
        if not asked:
            return None
        frequencies = await self._frequencies.look_up(
            snapshot, snapshot.collection_id, count.ready_chunks, list(asked)
        )
        return weigh(asked, frequencies, count.ready_chunks)


def _weights(mode: SearchMode, vector: _QueryVector | None, keywords: _Keywords) -> tuple[float, float]:
    if mode is SearchMode.VECTOR:
        return 1.0, 0.0
    if vector is None:
        return 0.0, 1.0
    return vector.weight, fusion.keyword_weight(keywords.coverage, vector.weight)


def is_exact(count: CandidateCount, exact_max_candidates: int) -> bool:
    """True when comparing every candidate is the better plan than an index scan."""
    if count.candidate_count <= exact_max_candidates:
        return True
    return (
        count.candidate_count < count.ready_chunks * SELECTIVE_SHARE
        and count.candidate_count <= exact_max_candidates * SELECTIVE_MAX_FACTOR
    )
