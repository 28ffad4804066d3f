"""Looking, paging, downloading, retrying, cancelling, deleting: over real gRPC and a real PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid

import pytest
from readymark.ingest.v1 import ingest_service_pb2 as pb

from services.ingest.blobs import blob_key
from services.ingest.lifecycle import LEGAL_PAIRS, STAGES, DocumentStatus, JobStatus
from services.ingest.repository import jobs
from shared import messages, postgres
from shared.errors import (
    ConflictError,
    InvalidArgumentError,
    LeaseLostError,
    ResourceNotFoundError,
)
from tests.ingest.conftest import Api
from tests.support.documents import (
    advance,
    claim,
    count_rows,
    fail,
    files,
    pairs,
    publish,
    retry_later,
    upload,
)

MISSING = f"collections/tests/documents/{uuid.UUID(int=7)}"


async def get(api: Api, name: str) -> pb.Document:
    return (await api.stub.GetDocument(pb.GetDocumentRequest(name=name))).document


async def bring_to(api: Api, situation: str) -> pb.Document:
    """Makes a document that stands where `situation` says."""
    document = (await upload(api.stub)).document
    if situation == "PENDING":
        return document
    lease = await claim(api.pool)
    if situation == "READY":
        await publish(api.pool, api.blobs, lease)
    elif situation == "FAILED":
        await advance(api.pool, lease, DocumentStatus.PARSING)
        await fail(api.pool, lease)
    elif situation == "WAITING":
        await retry_later(api.pool, lease)
    elif situation != "CLAIMED":
        await advance(api.pool, lease, DocumentStatus(situation))
    return await get(api, document.name)


UNSETTLED = ["PENDING", "CLAIMED", "WAITING", *map(str, STAGES)]
SITUATIONS = [*UNSETTLED, "READY", "FAILED"]


async def assert_legal(api: Api) -> None:
    """Rule J11, for every version."""
    for document, job in await pairs(api.pool):
        assert (DocumentStatus(document), JobStatus(job)) in LEGAL_PAIRS


# Rule J18: what users may do, from every status.


@pytest.mark.parametrize("situation", SITUATIONS)
async def test_j18_retry_is_for_failed_documents_only(api: Api, situation: str) -> None:
    document = await bring_to(api, situation)
    before = await pairs(api.pool)
    if situation == "FAILED":
        response = await api.stub.RetryDocument(pb.RetryDocumentRequest(name=document.name))
        assert response.document.status == pb.DOCUMENT_STATUS_PENDING
        assert not response.document.HasField("failure"), "rule D5: the reason of before is gone"
        assert await pairs(api.pool) == [("PENDING", "PENDING")]
        assert (await count_rows(api.pool))["ingestion_jobs"] == 2, "the failed job stays as history"
        assert (await claim(api.pool)).attempt == 1
    else:
        with pytest.raises(ConflictError) as caught:
            await api.stub.RetryDocument(pb.RetryDocumentRequest(name=document.name))
        assert caught.value.reason == "DOCUMENT_NOT_FAILED"
        assert await pairs(api.pool) == before
    await assert_legal(api)


@pytest.mark.parametrize("situation", SITUATIONS)
async def test_j18_cancel_is_for_unfinished_documents_only(api: Api, situation: str) -> None:
    document = await bring_to(api, situation)
    before = await pairs(api.pool)
    if situation in UNSETTLED:
        cancelled = (await api.stub.CancelDocument(pb.CancelDocumentRequest(name=document.name))).document
        assert cancelled.status == pb.DOCUMENT_STATUS_FAILED
        assert cancelled.failure.reason == "CANCELLED"
        assert not cancelled.failure.retryable
        assert await pairs(api.pool) == [("FAILED", "FAILED")]
    else:
        with pytest.raises(ConflictError) as caught:
            await api.stub.CancelDocument(pb.CancelDocumentRequest(name=document.name))
        assert caught.value.reason == "DOCUMENT_NOT_RUNNING"
        assert await pairs(api.pool) == before
    await assert_legal(api)


@pytest.mark.parametrize("situation", UNSETTLED)
async def test_d4_d5_cancelling_says_why_and_retrying_by_hand_clears_it(api: Api, situation: str) -> None:
    document = await bring_to(api, situation)

    async def shown() -> tuple[str | None, str | None]:
        async with postgres.connect(api.pool) as connection:
            cursor = await connection.execute(
                "SELECT error_message, failure ->> 'reason' AS reason FROM document_versions"
            )
            row = await cursor.fetchone()
        assert row is not None
        return row["error_message"], row["reason"]

    await api.stub.CancelDocument(pb.CancelDocumentRequest(name=document.name))
    assert await shown() == (messages.render("CANCELLED", {}), "CANCELLED")
    await api.stub.RetryDocument(pb.RetryDocumentRequest(name=document.name))
    assert await shown() == (None, None)


@pytest.mark.parametrize("situation", SITUATIONS)
async def test_d26_j18_delete_leaves_no_row_and_no_file(api: Api, situation: str) -> None:
    document = await bring_to(api, situation)
    await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=document.name))
    counts = await count_rows(api.pool)
    kept = {"tenants", "collections", "vector_spaces", "deleted_documents"}
    assert {name for name, count in counts.items() if count} <= kept
    assert files(api.blob_folder) == []
    async with postgres.connect(api.pool) as connection:
        cursor = await connection.execute("SELECT ready_chunks FROM collections")
        assert [row["ready_chunks"] for row in await cursor.fetchall()] == [0]
    with pytest.raises(ResourceNotFoundError):
        await get(api, document.name)
    with pytest.raises(ResourceNotFoundError):
        await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=document.name))
    await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=document.name, allow_missing=True))


@pytest.mark.parametrize("verb", ["cancel", "delete"])
@pytest.mark.parametrize("stage", [None, *STAGES])
async def test_j14_a_worker_of_a_cancelled_or_deleted_document_writes_nothing(
    api: Api, verb: str, stage: DocumentStatus | None
) -> None:
    document = (await upload(api.stub)).document
    lease = await claim(api.pool)
    if stage is not None:
        await advance(api.pool, lease, stage)
    if verb == "cancel":
        await api.stub.CancelDocument(pb.CancelDocumentRequest(name=document.name))
    else:
        await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=document.name))
    before = await count_rows(api.pool)
    for write in (
        jobs.begin_stage(api.pool, lease, DocumentStatus.PARSING, trace_id=None),
        jobs.report_progress(api.pool, lease, done=1, total=2, unit="pages"),
        jobs.hand_back(api.pool, lease),
        fail(api.pool, lease),
        retry_later(api.pool, lease),
    ):
        with pytest.raises(LeaseLostError):
            await write
    async with postgres.connect(api.pool) as connection:
        renewals = await jobs.renew_leases(connection, [(lease.job_id, lease.lease_epoch)])
    assert [(renewal.is_renewed, renewal.is_held) for renewal in renewals] == [(False, False)]
    assert await count_rows(api.pool) == before
    assert not (await jobs.claim_ingestion_jobs(api.pool, worker="w", lease_seconds=60, max_jobs=9)).leases


async def test_j16_a_cancelled_attempt_is_closed_in_the_history(api: Api) -> None:
    document = await bring_to(api, "EMBEDDING")
    await api.stub.CancelDocument(pb.CancelDocumentRequest(name=document.name))
    (attempt,) = (await api.stub.ListAttempts(pb.ListAttemptsRequest(name=document.name))).attempts
    assert (attempt.outcome, attempt.last_stage) == ("CANCELLED", "EMBEDDING")
    assert attempt.failure.reason == "CANCELLED"
    assert attempt.HasField("end_time")
    assert [pb.DocumentStatus.Name(stage.stage)[16:] for stage in attempt.stages] == list(STAGES[:3])


async def test_d3_a_cancelled_document_is_retried_and_the_queue_goes_on(api: Api) -> None:
    names = [(await upload(api.stub, b"%d" % number)).document.name for number in range(6)]
    for name in names:
        if random.random() < 0.5:
            await claim(api.pool)
        await api.stub.CancelDocument(pb.CancelDocumentRequest(name=name))
        await api.stub.RetryDocument(pb.RetryDocumentRequest(name=name))
    for _ in names:
        await publish(api.pool, api.blobs, await claim(api.pool))
    assert await pairs(api.pool) == [("READY", "SUCCEEDED")] * 6


async def test_cancelling_a_replacement_leaves_the_served_version_in_place(api: Api) -> None:
    await upload(api.stub, source_key="k")
    await publish(api.pool, api.blobs, await claim(api.pool))
    document = (await upload(api.stub, b"new", source_key="k")).document
    cancelled = (await api.stub.CancelDocument(pb.CancelDocumentRequest(name=document.name))).document
    assert (cancelled.status, cancelled.version) == (pb.DOCUMENT_STATUS_FAILED, 2)
    assert (cancelled.served_version, cancelled.searchable) == (1, True)
    assert (await count_rows(api.pool))["chunks_1"] == 3


async def test_d28_chaos_of_users_and_workers_leaves_no_orphan_and_no_illegal_pair(api: Api) -> None:
    keys = [f"k{number}" for number in range(4)]
    is_over = asyncio.Event()

    async def user(seed: int) -> None:
        dice = random.Random(seed)
        for turn in range(12):
            content = f"{seed}.{turn % 3}".encode()
            try:
                document = (await upload(api.stub, content, source_key=dice.choice(keys))).document
                verb = dice.choice(["cancel", "retry", "delete", "nothing"])
                if verb == "cancel":
                    await api.stub.CancelDocument(pb.CancelDocumentRequest(name=document.name))
                elif verb == "retry":
                    await api.stub.RetryDocument(pb.RetryDocumentRequest(name=document.name))
                elif verb == "delete":
                    await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=document.name))
            except (ConflictError, ResourceNotFoundError):
                pass

    async def worker(seed: int) -> None:
        dice = random.Random(seed)
        while True:
            result = await jobs.claim_ingestion_jobs(
                api.pool, worker=f"w{seed}", lease_seconds=60, max_jobs=1
            )
            if not result.leases and is_over.is_set():
                return
            for lease in result.leases:
                with contextlib.suppress(LeaseLostError):
                    if dice.random() < 0.3:
                        await fail(api.pool, lease)
                    else:
                        await publish(api.pool, api.blobs, lease)
            await asyncio.sleep(0)

    async def auditor() -> None:
        while not is_over.is_set():
            await assert_legal(api)

    workers = [asyncio.create_task(worker(seed)) for seed in range(3)]
    audit = asyncio.create_task(auditor())
    await asyncio.gather(*(user(seed) for seed in range(6)))
    is_over.set()
    await asyncio.gather(audit, *workers)
    await assert_legal(api)
    await assert_no_orphans(api)


async def assert_no_orphans(api: Api) -> None:
    counts = await count_rows(api.pool)
    async with postgres.connect(api.pool) as connection:
        cursor = await connection.execute(
            b"SELECT (SELECT coalesce(sum(v.chunk_count), 0) FROM documents d "
            b"        JOIN document_versions v ON v.version_id = d.served_version_id) AS served, "
            b"       (SELECT sum(ready_chunks) FROM collections) AS counted, "
            b"       (SELECT count(*) FROM ingestion_attempts WHERE outcome = 'RUNNING') AS open_attempts, "
            b"       (SELECT count(*) FROM blobs b WHERE NOT EXISTS "
            b"         (SELECT FROM document_versions v WHERE v.blob_sha256 = b.sha256)) AS orphaned_blobs"
        )
        row = await cursor.fetchone()
    assert row is not None
    assert row["served"] == row["counted"] == counts["chunks_1"]
    assert (row["open_attempts"], counts["chunk_staging"]) == (0, 0)


async def test_a_ready_document_whose_job_was_left_running_is_not_cancelled(api: Api) -> None:
    """The crash inside the commit window of J11: only convergence may touch that job."""
    document = await bring_to(api, "READY")
    async with postgres.connect(api.pool) as connection:
        await connection.execute(
            "UPDATE ingestion_jobs SET status = 'RUNNING', finished_at = NULL, locked_by = 'dead', "
            "locked_at = now() - interval '1 hour'"
        )
    for call in (
        api.stub.CancelDocument(pb.CancelDocumentRequest(name=document.name)),
        api.stub.RetryDocument(pb.RetryDocumentRequest(name=document.name)),
    ):
        with pytest.raises(ConflictError):
            await call
    assert await pairs(api.pool) == [("READY", "RUNNING")]
    await jobs.claim_ingestion_jobs(api.pool, worker="w", lease_seconds=60, max_jobs=1)
    assert await pairs(api.pool) == [("READY", "SUCCEEDED")]


# Deleting.


async def test_a_blob_that_another_document_needs_stays(api: Api) -> None:
    keep = pb.DuplicatePolicy.DUPLICATE_POLICY_KEEP_BOTH
    first = (await upload(api.stub)).document
    second = (await upload(api.stub, duplicate_policy=keep)).document
    await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=first.name))
    assert files(api.blob_folder) == [blob_key(second.sha256)]
    await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=second.name))
    assert files(api.blob_folder) == []


async def test_delete_with_an_old_etag_is_refused(api: Api) -> None:
    document = (await upload(api.stub)).document
    await advance(api.pool, await claim(api.pool), DocumentStatus.PARSING)
    with pytest.raises(ConflictError) as caught:
        await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=document.name, etag=document.etag))
    assert caught.value.reason == "ETAG_MISMATCH"
    document = await get(api, document.name)
    await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=document.name, etag=document.etag))


async def test_delete_waits_for_no_worker(api: Api) -> None:
    """A worker that is in the middle of a fenced write makes delete wait for that write only."""
    document = (await upload(api.stub)).document
    lease = await claim(api.pool)
    async with jobs.fenced(api.pool, lease):
        deleting = asyncio.ensure_future(
            api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=document.name))
        )
        done, _ = await asyncio.wait({deleting}, timeout=0.2)
        assert not done
    await asyncio.wait_for(deleting, 10)


# Names.


@pytest.mark.parametrize(
    "name", ["", "documents/1", "collections/a/documents/1", "collections/A/documents/x", MISSING + "/"]
)
async def test_a_malformed_name_is_refused(api: Api, name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await get(api, name)
    assert (caught.value.reason, caught.value.parameters["field"]) == ("FIELD_INVALID", "name")


async def test_a_document_is_found_under_its_collection_or_any(api: Api) -> None:
    document = (await upload(api.stub)).document
    assert await get(api, f"collections/-/documents/{document.document_id}") == document
    await upload(api.stub, parent="collections/other")
    for call in (
        api.stub.GetDocument(pb.GetDocumentRequest(name=document.name.replace("tests", "other"))),
        api.stub.CancelDocument(pb.CancelDocumentRequest(name=document.name.replace("tests", "other"))),
        api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=document.name.replace("tests", "other"))),
        api.stub.RetryDocument(pb.RetryDocumentRequest(name=MISSING)),
        api.stub.ListAttempts(pb.ListAttemptsRequest(name=MISSING)),
        api.stub.ListChunks(pb.ListChunksRequest(name=MISSING)),
    ):
        with pytest.raises(ResourceNotFoundError) as caught:
            await call
        assert caught.value.reason == "DOCUMENT_NOT_FOUND"
    assert await get(api, document.name) == document
