"""Channels: our errors, traces, balance, and what happens when the other side is away."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from opentelemetry.trace import SpanKind

from shared import telemetry
from shared.errors import DeadlineExceededError, DependencyUnavailableError
from shared.rpc.channel import create_channel
from tests.support.rpc_service import full_name, running_server, running_service

DO = full_name("Do")


async def echo(request: bytes, context: Any) -> bytes:
    return request


async def test_nobody_there_is_an_error_of_ours_at_once():
    async with create_channel("127.0.0.1:1") as channel:
        began = time.monotonic()
        with pytest.raises(DependencyUnavailableError) as caught:
            await channel.unary_unary(f"/{DO}")(b"", timeout=5)
        assert time.monotonic() - began < 2
        assert isinstance(caught.value.__cause__, grpc.aio.AioRpcError)


async def test_a_stream_to_nobody_fails_at_its_first_answer(spans):
    async with create_channel("127.0.0.1:1") as channel:
        answers = channel.unary_stream(f"/{DO}")(b"", timeout=5)
        with pytest.raises(DependencyUnavailableError):
            await anext(answers)
    (span,) = spans.named(DO, SpanKind.CLIENT)
    assert span.attributes["error.type"] == "UNAVAILABLE"


async def test_a_name_that_does_not_exist_is_an_error_of_ours():
    async with create_channel("no-such-host.invalid:1") as channel:
        with pytest.raises((DependencyUnavailableError, DeadlineExceededError)):
            await channel.unary_unary(f"/{DO}")(b"", timeout=3)


async def test_closing_a_channel_does_not_cancel_the_tasks_that_use_it():
    began = asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        began.set()
        await asyncio.Event().wait()
        return b""

    async with running_server({"Do": ("unary_unary", wait)}) as (address, _):
        channel = create_channel(address)
        task = asyncio.create_task(channel.unary_unary(f"/{DO}")(b""))
        await began.wait()
        await channel.close()
        with pytest.raises(DependencyUnavailableError) as caught:
            await task
    assert caught.value.reason == "SHUTTING_DOWN"


async def test_all_four_kinds_of_calls_work_through_the_channel(spans):
    async def total(requests: Any, context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def split(request: bytes, context: Any):
        for byte in request:
            yield bytes([byte])

    async def each(requests: Any, context: Any):
        async for request in requests:
            yield request.upper()

    kinds = {
        "Echo": ("unary_unary", echo),
        "Total": ("stream_unary", total),
        "Split": ("unary_stream", split),
        "Each": ("stream_stream", each),
    }
    async with running_service(kinds) as stub:
        assert await stub["Echo"](b"ab") == b"ab"
        assert await stub["Total"](iter([b"a", b"b"])) == b"ab"
        assert [answer async for answer in stub["Split"](b"ab")] == [b"a", b"b"]
        assert [answer async for answer in stub["Each"](iter([b"a", b"b"]))] == [b"A", b"B"]
        for method in kinds:
            await spans.wait_for(full_name(method), SpanKind.SERVER)
            await spans.wait_for(full_name(method), SpanKind.CLIENT)


async def test_a_call_continues_the_current_trace_and_keeps_the_callers_metadata(spans):
    async def do(request: bytes, context: Any) -> bytes:
        metadata = dict(context.invocation_metadata())
        return f"{metadata['traceparent']} {metadata['x-own']}".encode()

    async with running_service({"Do": ("unary_unary", do)}) as stub:
        with telemetry.span("caller") as caller:
            answer = (await stub["Do"](b"", metadata=(("x-own", "1"),))).decode()
            assert telemetry.current_trace_id() == f"{caller.get_span_context().trace_id:032x}"
    client = await spans.wait_for(DO, SpanKind.CLIENT)
    assert answer.startswith(f"00-{client.context.trace_id:032x}-{client.context.span_id:016x}-")
    assert answer.endswith(" 1")
    assert client.parent.span_id == caller.get_span_context().span_id


async def test_calls_are_spread_over_all_addresses_of_a_name():
    seen: dict[str, int] = {}

    def make(name: str) -> Any:
        async def do(request: bytes, context: Any) -> bytes:
            seen[name] = seen.get(name, 0) + 1
            return b""

        return do

    async with (
        running_server({"Do": ("unary_unary", make("a"))}) as (first, _),
        running_server({"Do": ("unary_unary", make("b"))}) as (second, _),
        create_channel(f"ipv4:{first},{second}") as channel,
    ):
        call = channel.unary_unary(f"/{DO}")
        deadline = time.monotonic() + 5
        while len(seen) < 2 and time.monotonic() < deadline:
            await call(b"")
        seen.clear()
        for _ in range(40):
            await call(b"")
    assert seen == {"a": 20, "b": 20}


async def test_a_server_that_comes_back_is_used_again_within_seconds():
    async with running_server({"Do": ("unary_unary", echo)}) as (address, _):
        channel = create_channel(address)
        call = channel.unary_unary(f"/{DO}")
        assert await call(b"1") == b"1"
    with pytest.raises(DependencyUnavailableError):
        await call(b"2", timeout=5)
    async with running_server({"Do": ("unary_unary", echo)}, serving_options={"listen": address}):
        assert await call(b"3", timeout=6, wait_for_ready=True) == b"3"
    await channel.close()


@pytest.mark.parametrize(("is_retried", "attempts"), [(True, 3), (False, 1)])
async def test_only_a_channel_that_is_asked_to_repeats_calls(is_retried, attempts):
    made = []

    async def do(request: bytes, context: Any) -> bytes:
        made.append(1)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        raise AssertionError

    async with (
        running_server({"Do": ("unary_unary", do)}) as (address, _),
        create_channel(address, is_retried=is_retried) as channel,
    ):
        with pytest.raises(DependencyUnavailableError):
            await channel.unary_unary(f"/{DO}")(b"", timeout=10)
    assert len(made) == attempts
