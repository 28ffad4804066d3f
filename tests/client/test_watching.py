"""A watch survives broken streams, and a wait ends exactly when its documents are settled."""

from __future__ import annotations

import asyncio

import grpc
import pytest
import readymark_client as sdk
from google.rpc import code_pb2
from readymark.ingest.v1 import ingest_service_pb2 as pb


def event(document_id, status, token, kind="changed"):
    document = pb.Document(
        name=f"collections/c/documents/{document_id}",
        document_id=document_id,
        status=pb.DocumentStatus.Value(f"DOCUMENT_STATUS_{status}"),
    )
    return pb.WatchDocumentsResponse(resume_token=token, **{kind: document})


async def test_a_broken_stream_is_resumed_after_the_last_event(ingest, client):
    tokens = []

    async def watch(request, context):
        tokens.append(request.resume_token)
        if len(tokens) == 1:
            yield event("a", "PENDING", "t1", "snapshot")
            yield event("a", "PARSING", "t2")
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield event("a", "READY", "t3")

    ingest.handlers["WatchDocuments"] = watch
    seen = [change.document.status async for change in client.watch(["a"], until_settled=True)]
    assert seen == ["PENDING", "PARSING", "READY"]
    assert tokens == ["", "t2"]


async def test_a_stream_that_ends_too_early_without_an_error_is_resumed(ingest, client):
    tokens = []

    async def watch(request, context):
        tokens.append(request.resume_token)
        yield event("a", "PENDING" if len(tokens) == 1 else "FAILED", f"t{len(tokens)}")

    ingest.handlers["WatchDocuments"] = watch
    [document] = await client.wait(["a"], 10)
    assert document.status is sdk.DocumentStatus.FAILED
    assert tokens == ["", "t1"]


async def test_a_refused_resume_token_starts_again_from_the_current_state(ingest, client, refuse):
    tokens = []

    async def watch(request, context):
        tokens.append(request.resume_token)
        if request.resume_token:
            await refuse(context, code_pb2.INVALID_ARGUMENT, "INVALID_ARGUMENT", "RESUME_TOKEN_INVALID")
        yield event("a", "READY", "t9", "snapshot")

    ingest.handlers["WatchDocuments"] = watch
    changes = [change async for change in client.watch(["a"], until_settled=True, resume_token="stale")]
    assert [change.kind for change in changes] == ["snapshot"]
    assert tokens == ["stale", ""]


async def test_wait_answers_in_the_order_asked_and_twice_where_asked_twice(ingest, client):
    async def watch(request, context):
        for name in reversed(request.names):
            yield event(name.rsplit("/", 1)[-1], "READY", "t")

    ingest.handlers["WatchDocuments"] = watch
    found = await client.wait(["a", "b", "a"])
    assert [document.document_id for document in found] == ["a", "b", "a"]


async def test_waiting_for_a_deleted_document_is_an_error(ingest, client):
    async def watch(request, context):
        yield pb.WatchDocumentsResponse(deleted_name="collections/c/documents/a", resume_token="t")

    ingest.handlers["WatchDocuments"] = watch
    with pytest.raises(sdk.NotFound) as caught:
        await client.wait(["a"])
    assert caught.value.reason == "DOCUMENT_DELETED"


async def test_waiting_too_long_says_how_many_are_left(ingest, client):
    async def watch(request, context):
        yield event("a", "READY", "t1")
        yield event("b", "EMBEDDING", "t2")
        await asyncio.Event().wait()

    ingest.handlers["WatchDocuments"] = watch
    with pytest.raises(sdk.DeadlineExceeded) as caught:
        await client.wait(["a", "b"], 0.5)
    assert caught.value.reason == "NOT_SETTLED"
    assert caught.value.parameters["count"] == "1"


async def test_a_service_that_stays_away_ends_the_watch(ingest, client, monkeypatch):
    monkeypatch.setattr("readymark_client.watching.MAX_FAILED_TRIES", 2)

    async def watch(request, context):
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        yield

    ingest.handlers["WatchDocuments"] = watch
    with pytest.raises(sdk.ServiceUnreachable):
        await client.wait(["a"], 30)
    assert len(ingest.metadata) == 3


async def test_a_silent_stream_counts_as_a_broken_one(ingest, client, monkeypatch):
    monkeypatch.setattr("readymark_client.watching.IDLE_SECONDS", 0.2)
    streams = 0

    async def watch(request, context):
        nonlocal streams
        streams += 1
        if streams == 1:
            await asyncio.Event().wait()
        yield event("a", "READY", "t")

    ingest.handlers["WatchDocuments"] = watch
    await client.wait(["a"], 10)
    assert streams == 2


async def test_a_single_id_is_not_taken_for_its_letters(ingest, client):
    asked = []

    async def watch(request, context):
        asked.append(list(request.names))
        yield event("abc", "READY", "t1", "snapshot")

    ingest.handlers["WatchDocuments"] = watch
    (document,) = await client.wait("abc")
    assert document.document_id == "abc"
    assert [name.rsplit("/", 1)[-1] for name in asked[0]] == ["abc"]
