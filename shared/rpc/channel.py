"""Channels to our services: balanced, traced, and failing with our own errors.

A channel made here is used with the generated stubs as any other. Each call gets a CLIENT
span and carries the trace; a failed call raises an error of shared/errors.py with the gRPC
error as its cause. Wraps the callables instead of using gRPC's interceptors: those lose the
cancellation of a caller's task, so the server would go on working for nobody.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.trace import SpanKind, Status, StatusCode

from shared import telemetry
from shared.errors import DependencyUnavailableError
from shared.rpc import status

MAX_MESSAGE_BYTES = 8 << 20
_duration = telemetry.meter().create_histogram(
    "rpc.client.call.duration",
    "s",
    "Duration of calls to other services, by method and status.",
    explicit_bucket_boundaries_advisory=telemetry.CALL_SECONDS,
)
Metadata = Iterable[tuple[str, str | bytes]]

_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            # What is retried here never reached the server's code; the rest is the caller's decision.
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}


def create_channel(
    address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES, is_retried: bool = False
) -> grpc.aio.Channel:
    """Returns a channel to `address` (host:port or dns:///name:port).

    `is_retried`: let gRPC itself repeat calls that ended UNAVAILABLE; only for services
    whose every call may be repeated.
    """
    config = dict(_SERVICE_CONFIG) if is_retried else {"loadBalancingConfig": [{"round_robin": {}}]}
    options: list[tuple[str, Any]] = [
        ("grpc.service_config", json.dumps(config)),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # A name that gains an address is noticed within seconds, not half a minute.
        ("grpc.dns_min_time_between_resolutions_ms", 5_000),
        # Servers take pings more often than every 20 s for an attack.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # A service that restarts is found again at once: its clients wait for it, not for a timer.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    return _ObservedChannel(grpc.aio.insecure_channel(address, options=options))


class _ObservedChannel(grpc.aio.Channel):
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def __aenter__(self) -> _ObservedChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._channel.__aexit__(*exception)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _one_answer(method, self._channel.unary_unary(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _one_answer(method, self._channel.stream_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _many_answers(method, self._channel.unary_stream(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _many_answers(method, self._channel.stream_stream(method, *args, **kwargs))


def _one_answer(method: str, callable_: Callable[..., Any]) -> Callable[..., Any]:
    async def call(request: Any, *, metadata: Metadata | None = None, **kwargs: Any) -> Any:
        with _Observed(method) as observed:
            metadata = _with_trace(metadata, observed)
            return await callable_(request, metadata=metadata, **kwargs)

    return call


def _many_answers(method: str, callable_: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, *, metadata: Metadata | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        with _Observed(method) as observed:
            running = callable_(request, metadata=_with_trace(metadata, observed), **kwargs)
            try:
                async for response in running:
                    yield response
            finally:
                running.cancel()

    return call


class _Observed:
    """The CLIENT span and the duration of one call; turns its failure into our own error.

    The span is not made the current one: a generator may be resumed in another context,
    where the token could not be given back.
    """

    def __init__(self, method: str) -> None:
        self._method = method.lstrip("/")

    def __enter__(self) -> _Observed:
        self._began = time.monotonic()
        self.span = telemetry.tracer().start_span(
            self._method,
            kind=SpanKind.CLIENT,
            attributes={"rpc.system.name": "grpc", "rpc.method": self._method},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace_back: TracebackType | None
    ) -> None:
        if error is None:
            self._end(grpc.StatusCode.OK)
        elif isinstance(error, grpc.RpcError):
            self._end(error.code())
            raise status.from_rpc_error(error) from error
        else:
            is_left = isinstance(error, asyncio.CancelledError | GeneratorExit)
            self._end(grpc.StatusCode.CANCELLED if is_left else grpc.StatusCode.UNKNOWN)
            if isinstance(error, asyncio.CancelledError) and not _is_task_cancelled():
                # The channel was closed under the call. As a CancelledError this would end the
                # caller's task without a word.
                raise DependencyUnavailableError("SHUTTING_DOWN") from error

    def _end(self, code: grpc.StatusCode) -> None:
        labels = {"rpc.method": self._method, "rpc.response.status_code": code.name}
        self.span.set_attribute("rpc.response.status_code", code.name)
        if code is not grpc.StatusCode.OK:
            labels["error.type"] = code.name
            self.span.set_attribute("error.type", code.name)
            self.span.set_status(Status(StatusCode.ERROR, code.name))
        _duration.record(time.monotonic() - self._began, labels)
        self.span.end()


def _is_task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _with_trace(metadata: Metadata | None, observed: _Observed) -> list[tuple[str, str | bytes]]:
    return [*(metadata or ()), *telemetry.carrier_of(observed.span).items()]
