"""Servers as all our services run them: limits, health, reflection, graceful stop.

`create_server` makes the server, the caller adds its servicer, `Serving` opens the ports.
Health can have a port and a thread of its own, so that a busy event loop does not look dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared.rpc.interceptors import CallInterceptor
from shared.telemetry import Telemetry

MAX_MESSAGE_BYTES = 8 << 20
# Clients spread over replicas only if connections end now and then; the library jitters by 10 %.
MAX_CONNECTION_AGE_MS = 300_000
MAX_CONNECTION_AGE_GRACE_MS = 300_000
_STATUSES = health_pb2.HealthCheckResponse


def create_server(
    *,
    service_name: str,
    telemetry: Telemetry | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_concurrent_rpcs: int | None = None,
) -> grpc.aio.Server:
    """Returns a server without ports; calls beyond `max_concurrent_rpcs` get RESOURCE_EXHAUSTED."""
    del service_name, telemetry  # Set up for the whole process already; asked for so that nobody forgets.
    return grpc.aio.server(
        interceptors=[CallInterceptor()],
        options=[
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_concurrent_streams", 1000),
            ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_MS),
            ("grpc.max_connection_age_grace_ms", MAX_CONNECTION_AGE_GRACE_MS),
            # A client that vanished without a word is noticed, and its streams end.
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 20_000),
            # Two processes on one port would each get half of the calls, silently.
            ("grpc.so_reuseport", 0),
        ],
        maximum_concurrent_rpcs=max_concurrent_rpcs,
    )


class PortTakenError(Exception):
    """The address to listen on is not free or not ours; the text names it."""


class Serving:
    """Opens and closes the ports of one server."""

    def __init__(
        self,
        server: grpc.aio.Server,
        *,
        listen: str = "127.0.0.1:0",
        health_listen: str | None = None,
        service_names: Sequence[str] = (),
    ) -> None:
        self._server = server
        self._listen = listen
        self._health_listen = health_listen
        self._service_names = ("", *service_names)
        self._health = health.HealthServicer(experimental_non_blocking=True)
        self._health_server: grpc.Server | None = None
        self._answers = _AsyncHealth(self._health)
        self.health_address: str | None = None
        """host:port of the health server, once started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._answers, server)
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        self.set_serving(False)

    async def start(self) -> str:
        """Opens the ports; returns host:port of the main one. Raises PortTakenError."""
        with _taken(self._listen):
            port = self._server.add_insecure_port(self._listen)
        if self._health_listen:
            self._start_health_server(self._health_listen)
        await self._server.start()
        return _bound(self._listen, port)

    def _start_health_server(self, listen: str) -> None:
        server = grpc.server(ThreadPoolExecutor(2, "health"), options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        with _taken(listen):
            port = server.add_insecure_port(listen)
        server.start()
        self._health_server = server
        self.health_address = _bound(listen, port)

    def set_serving(self, is_serving: bool) -> None:
        status = _STATUSES.SERVING if is_serving else _STATUSES.NOT_SERVING
        for name in self._service_names:
            self._health.set(name, status)

    async def stop(self, grace_seconds: float) -> None:
        """Says NOT_SERVING, refuses new calls, and lets running ones finish for `grace_seconds`."""
        self.set_serving(False)
        # Whoever watches the health would hold up the stop for the whole grace.
        self._answers.stopping.set()
        await self._server.stop(grace_seconds)
        if self._health_server is not None:
            await asyncio.to_thread(self._health_server.stop(0).wait)


class _AsyncHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The same answers on the main port. Watch polls: the statuses live in a thread-safe servicer."""

    POLL_SECONDS = 0.5

    def __init__(self, answers: health.HealthServicer) -> None:
        self._answers = answers
        self.stopping = asyncio.Event()

    async def Check(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
        answer = _Answer()
        response = self._answers.Check(request, answer)
        if answer.code is not None:
            await context.abort(answer.code, answer.details)
        return response

    async def Watch(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
        last = None
        while True:
            answer = _Answer()
            response = self._answers.Check(request, answer)
            status = _STATUSES.SERVICE_UNKNOWN if answer.code is not None else response.status
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            if self.stopping.is_set():
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), self.POLL_SECONDS)


class _Answer:
    """Stands in for a sync context: notes what the servicer sets."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None
        self.details = "unknown service"

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


def _bound(listen: str, port: int) -> str:
    return f"{listen.rsplit(':', 1)[0]}:{port}"


@contextlib.contextmanager
def _taken(listen: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PortTakenError(
            f"cannot listen on {listen}: the address is in use or not of this host"
        ) from error


async def wait_for_signal() -> None:
    """Returns at SIGTERM or SIGINT; a second one ends the process as usual."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    numbers = (signal.SIGTERM, signal.SIGINT)

    def ask() -> None:
        asked.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, ask)
    await asked.wait()
