"""Looking at documents: lists, attempts, chunks, downloads, the queue; real gRPC, real PostgreSQL."""

from __future__ import annotations

import datetime
import hashlib
import random
import uuid

import pytest
from readymark.ingest.v1 import ingest_service_pb2 as pb

from services.ingest import snapshots
from services.ingest.blobs import blob_key
from services.ingest.repository import jobs, publication
from shared import postgres
from shared.errors import (
    InvalidArgumentError,
    ReadymarkError,
    ResourceNotFoundError,
)
from tests.ingest.conftest import Api
from tests.support.documents import claim, fail, files, make_chunk, publish, retry_later, upload

MISSING = f"collections/tests/documents/{uuid.UUID(int=7)}"


async def get(api: Api, name: str) -> pb.Document:
    return (await api.stub.GetDocument(pb.GetDocumentRequest(name=name))).document


async def list_all(api: Api, **fields: object) -> list[pb.Document]:
    found: list[pb.Document] = []
    token = ""
    while True:
        request = pb.ListDocumentsRequest(page_token=token, **fields)
        page = await api.stub.ListDocuments(request)
        found += page.documents
        token = page.next_page_token
        if not token:
            return found


async def test_d15_documents_are_listed_from_the_start_and_stay_when_they_fail(api: Api) -> None:
    document = (await upload(api.stub)).document
    assert [found.name for found in await list_all(api, parent="collections/tests")] == [document.name]
    await fail(api.pool, await claim(api.pool))
    (found,) = await list_all(api, parent="collections/tests")
    assert (found.name, found.status) == (document.name, pb.DOCUMENT_STATUS_FAILED)


async def test_a_list_skips_and_repeats_nothing_while_documents_come_and_go(api: Api) -> None:
    names = [(await upload(api.stub, b"%d" % number)).document.name for number in range(20)]
    seen: list[str] = []
    token = ""
    for turn in range(50):
        page = await api.stub.ListDocuments(
            pb.ListDocumentsRequest(parent="collections/tests", page_size=3, page_token=token)
        )
        seen += [document.name for document in page.documents]
        token = page.next_page_token
        if not token:
            break
        # One comes in front, one that was shown goes.
        await upload(api.stub, b"new %d" % turn)
        await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=seen[-1]))
    assert seen == names[::-1]


async def test_documents_of_one_moment_are_paged_by_their_id(api: Api) -> None:
    names = {(await upload(api.stub, b"%d" % number)).document.name for number in range(7)}
    async with postgres.connect(api.pool) as connection:
        await connection.execute("UPDATE documents SET created_at = '2024-01-01 00:00:00.123456+00'")
    listed = [document.name for document in await list_all(api, parent="collections/tests", page_size=2)]
    assert len(listed) == 7
    assert set(listed) == names


async def test_a_list_is_of_one_collection_or_all_and_of_one_status_or_all(api: Api) -> None:
    await upload(api.stub, parent="collections/a")
    await fail(api.pool, await claim(api.pool))
    await upload(api.stub, parent="collections/a", content=b"2")
    await upload(api.stub, parent="collections/b")
    assert len(await list_all(api, parent="collections/a")) == 2
    assert len(await list_all(api, parent="collections/-", page_size=1)) == 3
    failed = await list_all(api, parent="collections/-", status=pb.DOCUMENT_STATUS_FAILED)
    assert [document.collection for document in failed] == ["a"]
    for parent, reason in (("collections/c", "COLLECTION_NOT_FOUND"), ("", "FIELD_REQUIRED")):
        with pytest.raises(ReadymarkError) as caught:
            await list_all(api, parent=parent)
        assert caught.value.reason == reason


