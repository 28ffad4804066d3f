"""What surrounds a call: one span each side in every case, a status in every case, cancellation that arrives."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from shared import telemetry
from shared.errors import (
    DeadlineExceededError,
    DependencyUnavailableError,
    InternalError,
    ResourceNotFoundError,
)
from shared.rpc import language
from tests.support.rpc_service import full_name, running_server, running_service

DO = full_name("Do")


class Handler:
    """Waits until it is told, and notes how it ended."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.ended = asyncio.Event()

    async def wait(self, request: bytes, context: Any) -> bytes:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        return b"done"

    async def stream_then_wait(self, request: bytes, context: Any):
        self.began.set()
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            self.ended.set()

    async def stream_without_end(self, request: bytes, context: Any):
        self.began.set()
        try:
            while True:
                yield b"x" * 60_000
        finally:
            self.ended.set()


@pytest.fixture
def handler() -> Handler:
    return Handler()


def attributes(span: Any) -> dict[str, Any]:
    return dict(span.attributes)


async def test_both_sides_of_a_call_are_one_trace_and_name_method_and_status(spans):
    async def do(request: bytes, context: Any) -> bytes:
        return telemetry.current_trace_id().encode()

    async with running_service({"Do": ("unary_unary", do)}) as stub:
        seen = await stub["Do"](b"")
        server = await spans.wait_for(DO, SpanKind.SERVER)
    client = spans.named(DO, SpanKind.CLIENT)[0]
    assert server.parent.span_id == client.context.span_id
    assert f"{server.context.trace_id:032x}".encode() == seen
    for span in (server, client):
        assert attributes(span) == {
            "rpc.system.name": "grpc",
            "rpc.method": DO,
            "rpc.response.status_code": "OK",
        }
        assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_an_error_of_ours_arrives_as_it_was_raised_and_is_no_fault_of_the_server(spans, kind):
    error = ResourceNotFoundError("DOCUMENT_NOT_FOUND", document="d1")

    async def do(request: bytes, context: Any) -> bytes:
        raise error

    async def stream(request: bytes, context: Any):
        yield b"one"
        raise error

    async with running_service({"Do": (kind, do if kind == "unary_unary" else stream)}) as stub:
        with pytest.raises(ResourceNotFoundError) as caught:
            if kind == "unary_unary":
                await stub["Do"](b"")
            else:
                async for _ in stub["Do"](b""):
                    pass
        server = await spans.wait_for(DO, SpanKind.SERVER)
    assert (caught.value.reason, caught.value.parameters) == (error.reason, error.parameters)
    assert attributes(server)["rpc.response.status_code"] == "NOT_FOUND"
    assert server.status.status_code is StatusCode.UNSET
    client = spans.named(DO, SpanKind.CLIENT)[0]
    assert client.status.status_code is StatusCode.ERROR


async def test_a_crash_is_an_internal_error_that_names_the_trace_and_hides_its_text(spans, caplog):
    async def do(request: bytes, context: Any) -> bytes:
        raise KeyError("SECRET-CANARY")

    async with running_service({"Do": ("unary_unary", do)}) as stub:
        with pytest.raises(InternalError) as caught:
            await stub["Do"](b"")
        server = await spans.wait_for(DO, SpanKind.SERVER)
    assert caught.value.parameters["trace_id"] == f"{server.context.trace_id:032x}"
    assert "CANARY" not in str(caught.value) + str(caught.value.__cause__) + server.to_json()
    assert (server.status.status_code, attributes(server)["error.type"]) == (StatusCode.ERROR, "INTERNAL")
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]


