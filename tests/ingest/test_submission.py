"""Submission over real gRPC and a real PostgreSQL: what is accepted, refused, and left behind."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator

import grpc
import psutil
import pytest
from readymark.ingest.v1 import ingest_service_pb2 as pb

from services.ingest.blobs import blob_key
from services.ingest.header import DocumentHeader
from services.ingest.repository import documents
from services.ingest.submission import Frame, SubmissionService, Trailer
from shared import postgres
from shared.errors import (
    ConflictError,
    DeadlineExceededError,
    DependencyUnavailableError,
    InvalidArgumentError,
    InvalidDocumentError,
    ModelMismatchError,
    OverloadedError,
    ReadymarkError,
    ResourceNotFoundError,
)
from tests.ingest.conftest import Api, StartApi
from tests.support.documents import (
    FINGERPRINT,
    claim,
    count_rows,
    files,
    header,
    pairs,
    publish,
    upload,
    upload_requests,
)


async def assert_nothing_kept(api: Api) -> None:
    counts = await count_rows(api.pool)
    assert {name for name, count in counts.items() if count} <= {"tenants", "collections", "vector_spaces"}
    for _ in range(200):
        # The dropped writer removes its part file on a thread of the store.
        if not files(api.blob_folder):
            return
        await asyncio.sleep(0.01)
    assert files(api.blob_folder) == []


async def test_j1_document_version_and_job_are_there_at_once(api: Api) -> None:
    response = await upload(api.stub, b"hello")
    assert response.created
    assert await pairs(api.pool) == [("PENDING", "PENDING")]
    document = response.document
    assert (document.version, document.attempts, document.max_attempts) == (1, 0, 3)
    assert document.sha256 == hashlib.sha256(b"hello").hexdigest()
    assert await api.blobs.get_bytes(blob_key(document.sha256)) == b"hello"
    assert files(api.blob_folder) == [blob_key(document.sha256)]
    async with postgres.connect(api.pool) as connection:
        cursor = await connection.execute("SELECT traceparent FROM ingestion_jobs")
        row = await cursor.fetchone()
    assert row is not None
    assert row["traceparent"].split("-")[1] == document.trace_id != ""


@pytest.mark.parametrize("step", ["remember_request", "hold_blob", "create_document", "settle_request"])
async def test_j1_a_crash_in_between_leaves_nothing(
    api: Api, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    done = getattr(documents, step)

    async def dying(connection: postgres.Connection, *args: object, **kwargs: object) -> None:
        await done(connection, *args, **kwargs)
        # The server process of this connection dies, as it would with the machine.
        await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    monkeypatch.setattr(documents, step, dying)
    with pytest.raises(DependencyUnavailableError):
        await upload(api.stub, request_id=str(uuid.uuid4()))
    monkeypatch.undo()
    counts = await count_rows(api.pool)
    assert {name for name, count in counts.items() if count} == {"tenants"}
    # A file under its hash may be left, which the sweep removes; never one under a key of an upload.
    assert all(name.startswith("blobs/") for name in files(api.blob_folder))


async def test_the_job_is_announced_when_it_can_be_claimed(api: Api) -> None:
    async with postgres.connect(api.pool) as connection:
        await connection.execute("LISTEN readymark_jobs")
        await upload(api.stub)
        notes = [note async for note in connection.notifies(timeout=10, stop_after=1)]
    assert [note.channel for note in notes] == ["readymark_jobs"]
    assert (await claim(api.pool)).attempt == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"parent": "collections/-"}, "FIELD_INVALID"),
        ({"parent": "collections/Upper"}, "FIELD_INVALID"),
        ({"parent": "collections/a/b"}, "FIELD_INVALID"),
        ({"parent": ""}, "FIELD_INVALID"),
        ({"parent": "collections/" + "a" * 64}, "FIELD_INVALID"),
        ({"request_id": "not a uuid"}, "FIELD_INVALID"),
        ({"source_key": "a\0b"}, "FIELD_INVALID"),
        ({"source_key": "k" * 1025}, "FIELD_INVALID"),
        ({"metadata": {"big": "x" * (64 << 10)}}, "FIELD_INVALID"),
        ({"metadata": {"nul": "a\0b"}}, "FIELD_INVALID"),
        ({"metadata": {"number": float("nan")}}, "FIELD_INVALID"),
        ({"size_bytes": -1}, "FIELD_INVALID"),
        ({"display_name": "film.mp4"}, "UNSUPPORTED_TYPE"),
        ({"media_type": "video/mp4"}, "UNSUPPORTED_TYPE"),
    ],
)
async def test_a_bad_header_is_refused_and_nothing_kept(
    api: Api, fields: dict[str, object], reason: str
) -> None:
    with pytest.raises(ReadymarkError) as caught:
        await upload(api.stub, **fields)
    assert caught.value.reason == reason
    await assert_nothing_kept(api)


async def test_a_declared_size_over_the_limit_is_refused_before_any_data_is_read(start_api: StartApi) -> None:
    api = await start_api(max_upload_bytes=1000)
    asked_for_data = asyncio.Event()

    async def requests() -> AsyncIterator[pb.UploadDocumentRequest]:
        yield pb.UploadDocumentRequest(header=header(size_bytes=2 << 30))
        # Data never comes: the answer must not wait for it.
        await asyncio.Event().wait()
        asked_for_data.set()

    with pytest.raises(InvalidDocumentError) as caught:
        await api.stub.UploadDocument(requests(), timeout=10)
    assert (caught.value.reason, caught.value.parameters["limit"]) == ("TOO_LARGE", "1000")
    assert not asked_for_data.is_set()
    await assert_nothing_kept(api)


async def test_an_undeclared_size_is_refused_where_it_passes_the_limit(start_api: StartApi) -> None:
    api = await start_api(max_upload_bytes=1000)
    with pytest.raises(InvalidDocumentError) as caught:
        await upload(api.stub, b"x" * 1001)
    assert caught.value.reason == "TOO_LARGE"
    await assert_nothing_kept(api)
    assert (await upload(api.stub, b"x" * 1000)).created


@pytest.mark.parametrize(
    ("content", "trailer", "reason"),
    [
        (b"text", pb.UploadTrailer(sha256="0" * 64, size_bytes=4), "CHECKSUM_MISMATCH"),
        (b"text", pb.UploadTrailer(size_bytes=4), "CHECKSUM_MISMATCH"),
        (
            b"text",
            pb.UploadTrailer(sha256=hashlib.sha256(b"text").hexdigest(), size_bytes=5),
            "SIZE_MISMATCH",
        ),
        (b"", None, "EMPTY_DOCUMENT"),
        (b"text\0with a nul", None, "BINARY_OR_UNKNOWN"),
    ],
)
async def test_bytes_that_do_not_match_leave_nothing(
    api: Api, content: bytes, trailer: pb.UploadTrailer | None, reason: str
) -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        await api.stub.UploadDocument(upload_requests(content, trailer=trailer))
    assert caught.value.reason == reason
    await assert_nothing_kept(api)


async def test_utf_16_text_is_not_taken_for_binary(api: Api) -> None:
    assert (await upload(api.stub, "文字 text".encode("utf-16"))).created


async def test_an_upload_without_a_trailer_leaves_nothing(api: Api) -> None:
    async def requests() -> AsyncIterator[pb.UploadDocumentRequest]:
        yield pb.UploadDocumentRequest(header=header())
        yield pb.UploadDocumentRequest(data=b"half of it")

    with pytest.raises(InvalidArgumentError) as caught:
        await api.stub.UploadDocument(requests())
    assert caught.value.reason == "TRAILER_EXPECTED"
    await assert_nothing_kept(api)


async def test_data_before_the_header_and_a_second_header_are_refused(api: Api) -> None:
    async def data_first() -> AsyncIterator[pb.UploadDocumentRequest]:
        yield pb.UploadDocumentRequest(data=b"text")

    async def two_headers() -> AsyncIterator[pb.UploadDocumentRequest]:
        yield pb.UploadDocumentRequest(header=header())
        yield pb.UploadDocumentRequest(header=header())

    async def nothing() -> AsyncIterator[pb.UploadDocumentRequest]:
        return
        yield

    for requests in (data_first(), two_headers(), nothing()):
        with pytest.raises(InvalidArgumentError) as caught:
            await api.stub.UploadDocument(requests)
        assert caught.value.reason == "HEADER_EXPECTED"
    await assert_nothing_kept(api)


@pytest.mark.parametrize("character", ["a", "键", "😀"])
async def test_a_key_that_no_index_could_hold_is_refused_by_its_bytes(api: Api, character: str) -> None:
    longest = 2048 // len(character.encode())
    key = character * min(longest, 1024)
    assert (await upload(api.stub, b"x", source_key=key)).created
    if longest < 1024:
        with pytest.raises(InvalidArgumentError) as caught:
            await upload(api.stub, b"y", source_key=character * (longest + 1))
        assert caught.value.parameters["problem"] == "TOO_MANY_BYTES"


async def test_a_policy_of_another_release_is_refused_not_guessed(api: Api) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await upload(api.stub, duplicate_policy=77)
    assert caught.value.parameters["field"] == "duplicate_policy"
    with pytest.raises(InvalidArgumentError):
        await api.stub.ListDocuments(pb.ListDocumentsRequest(parent="collections/-", status=77))


async def test_a_stalled_upload_is_ended_and_leaves_nothing(start_api: StartApi) -> None:
    api = await start_api(upload_idle_seconds=0.2)

    async def requests() -> AsyncIterator[pb.UploadDocumentRequest]:
        yield pb.UploadDocumentRequest(header=header())
        yield pb.UploadDocumentRequest(data=b"x" * (6 << 20))
        await asyncio.Event().wait()

    with pytest.raises(DeadlineExceededError) as caught:
        await api.stub.UploadDocument(requests(), timeout=30)
    assert caught.value.reason == "UPLOAD_STALLED"
    await assert_nothing_kept(api)


async def test_a_client_that_goes_away_leaves_nothing(api: Api) -> None:
    is_sent = asyncio.Event()

    async def requests() -> AsyncIterator[pb.UploadDocumentRequest]:
        yield pb.UploadDocumentRequest(header=header())
        for _ in range(3):
            yield pb.UploadDocumentRequest(data=b"x" * (4 << 20))
        is_sent.set()
        await asyncio.Event().wait()

    call = asyncio.ensure_future(api.stub.UploadDocument(requests()))
    await is_sent.wait()
    for _ in range(500):
        if files(api.blob_folder):
            break
        await asyncio.sleep(0.01)
    assert files(api.blob_folder), "the upload should have begun to be stored"
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await assert_nothing_kept(api)


async def test_memory_stays_constant_whatever_the_size(start_api: StartApi) -> None:
    api = await start_api()
    # Warmed up first: what the first upload allocates once is not what grows with size.
    await api.stub.UploadDocument(upload_requests([b"x" * (1 << 20)] * 12))
    process = psutil.Process()
    before = process.memory_info().rss
    highest = before
    piece = b"a line of text that is a document\n" * 7_000  # 238 kB
    count = (50 << 20) // len(piece)
    digest = hashlib.sha256()

    async def requests() -> AsyncIterator[pb.UploadDocumentRequest]:
        nonlocal highest
        yield pb.UploadDocumentRequest(header=header())
        for _ in range(count):
            digest.update(piece)
            yield pb.UploadDocumentRequest(data=piece)
            highest = max(highest, process.memory_info().rss)
        trailer = pb.UploadTrailer(sha256=digest.hexdigest(), size_bytes=count * len(piece))
        yield pb.UploadDocumentRequest(trailer=trailer)

    response = await api.stub.UploadDocument(requests())
    assert response.document.size_bytes == count * len(piece)
    # Client and server share this process, so the server alone takes even less.
    assert highest - before < 30 << 20


async def test_inline_content_is_accepted_up_to_its_limit(api: Api) -> None:
    request = pb.CreateDocumentRequest(header=header(), text="内联文本")
    assert (await api.stub.CreateDocument(request)).document.size_bytes == 12
    with pytest.raises(InvalidArgumentError) as caught:
        await api.stub.CreateDocument(pb.CreateDocumentRequest(header=header(), data=b"x" * ((1 << 20) + 1)))
    assert caught.value.reason == "INLINE_TOO_LARGE"


async def test_the_display_name_is_only_a_label(api: Api) -> None:
    response = await upload(api.stub, display_name="../../etc/pass\nwd\0.txt")
    assert response.document.display_name == "passwd.txt"
    assert (await upload(api.stub, b"2", display_name="..")).document.display_name == "untitled"


async def test_metadata_comes_back_as_it_was_sent(api: Api) -> None:
    metadata = {"year": 2024, "tags": ["a", "中文"], "nested": {"ok": True, "none": None}, "share": 0.5}
    document = (await upload(api.stub, metadata=metadata)).document
    got = (await api.stub.GetDocument(pb.GetDocumentRequest(name=document.name))).document
    assert got.metadata == document.metadata == header(metadata=metadata).metadata


# Request ids.


async def test_d25_twenty_parallel_calls_with_one_id_make_one_document(api: Api) -> None:
    request_id = str(uuid.uuid4())
    responses = await asyncio.gather(*(upload(api.stub, request_id=request_id) for _ in range(20)))
    assert len({response.document.name for response in responses}) == 1
    assert all(response.created for response in responses), "every call gets the first answer"
    counts = await count_rows(api.pool)
    assert (counts["documents"], counts["document_versions"], counts["ingestion_jobs"]) == (1, 1, 1)
    assert len(files(api.blob_folder)) == 1


async def test_a_repeated_id_answers_with_the_state_of_now(api: Api) -> None:
    request_id = str(uuid.uuid4())
    first = await upload(api.stub, request_id=request_id)
    await publish(api.pool, api.blobs, await claim(api.pool))
    again = await upload(api.stub, request_id=request_id)
    assert (again.document.name, again.created) == (first.document.name, True)
    assert again.document.status == pb.DOCUMENT_STATUS_READY
    await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=first.document.name))
    with pytest.raises(ResourceNotFoundError):
        await upload(api.stub, request_id=request_id)


@pytest.mark.parametrize(
    "other", [{"content": b"other"}, {"source_key": "k"}, {"metadata": {"a": 1}}, {"parent": "collections/b"}]
)
async def test_an_id_used_for_something_else_is_refused(api: Api, other: dict[str, object]) -> None:
    request_id = str(uuid.uuid4())
    await upload(api.stub, request_id=request_id)
    before = await count_rows(api.pool)
    with pytest.raises(ConflictError) as caught:
        await upload(api.stub, request_id=request_id, **other)
    assert caught.value.reason == "REQUEST_ID_REUSED"
    assert await count_rows(api.pool) == before
    assert len(files(api.blob_folder)) == 1


async def test_an_id_is_forgotten_after_a_day(api: Api) -> None:
    request_id = str(uuid.uuid4())
    await upload(api.stub, request_id=request_id)
    async with postgres.connect(api.pool) as connection:
        await connection.execute("UPDATE request_ids SET created_at = now() - interval '25 hours'")
    assert (await upload(api.stub, b"other", request_id=request_id)).created


# The model at the door.


class Embedder:
    def __init__(self, fingerprint: str | None) -> None:
        self.fingerprint = fingerprint
        self.calls = 0

    async def refresh_model(self) -> Embedder:
        self.calls += 1
        if self.fingerprint is None:
            raise DependencyUnavailableError("EMBEDDER_UNAVAILABLE")
        return self


async def _bind_collection(api: Api) -> None:
    await upload(api.stub)
    await publish(api.pool, api.blobs, await claim(api.pool))


async def _submission_with(api: Api, embedder: Embedder | None) -> SubmissionService:
    from services.ingest.model_check import ModelCheck
    from services.ingest.repository.documents import JobTerms

    return SubmissionService(
        api.pool,
        api.blobs,
        model_check=ModelCheck(embedder),
        terms=JobTerms(max_attempts=3, retry_delay_seconds=1, lease_seconds=60),
        max_upload_bytes=1000,
        idle_seconds=10,
        max_uploads=2,
    )


async def test_more_uploads_than_fit_are_told_to_come_back(api: Api) -> None:
    """Each upload holds some megabytes: without a limit idle clients could take all the memory."""
    submission = await _submission_with(api, None)
    begun, release = asyncio.Semaphore(0), asyncio.Event()

    async def frames(held: bool) -> AsyncIterator[Frame]:
        yield DocumentHeader(
            parent="collections/tests", display_name=f"{held}.txt", duplicate_policy="KEEP_BOTH"
        )
        if held:
            begun.release()
            await release.wait()
        yield b"text"
        yield Trailer(hashlib.sha256(b"text").hexdigest(), 4)

    holding = [asyncio.create_task(submission.upload(frames(held=True))) for _ in range(2)]
    for _ in holding:
        await begun.acquire()
    with pytest.raises(OverloadedError) as refused:
        await submission.upload(frames(held=False))
    assert refused.value.retry_after_seconds == 1.0
    release.set()
    await asyncio.gather(*holding)
    assert (await submission.upload(frames(held=False))).created


async def test_d29_a_collection_of_another_model_takes_no_document(api: Api) -> None:
    await _bind_collection(api)
    before, stored = await count_rows(api.pool), files(api.blob_folder)
    submission = await _submission_with(api, Embedder("e" * 64))
    with pytest.raises(ModelMismatchError) as caught:
        await submission.create(DocumentHeader(parent="collections/tests"), b"new")
    assert dict(caught.value.parameters) == {"expected": "f" * 12, "actual": "e" * 12}
    assert (await count_rows(api.pool), files(api.blob_folder)) == (before, stored)
    assert (await submission.create(DocumentHeader(parent="collections/unbound"), b"new")).created


@pytest.mark.parametrize("fingerprint", [FINGERPRINT, None])
async def test_the_same_model_or_none_that_answers_takes_documents(api: Api, fingerprint: str | None) -> None:
    await _bind_collection(api)
    embedder = Embedder(fingerprint)
    submission = await _submission_with(api, embedder)
    for content in (b"1", b"2", b"3"):
        assert (await submission.create(DocumentHeader(parent="collections/tests"), content)).created
    assert embedder.calls == 1, "the answer, or its absence, is remembered for a while"


async def test_an_embedder_address_where_nobody_answers_refuses_nobody(start_api: StartApi) -> None:
    api = await start_api(embedder_address="127.0.0.1:1")
    await _bind_collection(api)
    assert (await upload(api.stub, b"new")).created


async def test_a_store_that_is_down_is_named_and_nothing_is_kept(api: Api) -> None:
    (api.blob_folder / "uploads").write_text("a file where a folder has to be")
    with pytest.raises(DependencyUnavailableError) as caught:
        await upload(api.stub)
    assert caught.value.reason == "STORAGE_UNAVAILABLE"
    assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)
    assert (await count_rows(api.pool))["documents"] == 0
