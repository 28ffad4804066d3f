"""What a failed call says arrives as one typed error, over a real connection."""

from __future__ import annotations

import grpc
import pytest
import readymark_client as sdk
from google.rpc import code_pb2
from readymark.ingest.v1 import ingest_service_pb2 as pb
from readymark_client.errors import BY_CODE

KINDS = [
    (code_pb2.INVALID_ARGUMENT, "INVALID_DOCUMENT", sdk.InvalidDocument),
    (code_pb2.NOT_FOUND, "RESOURCE_NOT_FOUND", sdk.NotFound),
    (code_pb2.INVALID_ARGUMENT, "INVALID_ARGUMENT", sdk.InvalidArgument),
    (code_pb2.FAILED_PRECONDITION, "CONFLICT", sdk.Conflict),
    (code_pb2.ALREADY_EXISTS, "ALREADY_EXISTS", sdk.AlreadyExists),
    (code_pb2.UNAVAILABLE, "UNAVAILABLE", sdk.Unavailable),
    (code_pb2.RESOURCE_EXHAUSTED, "OVERLOADED", sdk.Overloaded),
    (code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", sdk.DeadlineExceeded),
    (code_pb2.FAILED_PRECONDITION, "MODEL_MISMATCH", sdk.ModelMismatch),
    (code_pb2.INTERNAL, "INTERNAL", sdk.ServiceFault),
    (code_pb2.ABORTED, "A_KIND_OF_A_NEWER_RELEASE", sdk.ServiceFault),
]


@pytest.mark.parametrize(("grpc_code", "code", "kind"), KINDS)
async def test_every_code_of_the_services_is_one_class(ingest, client, refuse, grpc_code, code, kind):
    async def cancel(request, context):
        await refuse(context, grpc_code, code, "SOME_REASON", sentence="Say it so.", document="d1")

    ingest.handlers["CancelDocument"] = cancel
    with pytest.raises(sdk.ReadymarkClientError) as caught:
        await client.cancel("d1")
    error = caught.value
    assert type(error) is kind
    assert (error.reason, error.message, dict(error.parameters)) == (
        "SOME_REASON",
        "Say it so.",
        {"document": "d1"},
    )
    assert error.grpc_code == code_pb2.Code.Name(grpc_code)
    assert str(error) == f"Say it so. [{kind.code}: SOME_REASON]"


def test_no_code_of_the_error_tree_is_without_a_class():
    from shared.errors import LEAVES

    # A lost lease is told to workers only; should it ever come out, it is a fault of ours.
    assert {leaf.code for leaf in LEAVES} - set(BY_CODE) == {"LEASE_LOST"}


async def test_an_overloaded_service_is_asked_again_when_it_says(ingest, client, refuse):
    async def get(request, context):
        if len(ingest.metadata) == 1:
            await refuse(
                context, code_pb2.RESOURCE_EXHAUSTED, "OVERLOADED", "OVERLOADED", retry_after_seconds=0.05
            )
        return pb.GetDocumentResponse(document=pb.Document(document_id="d1"))

    ingest.handlers["GetDocument"] = get
    assert (await client.get("d1")).document_id == "d1"
    assert len(ingest.metadata) == 2


async def test_the_push_back_is_told_when_the_deadline_leaves_no_time_for_it(ingest, refuse):
    async def get(request, context):
        await refuse(context, code_pb2.RESOURCE_EXHAUSTED, "OVERLOADED", "OVERLOADED", retry_after_seconds=60)

    ingest.handlers["GetDocument"] = get
    async with sdk.AsyncReadymark(ingest.address, timeout_seconds=2) as client:
        with pytest.raises(sdk.Overloaded) as caught:
            await client.get("d1")
    assert caught.value.retry_after_seconds == 60
    assert len(ingest.metadata) == 1


async def test_a_call_that_changes_something_is_never_repeated(ingest, client, refuse):
    async def cancel(request, context):
        await refuse(context, code_pb2.UNAVAILABLE, "UNAVAILABLE", "DATABASE_UNAVAILABLE")

    ingest.handlers["CancelDocument"] = cancel
    with pytest.raises(sdk.Unavailable):
        await client.cancel("d1")
    assert len(ingest.metadata) == 1


async def test_a_service_that_is_not_there_is_named_with_its_address():
    async with sdk.AsyncReadymark("127.0.0.1:1", timeout_seconds=5, language="zh") as client:
        with pytest.raises(sdk.ServiceUnreachable) as caught:
            await client.get("d1")
    assert caught.value.reason == "SERVICE_UNREACHABLE"
    assert "ingest 服务在 127.0.0.1:1 没有响应" in caught.value.message


async def test_details_that_cannot_be_read_hide_nothing(ingest, client):
    async def cancel(request, context):
        context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff\xff"),))
        await context.abort(grpc.StatusCode.NOT_FOUND, "plain words")

    ingest.handlers["CancelDocument"] = cancel
    with pytest.raises(sdk.NotFound) as caught:
        await client.cancel("d1")
    assert "plain words" in caught.value.message
    assert caught.value.reason == "UNEXPECTED_ANSWER"


async def test_a_call_ends_at_its_deadline(ingest):
    import asyncio

    async def get(request, context):
        await asyncio.Event().wait()

    ingest.handlers["GetDocument"] = get
    async with sdk.AsyncReadymark(ingest.address, timeout_seconds=0.3) as client:
        with pytest.raises(sdk.DeadlineExceeded):
            await client.get("d1")


async def test_language_and_trace_travel_with_the_call(ingest):
    from opentelemetry import trace

    async def get(request, context):
        return pb.GetDocumentResponse(document=pb.Document(document_id="d1"))

    ingest.handlers["GetDocument"] = get
    span = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    async with sdk.AsyncReadymark(ingest.address, language="zh") as client:
        await client.get("d1")
        with trace.use_span(trace.NonRecordingSpan(span)):
            await client.get("d1")
    without, within = ingest.metadata
    assert without["accept-language"] == "zh"
    assert "traceparent" not in without
    assert within["traceparent"] == f"00-{0xABC:032x}-{0xDEF:016x}-01"
