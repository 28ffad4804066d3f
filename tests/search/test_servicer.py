"""Search over real gRPC: an embedder service, a search service, a client channel, one machine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import numpy as np
import pytest
from readymark.search.v1 import search_service_pb2 as messages
from readymark.search.v1 import search_service_pb2_grpc as contract

from services.search.repository.searchable_chunks import SearchableChunks
from services.search.retrieval import Searcher
from services.search.servicer import SearchServicer
from shared import telemetry
from shared.embedder_client import EmbedderClient
from shared.errors import (
    DeadlineExceededError,
    DependencyUnavailableError,
    InvalidArgumentError,
    ModelMismatchError,
    ResourceNotFoundError,
)
from shared.postgres import Pool
from shared.rpc.channel import create_channel
from shared.rpc.server import Serving, create_server
from tests.support.corpus import Corpus, Space
from tests.support.fake_embedder import FakeEmbedder, fake_vector, start_fake_embedder

TEXTS = ["docker 部署 guide", "queue port mismatch", "消息队列端口错配", "weather report"]


@dataclasses.dataclass
class Stack:
    search: contract.SearchServiceAsyncStub
    embedder: FakeEmbedder
    space: Space

    async def ask(self, query: str, *, timeout: float = 10.0, **fields: object) -> messages.SearchResponse:
        request = messages.SearchRequest(**{"parent": "collections/c", "query": query} | fields)
        return await self.search.Search(request, timeout=timeout)


@pytest.fixture
async def stack(corpus: Corpus, searcher_pool: Pool) -> AsyncIterator[Stack]:
    fake = FakeEmbedder()
    model = fake.behaviour
    space = corpus.create_collection("c", fingerprint=model.model_fingerprint, dimension=model.dimension)
    vectors = np.stack([fake_vector(text, model.dimension) for text in TEXTS])
    corpus.add_document(
        space,
        TEXTS,
        vectors,
        display_name="手册.pdf",
        metadata={"team": "运维", "year": 2024, "tags": ["a", "b"]},
        locator={
            "start_char": 3,
            "end_char": 9,
            "page": 2,
            "end_page": 3,
            "heading_path": ["一", "Two"],
            "a_field_of_a_newer_release": 1,
        },
    )
    embedder_address, embedding, _ = await start_fake_embedder(fake)
    client = EmbedderClient(embedder_address)
    searcher = Searcher(
        SearchableChunks(searcher_pool), client, exact_max_candidates=10_000, embed_timeout_seconds=2.0
    )
    server = create_server(service_name="test", telemetry=telemetry.setup("test"))
    servicer = SearchServicer(searcher, default_timeout_seconds=10.0, max_query_characters=100)
    contract.add_SearchServiceServicer_to_server(servicer, server)
    serving = Serving(server)
    async with create_channel(await serving.start()) as channel:
        yield Stack(contract.SearchServiceStub(channel), fake, space)
    await serving.stop(1.0)
    await client.close()
    await embedding.stop(0)


async def test_a_hit_shows_where_it_comes_from(stack: Stack) -> None:
    answer = await stack.ask("消息队列端口错配", top_k=1)
    (hit,) = answer.hits
    assert hit.content == TEXTS[2]
    assert (hit.display_name, hit.ordinal, hit.document_version) == ("手册.pdf", 2, 1)
    assert hit.document_name == f"collections/c/documents/{hit.document_id}"
    assert dict(hit.metadata) == {"team": "运维", "year": 2024, "tags": ["a", "b"]}
    assert (hit.locator.page, hit.locator.end_page) == (2, 3)
    assert (hit.locator.start_char, hit.locator.end_char) == (3, 9)
    assert list(hit.locator.heading_path) == ["一", "Two"]
    assert answer.fingerprint == stack.embedder.behaviour.model_fingerprint
    assert (answer.candidate_count, answer.exhausted) == (4, False)
    assert answer.applied_mode == messages.SEARCH_MODE_HYBRID
    assert set(answer.stage_times) == {"embed", "retrieve"}
    assert not hit.HasField("vector_score")


async def test_explain_adds_what_each_channel_said(stack: Stack) -> None:
    answer = await stack.ask("queue port mismatch", explain=True, top_k=4)
    best, *others = answer.hits
    assert best.content == TEXTS[1]
    assert best.vector_score == pytest.approx(1.0, abs=1e-3)
    assert (best.vector_rank, best.keyword_rank) == (1, 1)
    assert best.keyword_score > 0
    assert all(hit.HasField("vector_rank") and not hit.HasField("keyword_rank") for hit in others)
    assert answer.exhausted


async def test_the_query_is_embedded_as_a_query(stack: Stack) -> None:
    await stack.ask("weather")
    assert [(call.texts, call.kind) for call in stack.embedder.calls] == [(("weather",), "QUERY")]


async def test_documents_narrow_the_search(stack: Stack) -> None:
    everything = await stack.ask("weather")
    name = everything.hits[0].document_name
    assert len((await stack.ask("weather", documents=[name])).hits) == 4
    other = "collections/c/documents/00000000-0000-0000-0000-000000000000"
    answer = await stack.ask("weather", documents=[other])
    assert (len(answer.hits), answer.candidate_count, answer.exhausted) == (0, 0, True)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("query", {"query": "  "}),
        ("query", {"query": "x" * 101}),
        ("top_k", {"top_k": 201}),
        ("parent", {"parent": "c"}),
        ("mode", {"mode": 99}),
        ("documents[0]", {"documents": ["x"]}),
    ],
)
async def test_a_wrong_field_is_refused_by_name(stack: Stack, field: str, change: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await stack.ask(**{"query": "weather"} | change)
    assert (caught.value.reason, caught.value.parameters["field"]) == ("FIELD_INVALID", field)


async def test_an_unknown_collection_is_not_found(stack: Stack) -> None:
    with pytest.raises(ResourceNotFoundError) as caught:
        await stack.ask("weather", parent="collections/nowhere")
    assert caught.value.parameters["collection"] == "nowhere"


async def test_an_embedder_with_another_model_is_refused_by_both_names(stack: Stack) -> None:
    expected = stack.embedder.behaviour.model_fingerprint
    stack.embedder.behaviour.fingerprint = "another"
    for mode in (messages.SEARCH_MODE_VECTOR, messages.SEARCH_MODE_HYBRID):
        with pytest.raises(ModelMismatchError) as caught:
            await stack.ask("weather", mode=mode)
        assert caught.value.parameters == {"expected": expected, "actual": "another"}
    assert (await stack.ask("weather", mode=messages.SEARCH_MODE_KEYWORD)).hits[0].content == TEXTS[3]


async def test_a_slow_embedder_costs_a_hybrid_search_half_its_time_and_the_vectors(stack: Stack) -> None:
    stack.embedder.gate.clear()
    answer = await stack.ask("weather", timeout=1.0)
    assert list(answer.degraded_reasons) == ["VECTOR_UNAVAILABLE"]
    assert answer.applied_mode == messages.SEARCH_MODE_KEYWORD
    assert [hit.content for hit in answer.hits] == [TEXTS[3]]
    assert answer.exhausted
    stack.embedder.gate.set()
    assert not (await stack.ask("weather")).degraded_reasons


async def test_a_vector_search_without_an_embedder_fails_and_names_the_embedder(stack: Stack) -> None:
    stack.embedder.behaviour.fail_next = 1
    with pytest.raises(DependencyUnavailableError) as caught:
        await stack.ask("weather", mode=messages.SEARCH_MODE_VECTOR)
    assert caught.value.reason == "EMBEDDER_UNAVAILABLE"


async def test_a_caller_that_gives_no_time_gets_none(stack: Stack) -> None:
    stack.embedder.gate.clear()
    with pytest.raises((DeadlineExceededError, DependencyUnavailableError)):
        await stack.ask("weather", mode=messages.SEARCH_MODE_VECTOR, timeout=0.05)
    stack.embedder.gate.set()


async def test_many_searches_at_once_all_get_the_same_answer(stack: Stack) -> None:
    answers = await asyncio.gather(*(stack.ask("queue port") for _ in range(40)))
    assert {tuple(hit.chunk_id for hit in answer.hits) for answer in answers} == {
        tuple(hit.chunk_id for hit in answers[0].hits)
    }
