"""Servers as they run: limits, health beside a busy loop, reflection, stop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shared.errors import InternalError, OverloadedError
from shared.rpc import server as server_module
from shared.rpc import status
from shared.rpc.channel import create_channel
from shared.rpc.server import PortTakenError, Serving, create_server, wait_for_signal
from tests.support.fake_embedder import FakeEmbedder, start_fake_embedder
from tests.support.rpc_service import full_name, running_server, running_service
from tests.support.waiting import eventually

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def echo(request: bytes, context: Any) -> bytes:
    return request


async def check(address: str, service: str = "") -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=1)).status


def check_blocking(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1).status


async def test_calls_beyond_the_limit_are_refused_as_overload_and_the_others_finish():
    gate, running = asyncio.Event(), []

    async def wait(request: bytes, context: Any) -> bytes:
        running.append(request)
        await gate.wait()
        return request

    async with running_service({"Wait": ("unary_unary", wait)}, max_concurrent_rpcs=2) as stub:
        admitted = [asyncio.create_task(stub["Wait"](bytes([number]))) for number in range(2)]
        await eventually(lambda: len(running) == 2)
        with pytest.raises(OverloadedError):
            await stub["Wait"](b"one too many")
        gate.set()
        assert await asyncio.gather(*admitted) == [b"\0", b"\1"]
        assert await stub["Wait"](b"again") == b"again"


async def test_health_says_not_serving_before_and_after():
    server = create_server(service_name="test", telemetry=None)
    serving = Serving(server, service_names=("test.Service",))
    address = await serving.start()
    assert await check(address) == NOT_SERVING
    serving.set_serving(True)
    assert await check(address) == SERVING
    assert await check(address, "test.Service") == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(address, "no.Such")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    serving.set_serving(False)
    assert await check(address) == NOT_SERVING
    await serving.stop(0)


async def test_health_on_its_own_port_answers_while_the_loop_is_busy_for_two_seconds():
    async def block(request: bytes, context: Any) -> bytes:
        time.sleep(2)  # noqa: ASYNC251  # why: the loop is to be blocked
        return b""

    options = {"health_listen": "127.0.0.1:0"}
    async with running_server({"Block": ("unary_unary", block)}, serving_options=options) as (
        address,
        serving,
    ):
        assert serving.health_address is not None
        began = time.monotonic()

        def probe() -> tuple[int, float]:
            time.sleep(0.3)
            return check_blocking(serving.health_address), time.monotonic() - began

        async with create_channel(address) as channel:
            probing = asyncio.get_running_loop().run_in_executor(None, probe)
            await channel.unary_unary(f"/{full_name('Block')}")(b"")
            answer, seconds = await probing
    assert answer == SERVING
    assert seconds < 1.5


async def test_health_says_not_serving_while_running_calls_finish():
    gate, began = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        began.set()
        await gate.wait()
        return b"done"

    options = {"health_listen": "127.0.0.1:0"}
    async with running_server({"Wait": ("unary_unary", wait)}, serving_options=options) as (address, serving):
        channel = grpc.aio.insecure_channel(address)
        call = channel.unary_unary(f"/{full_name('Wait')}")(b"")
        await began.wait()
        stopping = asyncio.create_task(serving.stop(10))
        await asyncio.sleep(0)
        assert await check(serving.health_address) == NOT_SERVING
        gate.set()
        assert await call == b"done"
        await asyncio.wait_for(stopping, 2)
        await channel.close()


async def test_a_watcher_of_health_sees_the_change_and_does_not_hold_up_the_stop():
    async with (
        running_server({"Echo": ("unary_unary", echo)}) as (address, serving),
        grpc.aio.insecure_channel(address) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        began = time.monotonic()
        stopping = asyncio.create_task(serving.stop(10))
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        await stopping
    assert time.monotonic() - began < 2


async def test_calls_that_outlast_the_grace_are_cut_off():
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return b""

    async with (
        running_server({"Wait": ("unary_unary", wait)}) as (address, serving),
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = channel.unary_unary(f"/{full_name('Wait')}")(b"")
        await began.wait()
        stopped_at = time.monotonic()
        await serving.stop(0.3)
        assert time.monotonic() - stopped_at < 1.5
        with pytest.raises(grpc.aio.AioRpcError):
            await call
    assert cancelled.is_set()


async def test_reflection_lists_the_services_and_knows_their_files():
    address, serving, _ = await start_fake_embedder(FakeEmbedder())
    async with grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(timeout=5)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await call.read()).list_services_response.service}
        name = "readymark.embedder.v1.EmbedderService"
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
        files = (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()
    await serving.stop(0)
    assert {name, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= listed
    assert len(files) >= 1


async def test_a_port_that_is_taken_is_told_by_its_address():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for options in ({"listen": address}, {"health_listen": address}):
            serving = Serving(create_server(service_name="test", telemetry=None), **options)
            with pytest.raises(PortTakenError, match=address):
                await serving.start()
            await serving.stop(0)


async def test_two_servers_never_share_a_port():
    async with running_server({"Echo": ("unary_unary", echo)}) as (address, _):
        serving = Serving(create_server(service_name="test", telemetry=None), listen=address)
        with pytest.raises(PortTakenError):
            await serving.start()
        await serving.stop(0)


async def test_an_upload_refused_before_its_end_gives_a_blocking_client_the_reason():
    async def refuse(requests: Any, context: Any) -> bytes:
        async for _ in requests:
            raise status.errors.InvalidArgumentError("TOO_LARGE", actual=10, limit=5)
        raise AssertionError

    async with running_server({"Upload": ("stream_unary", refuse)}) as (address, _):

        def upload() -> grpc.RpcError:
            pieces = (b"x" * 60_000 for _ in range(500))
            with grpc.insecure_channel(address) as channel:
                try:
                    channel.stream_unary(f"/{full_name('Upload')}")(pieces, timeout=10)
                except grpc.RpcError as error:
                    return error
            raise AssertionError("the upload was taken")

        error = await asyncio.to_thread(upload)
    back = status.from_rpc_error(error)
    assert (back.code, back.parameters) == ("INVALID_ARGUMENT", {"actual": "10", "limit": "5"})


async def test_connections_end_with_age_so_that_new_replicas_get_calls(monkeypatch):
    monkeypatch.setattr(server_module, "MAX_CONNECTION_AGE_MS", 200)
    peers: set[str] = set()

    async def whoami(request: bytes, context: Any) -> bytes:
        peers.add(context.peer())
        return b""

    async with running_service({"Who": ("unary_unary", whoami)}) as stub:
        deadline = time.monotonic() + 10
        while len(peers) < 2:
            await stub["Who"](b"")  # No call may fail when the connection changes.
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


async def test_a_message_above_the_limit_is_refused_and_the_server_lives_on():
    async with (
        running_server({"Echo": ("unary_unary", echo)}, max_message_bytes=100_000) as (address, _),
        create_channel(address) as channel,
    ):
        call = channel.unary_unary(f"/{full_name('Echo')}")
        with pytest.raises(InternalError):
            await call(b"x" * 200_000)
        assert await call(b"x" * 90_000) == b"x" * 90_000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_asks_for_the_stop_and_the_next_one_is_not_held_back(number):
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        waiting = asyncio.create_task(wait_for_signal())
        await asyncio.sleep(0)
        os.kill(os.getpid(), number)
        await asyncio.wait_for(waiting, 1)
        loop = asyncio.get_running_loop()
        assert not any(loop.remove_signal_handler(each) for each in before)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
