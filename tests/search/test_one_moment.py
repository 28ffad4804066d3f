"""Search while documents are deleted and replaced: each answer is of one moment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from deploy.local.embedded_postgres import INGEST
from services.search.query import SearchMode, SearchQuery
from services.search.retrieval import Searcher, SearchResult
from tests.support.corpus import Corpus, random_units

ALL_MODES = list(SearchMode)


async def ask(searcher: Searcher, text: str, **changes: object) -> SearchResult:
    return await searcher.search(SearchQuery(collection="c", text=text, **changes), 10.0)


async def test_a_deleted_document_is_gone_from_every_connection_at_once(
    corpus: Corpus, searcher: Searcher
) -> None:
    space = corpus.create_collection("c")
    vectors = random_units(5)
    kept = corpus.add_document(space, ["word kept"], vectors[:1])
    for _ in range(5):
        gone = corpus.add_document(space, ["word gone"] * 4, vectors[1:])
        await ask(searcher, "word")
        await asyncio.to_thread(corpus.delete_document, space, gone)
        results = await asyncio.gather(*(ask(searcher, "word", mode=mode) for mode in ALL_MODES * 4))
        for result in results:
            assert {hit.chunk.document_id for hit in result.hits} == {kept}
            assert (result.candidate_count, result.exhausted) == (1, True)


async def test_a_search_never_sees_half_of_a_replaced_document(
    database_urls: Mapping[str, str], corpus: Corpus, searcher: Searcher
) -> None:
    space = corpus.create_collection("c")
    vectors = random_units(6)
    document_id = corpus.add_document(space, ["edition0 word"] * 6, vectors)
    replaced = asyncio.Event()

    def replace_often() -> None:
        writer = Corpus(database_urls[INGEST])
        for edition in range(1, 41):
            size = 3 + edition % 5
            texts = [f"edition{edition} word"] * size
            writer.add_document(space, texts, random_units(size, seed=edition), document_id=document_id)
        writer.close()

    async def write() -> None:
        await asyncio.to_thread(replace_often)
        replaced.set()

    async def read() -> int:
        searches = 0
        while not replaced.is_set():
            result = await ask(searcher, "word", mode=ALL_MODES[searches % 3], top_k=20)
            editions = {hit.chunk.content.split()[0] for hit in result.hits}
            versions = {hit.chunk.version_number for hit in result.hits}
            assert len(editions) == 1, editions
            assert len(versions) == 1
            edition = int(editions.pop().removeprefix("edition"))
            size = 6 if edition == 0 else 3 + edition % 5
            assert (len(result.hits), result.candidate_count, result.exhausted) == (size, size, True)
            searches += 1
        return searches

    searches = (await asyncio.gather(write(), read(), read()))[1:]
    assert sum(searches) > 20
