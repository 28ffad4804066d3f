"""The service over real gRPC on a loopback port, with the real multilingual model."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from readymark.embedder.v1 import embedder_service_pb2 as pb
from readymark.embedder.v1 import embedder_service_pb2_grpc as pb_grpc

from services.embedder.embedding import TextEmbedder, load_embedder
from services.embedder.lanes import Lane
from services.embedder.model_files import ModelFiles
from services.embedder.servicer import EmbedderServicer
from services.embedder.settings import EmbedderSettings
from shared import telemetry
from shared.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ModelMismatchError,
    OverloadedError,
)
from shared.rpc.channel import create_channel
from shared.rpc.server import Serving, create_server

pytestmark = pytest.mark.asyncio(loop_scope="module")
TIMEOUT = 60.0


class Running:
    """A served embedder and a client of it."""

    def __init__(self, embedder: TextEmbedder, address: str, channel: grpc.aio.Channel) -> None:
        self.embedder = embedder
        self.address = address
        self.stub: Any = pb_grpc.EmbedderServiceStub(channel)

    async def embed(
        self, texts: Sequence[str], input_type: int = pb.INPUT_TYPE_DOCUMENT, **fields: Any
    ) -> pb.EmbedResponse:
        timeout = fields.pop("timeout", TIMEOUT)
        request = pb.EmbedRequest(inputs=texts, input_type=input_type, **fields)
        return await self.stub.Embed(request, timeout=timeout)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(e5_files: ModelFiles) -> AsyncIterator[Running]:
    settings = EmbedderSettings(
        model=str(e5_files.folder), max_batch_inputs=200, max_batch_bytes=100_000, max_queued_tokens=8_000
    )
    embedder = load_embedder(settings)
    embedder.scheduler.start()
    await embedder.warm_up()
    server = create_server(service_name="embedder", telemetry=telemetry.setup("embedder"))
    pb_grpc.add_EmbedderServiceServicer_to_server(EmbedderServicer(embedder), server)
    serving = Serving(server)
    address = await serving.start()
    channel = create_channel(address)
    yield Running(embedder, address, channel)
    await channel.close()
    await serving.stop(1)
    await embedder.close()


def vectors(response: pb.EmbedResponse) -> np.ndarray:
    return np.frombuffer(response.vectors, "<f4").reshape(-1, response.dimension)


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it did not come to hold within ten seconds")


def documents(count: int, words: int) -> list[str]:
    return [f"Document {number} " + "tells of annual leave. " * (words // 4) for number in range(count)]


async def test_the_model_says_who_it_is_and_what_it_takes(served: Running, e5_files: ModelFiles) -> None:
    model = (await served.stub.GetModel(pb.GetModelRequest(), timeout=TIMEOUT)).model
    assert (model.model_id, model.fingerprint) == ("multilingual-e5-small", e5_files.fingerprint())
    assert (model.dimension, model.max_input_tokens, model.normalized) == (384, 512, True)
    assert (model.pooling, model.query_prefix, model.document_prefix) == ("mean", "query: ", "passage: ")
    assert (model.max_batch_inputs, model.max_batch_bytes) == (200, 100_000)
    assert (model.document_overhead_tokens, model.unknown_token_id) == (4, 3)
    assert list(model.execution_providers) == ["CPUExecutionProvider"]


async def test_every_text_gets_a_unit_vector_and_its_counts_in_order(served: Running) -> None:
    texts = ["员工每年享有十五天带薪年假。", "short", *documents(20, 40)]
    response = await served.embed(texts)
    assert response.fingerprint == served.embedder.model.fingerprint
    assert np.allclose(np.linalg.norm(vectors(response), axis=1), 1, atol=1e-5)
    assert len(response.token_counts) == len(response.unknown_token_counts) == len(texts)
    assert response.token_counts[1] == 5, "prefix and special tokens are counted"
    for index, text in enumerate(texts):
        alone = await served.embed([text])
        assert np.array_equal(vectors(alone)[0], vectors(response)[index])
        assert alone.token_counts[0] == response.token_counts[index]


async def test_a_text_is_another_vector_as_query_than_as_document(served: Running) -> None:
    query = await served.embed(["annual leave"], pb.INPUT_TYPE_QUERY)
    document = await served.embed(["annual leave"], pb.INPUT_TYPE_DOCUMENT)
    assert float(vectors(query)[0] @ vectors(document)[0]) < 0.99


async def test_the_tokenizer_arrives_byte_for_byte(served: Running, e5_files: ModelFiles) -> None:
    request = pb.DownloadTokenizerRequest(expected_fingerprint=served.embedder.model.fingerprint)
    pieces = [piece.data async for piece in served.stub.DownloadTokenizer(request, timeout=TIMEOUT)]
    content = b"".join(pieces)
    assert content == await asyncio.to_thread(e5_files.tokenizer.read_bytes)
    assert hashlib.sha256(content).hexdigest() == served.embedder.model.tokenizer_sha256


async def test_an_over_long_text_is_refused_by_index_unless_truncation_is_asked_for(served: Running) -> None:
    long = "leave " * 2000
    with pytest.raises(InvalidArgumentError) as caught:
        await served.embed(["fine", long])
    assert caught.value.reason == "INPUT_TOO_LONG"
    assert (caught.value.parameters["index"], caught.value.parameters["limit"]) == ("1", "512")
    cut = await served.embed(["fine", long], truncation_policy=pb.TRUNCATION_POLICY_END)
    assert list(cut.truncated) == [False, True]
    assert cut.token_counts[1] == 512


async def test_texts_that_are_equal_up_to_the_limit_are_told_to_be_cut(served: Running) -> None:
    same = "leave " * 600
    cut = await served.embed([same + "one", same + "two"], truncation_policy=pb.TRUNCATION_POLICY_END)
    assert list(cut.truncated) == [True, True]
    assert np.array_equal(*vectors(cut))


@pytest.mark.parametrize(
    ("texts", "fields", "reason"),
    [
        (["a", " \n"], {}, "INPUT_EMPTY"),
        ([], {}, "FIELD_REQUIRED"),
        (["a"] * 201, {}, "TOO_MANY_INPUTS"),
        (["年" * 20_000] * 2, {}, "TOO_MANY_BYTES"),
        (["a"], {"input_type": pb.INPUT_TYPE_UNSPECIFIED}, "FIELD_REQUIRED"),
        (["a"], {"input_type": 77}, "FIELD_INVALID"),
        (["a"], {"truncation_policy": 77}, "FIELD_INVALID"),
    ],
)
async def test_a_call_outside_the_contract_is_refused_with_its_reason(
    served: Running, texts: list[str], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await served.embed(texts, **fields)
    assert caught.value.reason == reason


async def test_another_model_than_expected_is_refused_with_both_names(served: Running) -> None:
    with pytest.raises(ModelMismatchError) as caught:
        await served.embed(["a"], expected_fingerprint="0" * 64)
    assert caught.value.parameters["expected"] == "0" * 64
    assert caught.value.parameters["actual"] == served.embedder.model.fingerprint
    with pytest.raises(ModelMismatchError):
        async for _ in served.stub.DownloadTokenizer(
            pb.DownloadTokenizerRequest(expected_fingerprint="0" * 64), timeout=TIMEOUT
        ):
            pass


async def test_the_status_of_a_refusal_is_the_canonical_one(served: Running) -> None:
    async with grpc.aio.insecure_channel(served.address) as channel:
        stub: Any = pb_grpc.EmbedderServiceStub(channel)
        request = pb.EmbedRequest(inputs=["leave " * 2000], input_type=pb.INPUT_TYPE_DOCUMENT)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Embed(request, timeout=TIMEOUT)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_query_is_answered_while_a_bulk_call_is_still_computed(served: Running) -> None:
    bulk = asyncio.ensure_future(served.embed(documents(150, 40)))
    await until(lambda: served.embedder.scheduler.queued_tokens(Lane.DOCUMENT) > 0)
    await asyncio.gather(*(served.embed([f"leave {n}"], pb.INPUT_TYPE_QUERY) for n in range(3)))
    assert not bulk.done()
    await bulk


async def test_a_call_that_its_caller_gave_up_leaves_the_queue(served: Running) -> None:
    bulk = asyncio.ensure_future(served.embed(documents(150, 40)))
    await until(lambda: served.embedder.scheduler.queued_tokens(Lane.DOCUMENT) > 0)
    bulk.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bulk
    await until(lambda: served.embedder.scheduler.queued_tokens(Lane.DOCUMENT) == 0)


async def test_far_too_many_calls_are_all_answered_at_once_or_told_to_come_back(served: Running) -> None:
    texts = documents(4, 240)
    calls = [served.embed([f"{number} {text}" for text in texts]) for number in range(40)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert len(refused) < len(answers)
    assert refused, "40 calls of 1,500 tokens do not fit into a queue of 8,000"
    for error in refused:
        assert isinstance(error, OverloadedError | DeadlineExceededError)
        assert error.reason == "EMBEDDER_OVERLOADED"
        assert error.retry_after_seconds
    assert len((await served.embed(["still alive"])).token_counts) == 1