async def test_a_page_token_is_good_for_its_own_list_only(api: Api) -> None:
    for number in range(3):
        document = (await upload(api.stub, b"%d" % number)).document
    request = pb.ListDocumentsRequest(parent="collections/tests", page_size=1)
    token = (await api.stub.ListDocuments(request)).next_page_token
    failed = pb.DOCUMENT_STATUS_FAILED
    for call in (
        api.stub.ListDocuments(pb.ListDocumentsRequest(parent="collections/-", page_token=token)),
        api.stub.ListDocuments(
            pb.ListDocumentsRequest(parent="collections/tests", page_token=token, status=failed)
        ),
        api.stub.ListDocuments(pb.ListDocumentsRequest(parent="collections/tests", page_token="文字")),
        api.stub.ListDocuments(pb.ListDocumentsRequest(parent="collections/tests", page_token=token[:-3])),
        api.stub.ListAttempts(pb.ListAttemptsRequest(name=document.name, page_token=token)),
        api.stub.ListChunks(pb.ListChunksRequest(name=document.name, page_token=token)),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            await call
        assert caught.value.reason == "PAGE_TOKEN_INVALID"
    with pytest.raises(InvalidArgumentError):
        await api.stub.ListDocuments(pb.ListDocumentsRequest(parent="collections/tests", page_size=-1))


async def test_attempts_are_listed_newest_first_in_pages(api: Api) -> None:
    name = (await upload(api.stub)).document.name
    for _ in range(2):
        await retry_later(api.pool, await claim(api.pool), delay_seconds=0)
    await fail(api.pool, await claim(api.pool))
    await api.stub.RetryDocument(pb.RetryDocumentRequest(name=name))
    await claim(api.pool)
    attempts: list[pb.Attempt] = []
    token = ""
    while True:
        page = await api.stub.ListAttempts(pb.ListAttemptsRequest(name=name, page_size=2, page_token=token))
        attempts += page.attempts
        token = page.next_page_token
        if not token:
            break
    assert [attempt.outcome for attempt in attempts] == ["RUNNING", "FAILED", "RETRY_LATER", "RETRY_LATER"]
    assert [attempt.number for attempt in attempts] == [1, 3, 2, 1]
    assert attempts[2].failure.retryable


# Chunks and files.


def snapshot_of(lease: jobs.Lease, count: int) -> bytes:
    return snapshots.write_snapshot(
        snapshots.Snapshot(
            written_at=datetime.datetime.now(datetime.UTC),
            document_id=lease.document_id,
            version=lease.version_number,
            source_sha256=lease.blob_sha256,
            media_type="text/plain",
            title=None,
            parser_fingerprint="parser",
            chunker_fingerprint="chunker",
            page_count=None,
            warnings=(),
            assets=(),
            chunks=tuple(make_chunk(lease, ordinal) for ordinal in range(count)),
        )
    )


async def test_chunks_are_paged_in_order_out_of_the_snapshot(api: Api) -> None:
    name = (await upload(api.stub)).document.name
    with pytest.raises(ResourceNotFoundError) as caught:
        await api.stub.ListChunks(pb.ListChunksRequest(name=name))
    assert caught.value.reason == "VERSION_NOT_FOUND"
    lease = await claim(api.pool)
    await publish(api.pool, api.blobs, lease, chunk_count=5, snapshot=snapshot_of(lease, 5))
    chunks: list[pb.Chunk] = []
    token = ""
    while True:
        page = await api.stub.ListChunks(pb.ListChunksRequest(name=name, page_size=2, page_token=token))
        assert page.version == 1
        chunks += page.chunks
        token = page.next_page_token
        if not token:
            break
    assert [chunk.ordinal for chunk in chunks] == list(range(5))
    assert chunks[4].content == "chunk 4 of version 1"
    with pytest.raises(ResourceNotFoundError):
        await api.stub.ListChunks(pb.ListChunksRequest(name=name, version=2))


async def download(api: Api, **fields: str) -> tuple[bytes, str, int]:
    pieces = [piece async for piece in api.stub.DownloadBlob(pb.DownloadBlobRequest(**fields))]
    assert all(not piece.media_type and not piece.total_bytes for piece in pieces[1:])
    return b"".join(piece.data for piece in pieces), pieces[0].media_type, pieces[0].total_bytes


async def test_the_original_comes_back_byte_for_byte(api: Api) -> None:
    content = random.Random(1).randbytes(3 << 20)
    document = (await upload(api.stub, content, display_name="x.pdf", media_type="application/pdf")).document
    data, media_type, total_bytes = await download(api, name=document.name)
    assert hashlib.sha256(data).hexdigest() == document.sha256
    assert (media_type, total_bytes) == ("application/pdf", len(content))
    await api.blobs.delete(blob_key(document.sha256))
    with pytest.raises(ResourceNotFoundError) as caught:
        await download(api, name=document.name)
    assert caught.value.reason == "BLOB_MISSING"


async def test_an_asset_comes_back_and_an_unknown_one_is_not_found(api: Api) -> None:
    document = (await upload(api.stub)).document
    lease = await claim(api.pool)
    await publish(api.pool, api.blobs, lease)
    image = b"\x89PNG..."
    sha256 = hashlib.sha256(image).hexdigest()
    await api.blobs.put_bytes(blob_key(sha256), image)
    asset_id = str(publication.asset_id(lease.document_id, sha256))
    async with postgres.transaction(api.pool) as connection:
        await connection.execute(
            "INSERT INTO blobs (sha256, size_bytes) VALUES (%s, %s)", (sha256, len(image))
        )
        await connection.execute(
            "INSERT INTO assets (version_id, sha256, asset_id, media_type, size_bytes) "
            "VALUES (%s, %s, %s, 'image/png', %s)",
            (lease.version_id, sha256, asset_id, len(image)),
        )
    assert await download(api, name=document.name, asset_id=asset_id) == (image, "image/png", len(image))
    for unknown in (str(uuid.uuid4()), "no uuid"):
        with pytest.raises(ResourceNotFoundError) as caught:
            await download(api, name=document.name, asset_id=unknown)
        assert caught.value.reason == "ASSET_NOT_FOUND"
    await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=document.name))
    assert files(api.blob_folder) == []


async def test_the_queue_is_measured_for_one_collection_or_all(api: Api) -> None:
    await upload(api.stub)
    await publish(api.pool, api.blobs, await claim(api.pool))
    await upload(api.stub, parent="collections/other")
    await upload(api.stub, b"2", parent="collections/other")
    await claim(api.pool)
    every = await api.stub.GetQueueStats(pb.GetQueueStatsRequest())
    assert dict(every.documents_by_status) == {"READY": 1, "PENDING": 2}
    assert dict(every.jobs_by_status) == {"SUCCEEDED": 1, "PENDING": 1, "RUNNING": 1}
    assert (every.ready_last_minute, every.live_workers, every.served_chunks) == (1, 1, 3)
    assert every.HasField("oldest_pending_age")
    one = await api.stub.GetQueueStats(pb.GetQueueStatsRequest(parent="collections/tests"))
    assert (dict(one.documents_by_status), one.HasField("oldest_pending_age")) == ({"READY": 1}, False)
