"""Calls that no honest client makes, over raw gRPC: refused by name, never answered as a fault of ours."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable

import grpc.aio
import pytest
from readymark.ingest.v1 import ingest_service_pb2 as ingest_pb
from readymark.ingest.v1 import ingest_service_pb2_grpc as ingest_grpc
from readymark.search.v1 import search_service_pb2 as search_pb
from readymark.search.v1 import search_service_pb2_grpc as search_grpc
from readymark_client import AsyncReadymark

from services.ingest import page_tokens
from tests.support.processes import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def test_no_call_of_a_hostile_client_is_answered_as_our_fault(cluster: Cluster) -> None:
    """What cannot be right is refused by name, whatever a client makes up; no stack trace, no retry."""
    cluster.fake_embedder()
    cluster.ingest()
    cluster.search()
    async with AsyncReadymark(cluster.addresses["ingest"], cluster.addresses["search"]) as client:
        name = (await client.submit("Some text about a pump.")).name
        document_id = name.rsplit("/", 1)[-1]
        huge = 10**30
        async with grpc.aio.insecure_channel(cluster.addresses["ingest"]) as ingest_channel:
            ingest = ingest_grpc.IngestServiceStub(ingest_channel)
            async with grpc.aio.insecure_channel(cluster.addresses["search"]) as search_channel:
                search = search_grpc.SearchServiceStub(search_channel)
                codes = {
                    "collection with NUL": await code_of(
                        search.Search(search_pb.SearchRequest(parent="collections/a\0b", query="pump"))
                    ),
                    "query with NUL": await code_of(
                        search.Search(search_pb.SearchRequest(parent="collections/default", query="a\0b"))
                    ),
                }
            for key in ([huge, 1], [1, huge], [-1, 1], [1 << 63, 1], [1 << 31, 0], ["x", 1], [True, 1]):
                for list_name in (f"attempts {document_id}", f"chunks {document_id} 0"):
                    token = page_tokens.encode(list_name, *key)
                    call = (
                        ingest.ListChunks(ingest_pb.ListChunksRequest(name=name, page_token=token))
                        if list_name.startswith("chunks")
                        else ingest.ListAttempts(ingest_pb.ListAttemptsRequest(name=name, page_token=token))
                    )
                    codes[f"{list_name.split()[0]} {key}"] = await code_of(call)
            for asset_id in ("urn:uuid:" + document_id, "{" + document_id + "}", "x" * 10_000, "a\0b"):
                stream = ingest.DownloadBlob(ingest_pb.DownloadBlobRequest(name=name, asset_id=asset_id))
                codes[f"asset {asset_id[:20]}"] = await code_of(anext(aiter(stream)))
            for label, frames in malformed_uploads().items():
                codes[label] = await code_of(ingest.UploadDocument(iter(frames)))
        answers = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}
        # A token that is well formed and names no row is an empty page.
        allowed = answers | {"OK"}
        assert {label: code for label, code in codes.items() if code not in allowed} == {}
        assert {code for label, code in codes.items() if "upload" in label} <= answers


def malformed_uploads() -> dict[str, list[ingest_pb.UploadDocumentRequest]]:
    frame = ingest_pb.UploadDocumentRequest
    header = frame(header=ingest_pb.DocumentHeader(parent="collections/default", display_name="a.txt"))
    data = frame(data=b"some text")
    digest = hashlib.sha256(b"some text").hexdigest()
    trailer = frame(trailer=ingest_pb.UploadTrailer(sha256=digest, size_bytes=9))
    return {
        "upload of nothing": [],
        "upload without header": [data, trailer],
        "upload with two headers": [header, header, data, trailer],
        "upload with a header in the middle": [header, data, header, trailer],
        "upload without trailer": [header, data],
        "upload of a trailer alone": [header, trailer],
    }


async def code_of(call: Awaitable[object]) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"
