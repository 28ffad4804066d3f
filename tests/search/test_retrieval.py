"""What an answer promises: hits, `exhausted`, named degradation, one model."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping

import numpy as np
import psycopg
import pytest

from deploy.local.embedded_postgres import SEARCHER
from services.search.query import SearchMode, SearchQuery
from services.search.repository.searchable_chunks import SearchableChunks
from services.search.retrieval import VECTOR_UNAVAILABLE, Searcher, SearchResult
from shared import postgres
from shared.errors import (
    DependencyUnavailableError,
    InvalidArgumentError,
    ModelMismatchError,
    OverloadedError,
    ReadymarkError,
    ResourceNotFoundError,
)
from tests.search.conftest import GivenVectors
from tests.support.corpus import DIMENSION, Corpus, create_partial_index, random_units, unit

ALL_MODES = list(SearchMode)


async def ask(searcher: Searcher, text: str, **changes: object) -> SearchResult:
    return await searcher.search(SearchQuery(collection="c", text=text, **changes), 10.0)


def contents(result: SearchResult) -> list[str]:
    return [hit.chunk.content for hit in result.hits]


async def test_an_unknown_collection_is_named(searcher: Searcher) -> None:
    with pytest.raises(ResourceNotFoundError) as caught:
        await ask(searcher, "anything")
    assert caught.value.reason == "COLLECTION_NOT_FOUND"
    assert caught.value.parameters == {"collection": "c"}


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("fingerprint", [None, "f" * 64])
async def test_a_collection_without_ready_documents_is_empty_and_exhausted(
    corpus: Corpus, searcher: Searcher, mode: SearchMode, fingerprint: str | None
) -> None:
    space = corpus.create_collection("c", fingerprint=fingerprint)
    corpus.add_unready_document(space, "PENDING")
    result = await ask(searcher, "anything", mode=mode)
    assert (result.hits, result.candidate_count, result.exhausted) == ([], 0, True)


@pytest.mark.parametrize("exact_max_candidates", [0, 10_000])
async def test_d3_ten_hits_come_although_95_of_100_documents_are_not_ready(
    corpus: Corpus,
    make_searcher: Callable[..., Searcher],
    embedder: GivenVectors,
    exact_max_candidates: int,
) -> None:
    space = corpus.create_collection("c")
    vectors = random_units(12, seed=3)
    embedder.vectors["needle"] = vectors[0]
    ready = {corpus.add_document(space, ["needle text"], vectors[i : i + 1]) for i in range(12)}
    for number in range(228):
        corpus.add_unready_document(space, ["PARSING", "EMBEDDING", "INDEXING", "FAILED"][number % 4])
    searcher = make_searcher(exact_max_candidates=exact_max_candidates)
    for mode in ALL_MODES:
        result = await ask(searcher, "needle", mode=mode)
        assert len(result.hits) == 10
        assert {hit.chunk.document_id for hit in result.hits} <= ready
        assert (result.candidate_count, result.exhausted) == (12, False)


@pytest.mark.parametrize("status", ["PENDING", "INDEXING", "FAILED"])
async def test_d3_search_goes_on_with_the_served_version_whatever_becomes_of_a_newer_one(
    corpus: Corpus, searcher: Searcher, status: str
) -> None:
    space = corpus.create_collection("c")
    document_id = corpus.add_document(space, ["word one", "word two"], random_units(2))
    corpus.add_version(space, document_id, status=status)
    for mode in ALL_MODES:
        for document_ids in (None, (document_id,)):
            result = await ask(searcher, "word", mode=mode, document_ids=document_ids)
            assert sorted(contents(result)) == ["word one", "word two"]
            assert {hit.chunk.version_number for hit in result.hits} == {1}
            assert (result.candidate_count, result.exhausted) == (2, True)


async def test_a_filter_gives_as_many_hits_as_exist_and_says_when_there_are_no_more(
    database_urls: Mapping[str, str],
    corpus: Corpus,
    make_searcher: Callable[..., Searcher],
    embedder: GivenVectors,
) -> None:
    space = corpus.create_collection("c")
    vectors = random_units(1_000, seed=1)
    embedder.vectors["common"] = -vectors[0]
    sizes = [500, 300, 100, 90, 9, 1]
    documents, start = [], 0
    for size in sizes:
        texts = [f"common word{number}" for number in range(size)]
        documents.append((corpus.add_document(space, texts, vectors[start : start + size]), size))
        start += size
    create_partial_index(database_urls["postgres"], space)
    for exact_max_candidates in (0, 10_000):
        searcher = make_searcher(exact_max_candidates=exact_max_candidates)
        for document_id, size in documents:
            for top_k in (1, 10, 100, 200):
                for mode in ALL_MODES:
                    result = await ask(
                        searcher, "common", mode=mode, top_k=top_k, document_ids=(document_id,)
                    )
                    assert len(result.hits) == min(top_k, size), (size, top_k, mode)
                    assert result.candidate_count == size
                    assert result.exhausted == (top_k >= size), (size, top_k, mode)
                    assert {hit.chunk.document_id for hit in result.hits} == {document_id}


async def test_an_index_scan_that_falls_short_is_made_up_for(
    database_urls: Mapping[str, str], corpus: Corpus, embedder: GivenVectors
) -> None:
    space = corpus.create_collection("c")
    vectors = random_units(1_000, seed=1)
    corpus.add_document(space, ["word"] * 850, vectors[:850])
    few = corpus.add_document(space, ["word"] * 150, vectors[850:])
    create_partial_index(database_urls["postgres"], space)
    with psycopg.connect(database_urls["postgres"], autocommit=True) as owner:
        # The planner has to take the index, which without iterative scans gives its nearest
        # 200 rows, whatever the filter.
        for setting in ("hnsw.iterative_scan", "enable_sort"):
            owner.execute(f"ALTER ROLE {SEARCHER} IN DATABASE {owner.info.dbname} SET {setting} = 'off'")
    pool = postgres.create_pool(database_urls[SEARCHER], application_name="test")
    await pool.open(wait=True)
    try:
        searcher = Searcher(
            SearchableChunks(pool), embedder, exact_max_candidates=0, embed_timeout_seconds=2.0
        )
        result = await ask(searcher, "word", mode=SearchMode.VECTOR, top_k=100, document_ids=(few,))
        assert (len(result.hits), result.candidate_count, result.exhausted) == (100, 150, False)
    finally:
        await pool.close()


async def test_the_same_answer_holds_for_a_smaller_top_k(corpus: Corpus, searcher: Searcher) -> None:
    space = corpus.create_collection("c")
    corpus.add_document(space, [f"common word{n % 7}" for n in range(300)], random_units(300, seed=2))
    for mode in ALL_MODES:
        longest = await ask(searcher, "common word3", mode=mode, top_k=25)
        shorter = await ask(searcher, "common word3", mode=mode, top_k=7)
        assert [hit.chunk.chunk_id for hit in shorter.hits] == [
            hit.chunk.chunk_id for hit in longest.hits[:7]
        ]


async def test_a_filter_by_an_unknown_document_finds_nothing(corpus: Corpus, searcher: Searcher) -> None:
    space = corpus.create_collection("c")
    corpus.add_document(space, ["word"], random_units(1))
    result = await ask(searcher, "word", document_ids=(uuid.uuid4(),))
    assert (result.hits, result.candidate_count, result.exhausted) == ([], 0, True)


async def test_chunks_of_other_collections_in_the_same_table_are_never_hits(
    corpus: Corpus, searcher: Searcher
) -> None:
    space, other = corpus.create_collection("c"), corpus.create_collection("other")
    assert space.chunk_table == other.chunk_table
    corpus.add_document(other, ["word word word"] * 30, np.repeat(random_units(1), 30, axis=0))
    mine = corpus.add_document(space, ["word"], random_units(1))
    for mode in ALL_MODES:
        result = await ask(searcher, "word", mode=mode)
        assert [hit.chunk.document_id for hit in result.hits] == [mine]
        assert (result.candidate_count, result.exhausted) == (1, True)


async def test_keyword_search_is_exhausted_only_after_chunks_that_contain_only_common_terms(
    corpus: Corpus, searcher: Searcher
) -> None:
    space = corpus.create_collection("c")
    # "common" stands in more than 1,000 chunks, so that it opens no gate of its own.
    vectors = random_units(1, seed=5)
    for _ in range(3):
        corpus.add_document(space, ["common thing"] * 400, np.repeat(vectors, 400, axis=0))
    corpus.add_document(space, ["rare common thing"] * 4, np.repeat(vectors, 4, axis=0))
    result = await ask(searcher, "rare common", mode=SearchMode.KEYWORD, top_k=10)
    assert contents(result)[:4] == ["rare common thing"] * 4
    assert len(result.hits) == 10
    assert not result.exhausted
    result = await ask(searcher, "rare", mode=SearchMode.KEYWORD, top_k=10)
    assert (len(result.hits), result.exhausted) == (4, True)
    result = await ask(searcher, "absent common", mode=SearchMode.KEYWORD, top_k=10)
    assert (len(result.hits), result.exhausted) == (10, False)


CHINESE = [
    "消息队列端口错配会导致连接失败。",
    "队列积压时请扩容。",
    "用 docker 部署服务。",
    "go deployment 指南：部署步骤。",
    "原野上的风。",
    "型号 ABC123 的说明。",
]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("队列端口错配", CHINESE[0]),
        ("队列", CHINESE[1]),
        ("部署", CHINESE[2]),
        ("docker 部署", CHINESE[2]),
        ("go 部署 deployment", CHINESE[3]),
        ("野", CHINESE[4]),
        ("ＡＢＣ１２３", CHINESE[5]),
    ],
)
@pytest.mark.parametrize("mode", [SearchMode.KEYWORD, SearchMode.HYBRID])
async def test_chinese_and_mixed_queries_find_the_text_that_contains_them(
    corpus: Corpus, searcher: Searcher, embedder: GivenVectors, query: str, expected: str, mode: SearchMode
) -> None:
    space = corpus.create_collection("c")
    # All vectors are alike: what tells the texts apart is their words.
    corpus.add_document(space, CHINESE, np.repeat(random_units(1), len(CHINESE), axis=0))
    found = contents(await ask(searcher, query, mode=mode))
    assert expected in found[:2]
    if mode is SearchMode.KEYWORD:
        assert len(found) < len(CHINESE)


@pytest.mark.parametrize("mode", [SearchMode.VECTOR, SearchMode.HYBRID])
async def test_vectors_of_another_model_are_never_compared(
    corpus: Corpus, searcher: Searcher, embedder: GivenVectors, mode: SearchMode
) -> None:
    space = corpus.create_collection("c")
    corpus.add_document(space, ["word"], random_units(1))
    embedder.fingerprint = "e" * 64
    with pytest.raises(ModelMismatchError) as caught:
        await ask(searcher, "word", mode=mode)
    assert caught.value.reason == "EMBEDDING_MODEL_MISMATCH"
    assert caught.value.parameters == {"expected": "f" * 64, "actual": "e" * 64}
    assert contents(await ask(searcher, "word", mode=SearchMode.KEYWORD)) == ["word"]


async def test_a_vector_of_another_dimension_is_refused(
    corpus: Corpus, searcher: Searcher, embedder: GivenVectors
) -> None:
    space = corpus.create_collection("c")
    corpus.add_document(space, ["word"], random_units(1))
    embedder.vectors["word"] = unit([1.0] * (DIMENSION + 1))
    with pytest.raises(ModelMismatchError):
        await ask(searcher, "word")


FAULTS = [
    DependencyUnavailableError("EMBEDDER_UNAVAILABLE"),
    OverloadedError("EMBEDDER_OVERLOADED", retry_after_seconds=3.0),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.reason for fault in FAULTS])
async def test_without_an_embedder_a_hybrid_search_answers_by_keyword_and_says_so(
    corpus: Corpus, searcher: Searcher, embedder: GivenVectors, fault: ReadymarkError
) -> None:
    space = corpus.create_collection("c")
    corpus.add_document(space, ["word one", "other two"], random_units(2))
    embedder.fault = fault
    result = await ask(searcher, "word")
    assert contents(result) == ["word one"]
    assert result.applied_mode is SearchMode.KEYWORD
    assert result.degraded_reasons == (VECTOR_UNAVAILABLE,)
    assert result.exhausted
    assert result.candidate_count == 2
    with pytest.raises(DependencyUnavailableError) as caught:
        await ask(searcher, "word", mode=SearchMode.VECTOR)
    assert caught.value.retry_after_seconds


async def test_a_collection_made_anew_under_its_old_name_is_the_one_that_is_searched(
    corpus: Corpus, searcher: Searcher, embedder: GivenVectors
) -> None:
    space = corpus.create_collection("c")
    gone = corpus.add_document(space, ["word old"], random_units(1))
    assert contents(await ask(searcher, "word")) == ["word old"]
    corpus.delete_document(space, gone)
    corpus.connection.execute("DELETE FROM collections WHERE collection_id = %s", (space.collection_id,))
    with pytest.raises(ResourceNotFoundError):
        await ask(searcher, "word")
    embedder.fingerprint = "e" * 64
    remade = corpus.create_collection("c", fingerprint=embedder.fingerprint)
    corpus.add_document(remade, ["word new"], random_units(1))
    assert contents(await ask(searcher, "word")) == ["word new"]


async def test_a_collection_that_moved_to_another_model_is_searched_by_that_model(
    corpus: Corpus, searcher: Searcher, embedder: GivenVectors
) -> None:
    space = corpus.create_collection("c")
    await ask(searcher, "word")
    corpus.create_collection("other", fingerprint="e" * 64)
    corpus.connection.execute(
        "UPDATE collections SET vector_space_id = (SELECT vector_space_id FROM vector_spaces "
        "WHERE fingerprint = %s) WHERE collection_id = %s",
        ("e" * 64, space.collection_id),
    )
    embedder.fingerprint = "e" * 64
    assert (await ask(searcher, "word", mode=SearchMode.VECTOR)).fingerprint == "e" * 64
    embedder.fingerprint = "f" * 64
    with pytest.raises(ModelMismatchError):
        await ask(searcher, "word", mode=SearchMode.VECTOR)


async def test_keyword_search_does_not_ask_the_embedder(
    corpus: Corpus, searcher: Searcher, embedder: GivenVectors
) -> None:
    space = corpus.create_collection("c")
    corpus.add_document(space, ["word"], random_units(1))
    result = await ask(searcher, "word", mode=SearchMode.KEYWORD)
    assert embedder.asked == []
    assert result.degraded_reasons == ()


async def test_a_hybrid_search_leaves_the_keyword_channel_half_of_its_time(
    corpus: Corpus, searcher: Searcher, embedder: GivenVectors
) -> None:
    space = corpus.create_collection("c")
    corpus.add_document(space, ["word"], random_units(1))
    await searcher.search(SearchQuery(collection="c", text="word"), 1.0)
    text, kind, timeout_seconds = embedder.asked[0]
    assert (text, kind) == ("word", "QUERY")
    assert 0.3 < timeout_seconds <= 0.5


async def test_what_the_model_refuses_is_a_fault_of_the_query(
    corpus: Corpus, searcher: Searcher, embedder: GivenVectors
) -> None:
    space = corpus.create_collection("c")
    corpus.add_document(space, ["word"], random_units(1))
    embedder.fault = InvalidArgumentError("INPUT_TOO_LONG", index=0, tokens=900, limit=512)
    with pytest.raises(InvalidArgumentError) as caught:
        await ask(searcher, "word")
    assert caught.value.parameters["field"] == "query"
    assert "900" in caught.value.message()


async def test_a_query_of_signs_only_is_found_by_vector_and_by_no_keyword(
    corpus: Corpus, searcher: Searcher
) -> None:
    space = corpus.create_collection("c")
    corpus.add_document(space, ["word", "other"], random_units(2))
    assert len((await ask(searcher, "?!")).hits) == 2
    result = await ask(searcher, "?!", mode=SearchMode.KEYWORD)
    assert (result.hits, result.exhausted) == ([], True)


async def test_an_unknown_language_leaves_the_word_to_the_keyword_channel(
    corpus: Corpus, searcher: Searcher, embedder: GivenVectors
) -> None:
    space = corpus.create_collection("c")
    # The right chunk is the last by vector, and so far behind that the channel does not see it.
    vectors = random_units(80, seed=9)
    corpus.add_document(space, [f"filler number{n}" for n in range(79)] + ["队列端口"], vectors)
    embedder.vectors["队列端口"] = -vectors[79]
    assert contents(await ask(searcher, "队列端口"))[0] != "队列端口"
    embedder.unknown_tokens = 8
    assert contents(await ask(searcher, "队列端口"))[0] == "队列端口"


async def test_names_shared_by_chance_do_not_outvote_the_vector(
    corpus: Corpus, searcher: Searcher, embedder: GivenVectors
) -> None:
    space = corpus.create_collection("c")
    vectors = random_units(40, seed=9)
    corpus.add_document(space, ["丹佛野马队的防守"] + [f"Denver {n}" for n in range(39)], vectors)
    query = "How many points did the Denver defense give up?"
    embedder.vectors[query] = vectors[0]
    assert contents(await ask(searcher, query))[0] == "丹佛野马队的防守"
