"""One service as the SDK sees it: channel, deadlines, metadata, errors, repeated calls.

Owns how a call goes out and what a failed one raises. Never knows what a call means.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from importlib import metadata as distribution
from typing import Any

import grpc
import grpc.aio
from opentelemetry import propagate

from readymark_client.errors import (
    DeadlineExceeded,
    Overloaded,
    ReadymarkClientError,
    Unavailable,
    from_rpc_error,
    local_error,
)

DEFAULT_TIMEOUT_SECONDS = 30.0
MAX_TRIES = 4
FIRST_DELAY_SECONDS = 0.2
MAX_DELAY_SECONDS = 5.0
# A page of 1000 documents with failures and metadata passes gRPC's own 4 MiB.
MAX_ANSWER_BYTES = 64 << 20
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
HEALTH_NAMES = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}


def client_version() -> str:
    try:
        return distribution.version("readymark")
    except distribution.PackageNotFoundError:
        return "development"


def retry_delay_seconds(failed_tries: int, error: ReadymarkClientError) -> float:
    """Returns how long to wait: what the service asks for, else doubling with jitter."""
    if error.retry_after_seconds is not None:
        return error.retry_after_seconds
    ceiling = min(FIRST_DELAY_SECONDS * float(2 ** (failed_tries - 1)), MAX_DELAY_SECONDS)
    return ceiling * random.uniform(0.5, 1.0)


class Connection:
    """A lazy channel to one service; all of it runs on one event loop."""

    def __init__(
        self,
        service: str,
        address: str,
        stub: Callable[[Any], Any],
        *,
        language: str = "en",
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.service = service
        self.address = address
        self.language = language
        self.timeout_seconds = timeout_seconds
        self._credentials = credentials
        self._make_stub = stub
        self._channel: Any = None
        self._stub: Any = None
        self._blocking_channel: Any = None

    @property
    def stub(self) -> Any:
        if self._stub is None:
            self._stub = self._make_stub(self._open())
        return self._stub

    @property
    def blocking_stub(self) -> Any:
        """The stub that is not for asyncio, on a channel of its own; see `upload.py` for the reason."""
        if self._blocking_channel is None:
            options = list(_channel_options().items())
            if self._credentials is None:
                self._blocking_channel = grpc.insecure_channel(self.address, options=options)
            else:
                self._blocking_channel = grpc.secure_channel(self.address, self._credentials, options=options)
        return self._make_stub(self._blocking_channel)

    async def call(
        self, method: str, request: Any, *, timeout_seconds: float | None = None, idempotent: bool = True
    ) -> Any:
        """Returns the answer; an idempotent call is repeated inside its deadline."""

        async def once(remaining_seconds: float) -> Any:
            return await getattr(self.stub, method)(
                request, timeout=remaining_seconds, metadata=self.outgoing_metadata()
            )

        return await self.repeat(
            once, timeout_seconds=timeout_seconds, max_tries=MAX_TRIES if idempotent else 1
        )

    async def repeat(
        self, once: Callable[[float], Any], *, timeout_seconds: float | None, max_tries: int = MAX_TRIES
    ) -> Any:
        """Runs `once(remaining_seconds)` until it succeeds or repeating cannot help."""
        allowed = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = asyncio.get_running_loop().time() + allowed
        for tries in range(1, max_tries + 1):
            remaining = deadline - asyncio.get_running_loop().time()
            try:
                return await once(max(remaining, 0.001))
            except grpc.RpcError as error:
                raised = self.translate(error, allowed)
                remaining = deadline - asyncio.get_running_loop().time()
                delay = retry_delay_seconds(tries, raised)
                may_help = isinstance(raised, Unavailable | Overloaded)
                if not may_help or tries == max_tries or delay >= remaining:
                    raise raised from error
            await asyncio.sleep(delay)
        raise AssertionError("the last try returns or raises")

    async def stream(
        self, method: str, request: Any, *, timeout_seconds: float, idle_seconds: float | None = None
    ) -> AsyncIterator[Any]:
        """Yields messages; one that stays away for `idle_seconds` counts as a broken connection."""
        call = getattr(self.stub, method)(request, timeout=timeout_seconds, metadata=self.outgoing_metadata())
        try:
            while True:
                message = await asyncio.wait_for(call.read(), idle_seconds)
                if message is grpc.aio.EOF:
                    return
                yield message
        except grpc.aio.AioRpcError as error:
            raise self.translate(error, timeout_seconds) from error
        except TimeoutError as error:
            raise self.unreachable() from error
        finally:
            call.cancel()

    async def health(self, *, timeout_seconds: float) -> str:
        """Returns SERVING, NOT_SERVING ...; raises ServiceUnreachable when nobody answers."""
        # The two messages are empty and one enum: not worth a dependency of the client.
        check = self._open().unary_unary(HEALTH_CHECK)
        try:
            answer = await check(b"", timeout=timeout_seconds, metadata=self.outgoing_metadata())
        except grpc.aio.AioRpcError as error:
            raise self.translate(error, timeout_seconds) from error
        number = answer[1] if len(answer) == 2 and answer[0] == 0x08 else 0
        return HEALTH_NAMES.get(number, "UNKNOWN")

    def outgoing_metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the reader's language and the caller's trace, when there is one."""
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        return (("accept-language", self.language), *carrier.items())

    def translate(self, error: grpc.RpcError, timeout_seconds: float) -> ReadymarkClientError:
        return from_rpc_error(
            error,
            service=self.service,
            address=self.address,
            language=self.language,
            timeout_seconds=timeout_seconds,
        )

    def unreachable(self) -> ReadymarkClientError:
        facts = {"service": self.service, "address": self.address, "option": f"--{self.service}"}
        return local_error(Unavailable, "SERVICE_UNREACHABLE", self.language, **facts)

    def timed_out(self, timeout_seconds: float) -> ReadymarkClientError:
        facts = {"service": self.service, "seconds": f"{timeout_seconds:g}"}
        return local_error(DeadlineExceeded, "DEADLINE_EXCEEDED", self.language, **facts)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
        if self._blocking_channel is not None:
            self._blocking_channel.close()
        self._channel = self._stub = self._blocking_channel = None

    def _open(self) -> Any:
        if self._channel is None:
            options = list(_channel_options().items())
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self.address, options=options)
            else:
                self._channel = grpc.aio.secure_channel(self.address, self._credentials, options=options)
        return self._channel


def _channel_options() -> Mapping[str, Any]:
    return {
        "grpc.max_receive_message_length": MAX_ANSWER_BYTES,
        "grpc.primary_user_agent": f"readymark-client/{client_version()}",
        # Otherwise every call of this client goes to one replica.
        "grpc.service_config": json.dumps({"loadBalancingConfig": [{"round_robin": {}}]}),
        # A service that was restarted is found again within two seconds.
        "grpc.initial_reconnect_backoff_ms": 200,
        "grpc.max_reconnect_backoff_ms": 2000,
    }