async def test_a_handler_may_abort_by_itself(spans):
    async def do(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")
        raise AssertionError

    async with running_service({"Do": ("unary_unary", do)}) as stub:
        with pytest.raises(InternalError) as caught:
            await stub["Do"](b"")
        server = await spans.wait_for(DO, SpanKind.SERVER)
    assert caught.value.__cause__.code() is grpc.StatusCode.UNIMPLEMENTED
    assert attributes(server)["rpc.response.status_code"] == "UNIMPLEMENTED"
    assert server.status.status_code is StatusCode.ERROR


async def test_a_code_that_the_handler_sets_is_the_code_of_the_span(spans):
    async def do(request: bytes, context: Any) -> bytes:
        context.set_code(grpc.StatusCode.NOT_FOUND)
        return b""

    async with running_service({"Do": ("unary_unary", do)}) as stub:
        with pytest.raises(InternalError):
            await stub["Do"](b"")
        server = await spans.wait_for(DO, SpanKind.SERVER)
    assert attributes(server)["rpc.response.status_code"] == "NOT_FOUND"


async def test_cancelling_the_caller_stops_the_server_within_a_second(spans, handler):
    async with running_service({"Do": ("unary_unary", handler.wait)}) as stub:
        task = asyncio.create_task(stub["Do"](b""))
        await handler.began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(handler.ended.wait(), 1)
        server = await spans.wait_for(DO, SpanKind.SERVER)
    client = spans.named(DO, SpanKind.CLIENT)[0]
    assert attributes(client)["rpc.response.status_code"] == "CANCELLED"
    assert attributes(server)["rpc.response.status_code"] == "CANCELLED"
    assert server.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("method", ["stream_then_wait", "stream_without_end"])
async def test_leaving_a_stream_early_stops_the_server_within_a_second(spans, handler, caplog, method):
    async with running_service({"Do": ("unary_stream", getattr(handler, method))}) as stub:
        async for _ in stub["Do"](b""):
            break
        gc.disable()  # The end may not depend on the garbage collector.
        try:
            await asyncio.wait_for(handler.ended.wait(), 1)
            server = await spans.wait_for(DO, SpanKind.SERVER)
        finally:
            gc.enable()
    assert attributes(server)["rpc.response.status_code"] == "CANCELLED"
    assert attributes(spans.named(DO, SpanKind.CLIENT)[0])["rpc.response.status_code"] == "CANCELLED"
    assert "Failed to detach context" not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_reader_that_stands_still_and_then_dies_stops_the_server(spans, handler):
    async with running_server({"Do": ("unary_stream", handler.stream_without_end)}) as (address, _):
        channel = grpc.aio.insecure_channel(address)
        call = channel.unary_stream(f"/{DO}")(b"")
        await call.read()
        # By now the server waits in a write, since nobody reads on.
        await asyncio.sleep(0.2)
        assert not handler.ended.is_set()
        await channel.close()
        await asyncio.wait_for(handler.ended.wait(), 1)
        await spans.wait_for(DO, SpanKind.SERVER)


async def test_a_deadline_that_passes_is_not_called_a_cancellation(spans, handler):
    async with running_service({"Do": ("unary_unary", handler.wait)}) as stub:
        with pytest.raises(DeadlineExceededError):
            await stub["Do"](b"", timeout=0.2)
        await asyncio.wait_for(handler.ended.wait(), 1)
        server = await spans.wait_for(DO, SpanKind.SERVER)
    assert attributes(server)["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
    assert server.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_something_cancelled_inside_a_handler_is_answered_with_a_status(spans, kind):
    async def do(request: bytes, context: Any) -> bytes:
        inner = asyncio.create_task(asyncio.Event().wait())
        inner.cancel()
        await inner
        return b""

    async def stream(request: bytes, context: Any):
        yield await do(request, context)

    async with running_service({"Do": (kind, do if kind == "unary_unary" else stream)}) as stub:

        async def call() -> None:
            if kind == "unary_unary":
                await stub["Do"](b"")
            else:
                async for _ in stub["Do"](b""):
                    pass

        with pytest.raises(InternalError):
            await asyncio.wait_for(call(), 1)
        server = await spans.wait_for(DO, SpanKind.SERVER)
    assert attributes(server)["rpc.response.status_code"] == "INTERNAL"


async def test_a_server_that_stops_tells_the_callers_it_cuts_off(spans, handler):
    async with running_server({"Do": ("unary_unary", handler.wait)}) as (address, serving):
        channel = grpc.aio.insecure_channel(address)
        call = channel.unary_unary(f"/{DO}")(b"")
        await handler.began.wait()
        await serving.stop(0)
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(call, 1)
        await asyncio.wait_for(handler.ended.wait(), 1)
        await spans.wait_for(DO, SpanKind.SERVER)
        await channel.close()


async def test_calls_side_by_side_keep_their_traces_apart(spans):
    gate = asyncio.Event()

    async def stream(request: bytes, context: Any):
        for _ in range(3):
            await gate.wait()
            with telemetry.span("step"):
                await asyncio.sleep(0)
            yield telemetry.current_trace_id().encode()

    async with running_service({"Do": ("unary_stream", stream)}) as stub:

        async def call(number: int) -> tuple[int, set[bytes]]:
            with telemetry.span_from(None, None, f"caller {number}") as span:
                trace_id = span.get_span_context().trace_id
                return trace_id, {answer async for answer in stub["Do"](b"")}

        calls = [asyncio.create_task(call(number)) for number in range(20)]
        await asyncio.sleep(0.05)
        gate.set()
        answers = await asyncio.gather(*calls)
    assert len({trace_id for trace_id, _ in answers}) == 20
    for trace_id, seen in answers:
        assert seen == {f"{trace_id:032x}".encode()}
    by_id = {span.context.span_id: span for span in spans.all()}
    assert all(by_id[step.parent.span_id].kind is SpanKind.SERVER for step in spans.named("step"))
    assert len(spans.named("step")) == 60


async def test_a_malformed_traceparent_begins_a_new_trace(spans):
    async def do(request: bytes, context: Any) -> bytes:
        return b""

    async with running_server({"Do": ("unary_unary", do)}) as (address, _):
        async with grpc.aio.insecure_channel(address) as channel:
            await channel.unary_unary(f"/{DO}")(b"", metadata=[("traceparent", "00-zz-1-01")])
        server = await spans.wait_for(DO, SpanKind.SERVER)
    assert server.parent is None


async def test_the_sentence_is_in_the_language_of_the_caller():
    async def do(request: bytes, context: Any) -> bytes:
        raise DependencyUnavailableError("DATABASE_UNAVAILABLE", retry_after_seconds=2)

    async with (
        running_server({"Do": ("unary_unary", do)}) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{DO}")(b"", metadata=[("accept-language", "zh-CN")])
    assert caught.value.details() == "数据库暂时没有响应；请稍后再试。"
    assert ("grpc-retry-pushback-ms", "2000") in tuple(caught.value.trailing_metadata())


async def test_a_handler_knows_the_language_and_the_next_call_does_not_inherit_it():
    async def do(request: bytes, context: Any) -> bytes:
        return language.current_language().encode()

    async with running_service({"Do": ("unary_unary", do)}) as stub:
        assert await stub["Do"](b"", metadata=[("accept-language", "zh")]) == b"zh"
        assert await stub["Do"](b"") == b"en"


async def test_every_call_is_one_line_with_method_code_and_duration(caplog, spans):
    async def do(request: bytes, context: Any) -> bytes:
        raise ResourceNotFoundError("DOCUMENT_NOT_FOUND", document="CANARY")

    caplog.set_level(logging.INFO)
    async with running_service({"Do": ("unary_unary", do)}) as stub:
        with pytest.raises(ResourceNotFoundError):
            await stub["Do"](b"")
        await spans.wait_for(DO, SpanKind.SERVER)
    (record,) = [record for record in caplog.records if record.getMessage() == "call ended"]
    duration = record.fields.pop("duration_ms")
    assert duration >= 0
    assert record.fields == {"method": DO, "code": "NOT_FOUND", "reason": "DOCUMENT_NOT_FOUND"}
    assert "CANARY" not in json.dumps(record.fields)
    assert trace.get_current_span() is trace.INVALID_SPAN
