"""An upload arrives whole and once, whatever the line does, and never costs memory by its size."""

from __future__ import annotations

import hashlib
import time
import tracemalloc
import uuid

import grpc
import pytest
import readymark_client as sdk
from google.rpc import code_pb2
from readymark.ingest.v1 import ingest_service_pb2 as pb
from readymark_client.upload import FRAME_BYTES

from tests.client.conftest import CuttingProxy


class Store:
    """What an ingest service would have kept: one entry a complete upload."""

    def __init__(self):
        self.request_ids = []
        self.complete = []
        self.frames = []

    async def upload(self, frames, context):
        header, content, trailer = None, b"", None
        async for message in frames:
            kind = message.WhichOneof("frame")
            if kind == "header":
                header = message.header
                self.request_ids.append(header.request_id)
            elif kind == "data":
                self.frames.append(len(message.data))
                content += message.data
            else:
                trailer = message.trailer
        if trailer is None:
            # A cut stream may simply end: without a trailer nothing is known to be complete.
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no trailer")
        self.complete.append((header, content, trailer))
        document = pb.Document(document_id="d1", display_name=header.display_name)
        return pb.UploadDocumentResponse(document=document, created=True)


async def test_a_file_arrives_with_header_frames_and_checksum(ingest, client, tmp_path):
    store = Store()
    ingest.handlers["UploadDocument"] = store.upload
    content = bytes(range(256)) * 3000
    path = tmp_path / "handbook.bin"
    path.write_bytes(content)
    told = []
    document = await client.submit(
        path,
        "manuals",
        source_key="k",
        metadata={"team": "ops", "year": 2025},
        on_duplicate="replace",
        on_sent=lambda sent, total: told.append((sent, total)),
    )
    [(header, received, trailer)] = store.complete
    assert received == content
    assert (trailer.sha256, trailer.size_bytes) == (hashlib.sha256(content).hexdigest(), len(content))
    assert (header.parent, header.display_name, header.size_bytes) == (
        "collections/manuals",
        "handbook.bin",
        len(content),
    )
    assert header.duplicate_policy == pb.DUPLICATE_POLICY_REPLACE
    assert dict(header.metadata) == {"team": "ops", "year": 2025}
    assert uuid.UUID(header.request_id)
    assert max(store.frames) == FRAME_BYTES
    assert told[-1] == (len(content), len(content))
    assert not document.already_existed


async def test_an_upload_over_a_cut_connection_is_sent_again_whole_under_one_request_id(ingest, tmp_path):
    store = Store()
    ingest.handlers["UploadDocument"] = store.upload
    content = b"0123456789abcdef" * 200_000
    path = tmp_path / "large.txt"
    path.write_bytes(content)
    proxy = CuttingProxy(ingest.address, cut_after_bytes=700_000, cuts=2)
    async with sdk.AsyncReadymark(await proxy.start()) as client:
        document = await client.submit(path)
    await proxy.stop()
    assert document.document_id == "d1"
    assert proxy.cuts_done == 2
    # The service may have seen nothing yet of a try that was cut.
    assert 1 <= len(store.request_ids) <= 3
    assert len(set(store.request_ids)) == 1
    assert [received for _, received, _ in store.complete] == [content]


async def test_inline_text_is_repeated_under_one_request_id(ingest, client, refuse):
    seen = []

    async def create(request, context):
        seen.append((request.header.request_id, request.text))
        if len(seen) < 3:
            await refuse(context, code_pb2.UNAVAILABLE, "UNAVAILABLE", "DATABASE_UNAVAILABLE")
        return pb.CreateDocumentResponse(document=pb.Document(document_id="d1"), created=False)

    ingest.handlers["CreateDocument"] = create
    document = await client.submit("年假制度", display_name="note.md")
    assert document.already_existed
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert seen[0][1] == "年假制度"


async def test_a_refusal_at_the_header_ends_a_huge_upload_at_once(ingest, client, refuse, tmp_path):
    async def upload(frames, context):
        message = await anext(aiter(frames))
        assert message.header.size_bytes == 2 << 30
        await refuse(
            context, code_pb2.INVALID_ARGUMENT, "INVALID_DOCUMENT", "TOO_LARGE", actual="2", limit="1"
        )

    ingest.handlers["UploadDocument"] = upload
    path = tmp_path / "sparse.txt"
    with path.open("wb") as file:
        file.truncate(2 << 30)
    started_at = time.monotonic()
    with pytest.raises(sdk.InvalidDocument) as caught:
        await client.submit(path)
    assert caught.value.reason == "TOO_LARGE"
    # Reading and hashing two gigabytes takes longer than this.
    assert time.monotonic() - started_at < 1.0


async def test_memory_does_not_grow_with_the_file(ingest, client, tmp_path):
    received = 0

    async def upload(frames, context):
        nonlocal received
        async for message in frames:
            received += len(message.data)
        return pb.UploadDocumentResponse(document=pb.Document(document_id="d1"), created=True)

    ingest.handlers["UploadDocument"] = upload
    path = tmp_path / "sparse.txt"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    await client.submit(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert received == 64 << 20
    assert peak_bytes < 8 << 20


@pytest.mark.parametrize("name", ["missing.txt", "."])
async def test_a_path_that_cannot_be_read_is_named_before_any_call(ingest, client, tmp_path, name):
    with pytest.raises(sdk.InvalidArgument) as caught:
        await client.submit(tmp_path / name)
    assert caught.value.reason == "FILE_NOT_READABLE"
    assert str(tmp_path) in caught.value.message
    assert ingest.metadata == []
