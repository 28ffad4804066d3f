"""What a submission does about a document that is there already: policies, versions, parallel callers."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from readymark.ingest.v1 import ingest_service_pb2 as pb

from services.ingest.blobs import blob_key
from services.ingest.lifecycle import DocumentStatus
from services.ingest.repository import documents
from shared import postgres
from shared.errors import (
    AlreadyExistsError,
    ConflictError,
    LeaseLostError,
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
    upload,
)

POLICY = pb.DuplicatePolicy


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (POLICY.DUPLICATE_POLICY_UNSPECIFIED, ("existing", 1)),
        (POLICY.DUPLICATE_POLICY_REJECT, ("DOCUMENT_EXISTS", 1)),
        (POLICY.DUPLICATE_POLICY_RETURN_EXISTING, ("existing", 1)),
        (POLICY.DUPLICATE_POLICY_REPLACE, ("existing", 1)),
        (POLICY.DUPLICATE_POLICY_KEEP_BOTH, ("created", 3)),
    ],
)
async def test_d21_the_same_bytes_without_a_key(
    api: Api, policy: pb.DuplicatePolicy.ValueType, expected: tuple[str, int]
) -> None:
    first = await upload(api.stub)
    await publish(api.pool, api.blobs, await claim(api.pool))
    outcomes = set()
    for _ in range(2):
        outcomes.add(await _outcome(api, first.document.name, duplicate_policy=policy))
    assert outcomes == {expected[0]}
    counts = await count_rows(api.pool)
    assert (counts["documents"], counts["chunks_1"]) == (expected[1], 3)
    assert len(files(api.blob_folder)) == 2, "one original and one snapshot"


@pytest.mark.parametrize(
    ("policy", "same_bytes", "other_bytes"),
    [
        (POLICY.DUPLICATE_POLICY_UNSPECIFIED, "existing", "replaced"),
        (POLICY.DUPLICATE_POLICY_REJECT, "DOCUMENT_EXISTS", "DOCUMENT_EXISTS"),
        (POLICY.DUPLICATE_POLICY_RETURN_EXISTING, "existing", "existing"),
        (POLICY.DUPLICATE_POLICY_REPLACE, "existing", "replaced"),
        (POLICY.DUPLICATE_POLICY_KEEP_BOTH, "SOURCE_KEY_TAKEN", "SOURCE_KEY_TAKEN"),
    ],
)
async def test_d21_the_same_source_key(
    api: Api, policy: pb.DuplicatePolicy.ValueType, same_bytes: str, other_bytes: str
) -> None:
    first = await upload(api.stub, source_key="a/readme.md")
    name = first.document.name
    await publish(api.pool, api.blobs, await claim(api.pool))
    fields = {"source_key": "a/readme.md", "duplicate_policy": policy}
    assert await _outcome(api, name, **fields) == same_bytes
    assert await _outcome(api, name, b"other", **fields) == other_bytes
    counts = await count_rows(api.pool)
    assert (counts["documents"], counts["chunks_1"]) == (1, 3)
    # What was not taken is not kept either.
    assert counts["blobs"] == (2 if other_bytes == "replaced" else 1)
    assert len(files(api.blob_folder)) == counts["blobs"] + 1


async def _outcome(api: Api, name: str, content: bytes = b"some text", **fields: object) -> str:
    try:
        response = await upload(api.stub, content, **fields)
    except (AlreadyExistsError, ConflictError) as error:
        assert error.parameters["document"] == name
        return error.reason
    if response.document.name != name:
        return "created"
    return "replaced" if response.created else "existing"


async def test_d23_equal_bytes_under_two_source_keys_are_two_documents(api: Api) -> None:
    a = (await upload(api.stub, source_key="a/readme.md")).document
    b = (await upload(api.stub, source_key="b/readme.md")).document
    assert a.name != b.name
    for _ in range(2):
        await publish(api.pool, api.blobs, await claim(api.pool))
    b_before = (await api.stub.GetDocument(pb.GetDocumentRequest(name=b.name))).document
    replaced = await upload(api.stub, b"new text", source_key="a/readme.md")
    assert (replaced.document.name, replaced.document.version) == (a.name, 2)
    assert (await api.stub.GetDocument(pb.GetDocumentRequest(name=b.name))).document == b_before


async def test_a_replacement_is_built_beside_the_served_version(api: Api) -> None:
    await upload(api.stub, source_key="k")
    await publish(api.pool, api.blobs, await claim(api.pool))
    document = (await upload(api.stub, b"new", source_key="k")).document
    assert (document.version, document.served_version, document.searchable) == (2, 1, True)
    assert document.status == pb.DOCUMENT_STATUS_PENDING
    assert (await count_rows(api.pool))["chunks_1"] == 3
    await publish(api.pool, api.blobs, await claim(api.pool), chunk_count=2)
    document = (await api.stub.GetDocument(pb.GetDocumentRequest(name=document.name))).document
    assert (document.version, document.served_version) == (2, 2)
    assert (await count_rows(api.pool))["chunks_1"] == 2


@pytest.mark.parametrize(
    "stage", [None, *[s for s in DocumentStatus if s not in ("PENDING", "READY", "FAILED")]]
)
async def test_d28_j18_an_unfinished_version_is_superseded_whatever_its_stage(
    api: Api, stage: DocumentStatus | None
) -> None:
    await upload(api.stub, source_key="k")
    lease = await claim(api.pool)
    if stage is not None:
        await advance(api.pool, lease, stage)
    replaced = await upload(api.stub, b"new", source_key="k")
    assert (replaced.created, replaced.document.version) == (True, 2)
    assert await pairs(api.pool) == [("FAILED", "FAILED"), ("PENDING", "PENDING")]
    attempts = (await api.stub.ListAttempts(pb.ListAttemptsRequest(name=replaced.document.name))).attempts
    assert [(attempt.outcome, attempt.failure.reason) for attempt in attempts] == [
        ("CANCELLED", "SUPERSEDED")
    ]
    # The worker of the old version can do nothing any more.
    with pytest.raises(LeaseLostError):
        await fail(api.pool, lease)
    await publish(api.pool, api.blobs, await claim(api.pool))
    counts = await count_rows(api.pool)
    assert (counts["document_versions"], counts["ingestion_jobs"], counts["chunk_staging"]) == (1, 1, 0)


async def test_equal_bytes_rebuild_a_failed_document_only_when_asked_to(api: Api) -> None:
    name = (await upload(api.stub)).document.name
    await fail(api.pool, await claim(api.pool))
    assert await _outcome(api, name) == "existing"
    assert await _outcome(api, name, duplicate_policy=POLICY.DUPLICATE_POLICY_REPLACE) == "replaced"
    assert await pairs(api.pool) == [("FAILED", "FAILED"), ("PENDING", "PENDING")]


async def test_a_replacement_with_other_metadata_is_a_new_version(api: Api) -> None:
    name = (await upload(api.stub, source_key="k", metadata={"year": 2023})).document.name
    fields = {"source_key": "k", "duplicate_policy": POLICY.DUPLICATE_POLICY_REPLACE}
    assert await _outcome(api, name, metadata={"year": 2023}, **fields) == "existing"
    assert await _outcome(api, name, metadata={"year": 2024}, **fields) == "replaced"


async def test_submitting_again_heals_a_lost_file(api: Api) -> None:
    document = (await upload(api.stub)).document
    await api.blobs.delete(blob_key(document.sha256))
    assert not (await upload(api.stub)).created
    assert await api.blobs.get_bytes(blob_key(document.sha256)) == b"some text"


async def test_parallel_replacements_of_one_key_make_one_chain_of_versions(api: Api) -> None:
    responses = await asyncio.gather(
        *(upload(api.stub, f"text {number}".encode(), source_key="k") for number in range(12))
    )
    assert len({response.document.name for response in responses}) == 1
    assert sorted(response.document.version for response in responses) == list(range(1, 13))
    assert sorted(await pairs(api.pool)) == [("FAILED", "FAILED")] * 11 + [("PENDING", "PENDING")]


async def test_parallel_uploads_of_equal_bytes_make_one_document(api: Api) -> None:
    responses = await asyncio.gather(*(upload(api.stub) for _ in range(12)))
    assert len({response.document.name for response in responses}) == 1
    assert sum(response.created for response in responses) == 1
    assert len(files(api.blob_folder)) == 1


async def test_deleting_and_submitting_the_same_bytes_in_parallel_never_loses_a_file(api: Api) -> None:
    async def submit_and_delete(number: int) -> None:
        for _ in range(6):
            document = (await upload(api.stub, source_key=f"k{number}")).document
            assert await api.blobs.get_bytes(blob_key(document.sha256)) == b"some text"
            await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=document.name))

    await asyncio.gather(*(submit_and_delete(number) for number in range(6)))
    await api.stub.GetQueueStats(pb.GetQueueStatsRequest())
    assert files(api.blob_folder) == []
    assert (await count_rows(api.pool))["blobs"] == 0


async def test_bytes_that_are_being_removed_are_stored_again_by_a_submission(api: Api) -> None:
    sha256 = hashlib.sha256(b"some text").hexdigest()
    await api.blobs.put_bytes(blob_key(sha256), b"some text")
    async with postgres.transaction(api.pool) as connection:
        await documents.hold_blob(connection, sha256, 9)
    is_removing, go_on = asyncio.Event(), asyncio.Event()

    async def remove_file() -> None:
        is_removing.set()
        await go_on.wait()
        await api.blobs.delete(blob_key(sha256))

    removing = asyncio.create_task(documents.drop_blob(api.pool, sha256, remove_file))
    await is_removing.wait()
    uploading = asyncio.ensure_future(upload(api.stub))
    done, _ = await asyncio.wait({uploading}, timeout=0.3)
    assert not done, "the submission has to wait until the file is gone"
    go_on.set()
    assert await removing
    assert (await uploading).created
    assert await api.blobs.get_bytes(blob_key(sha256)) == b"some text"
