"""A gRPC service made of functions, behind our own server and called through our own channel.

Requests and answers are bytes, so that a test needs no contract of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from shared.rpc.channel import create_channel
from shared.rpc.server import Serving, create_server

SERVICE = "test.Service"
KINDS = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


def full_name(method: str) -> str:
    return f"{SERVICE}/{method}"


@contextlib.asynccontextmanager
async def running_server(
    handlers: dict[str, tuple[str, Callable[..., Any]]],
    *,
    serving_options: dict[str, Any] | None = None,
    **server_options: Any,
) -> AsyncIterator[tuple[str, Serving]]:
    """Serves `handlers` (method -> kind, function); yields the address and the Serving."""
    server = create_server(service_name="test", telemetry=None, **server_options)
    methods = {name: KINDS[kind](function) for name, (kind, function) in handlers.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    serving = Serving(server, **(serving_options or {}))
    address = await serving.start()
    serving.set_serving(True)
    try:
        yield address, serving
    finally:
        await serving.stop(0)


@contextlib.asynccontextmanager
async def running_service(
    handlers: dict[str, tuple[str, Callable[..., Any]]], **options: Any
) -> AsyncIterator[dict[str, Any]]:
    """As `running_server`, but yields the callables of a channel by method."""
    async with running_server(handlers, **options) as (address, _), create_channel(address) as channel:
        yield {name: getattr(channel, kind)(f"/{full_name(name)}") for name, (kind, _) in handlers.items()}
