"""A real gRPC server whose ingest service a test scripts, to provoke what a healthy one never does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from readymark.ingest.v1 import ingest_service_pb2 as pb
from readymark.ingest.v1 import ingest_service_pb2_grpc as pb_grpc
from readymark_client import AsyncReadymark

Handler = Callable[[Any, Any], Any]


class ScriptedIngest(pb_grpc.IngestServiceServicer):
    """Answers with the handlers that the test sets, and remembers the metadata of each call."""

    def __init__(self) -> None:
        self.address = ""
        self.metadata: list[dict[str, Any]] = []
        self.handlers: dict[str, Handler] = {}

    def _note(self, context: Any) -> None:
        self.metadata.append(dict(context.invocation_metadata()))

    async def GetDocument(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(context)
        return await self.handlers["GetDocument"](request, context)

    async def CreateDocument(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(context)
        return await self.handlers["CreateDocument"](request, context)

    async def UploadDocument(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        self._note(context)
        return await self.handlers["UploadDocument"](request_iterator, context)

    async def ListDocuments(self, request: Any, context: Any) -> Any:  # noqa: N802
        return await self.handlers["ListDocuments"](request, context)

    async def CancelDocument(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(context)
        return await self.handlers["CancelDocument"](request, context)

    async def WatchDocuments(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._note(context)
        async for message in self.handlers["WatchDocuments"](request, context):
            yield message


@pytest.fixture
async def ingest() -> AsyncIterator[ScriptedIngest]:
    servicer = ScriptedIngest()
    server = grpc.aio.server()
    pb_grpc.add_IngestServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(None)


@pytest.fixture
async def client(ingest: ScriptedIngest) -> AsyncIterator[AsyncReadymark]:
    async with AsyncReadymark(ingest.address, timeout_seconds=10) as made:
        yield made


Refuse = Callable[..., Awaitable[None]]


@pytest.fixture
def refuse() -> Refuse:
    """Aborts a call the way a Readymark service does: ErrorInfo, sentence, and push-back where given."""

    async def abort(
        context: Any,
        grpc_code: int,
        code: str,
        reason: str,
        *,
        sentence: str = "A sentence.",
        retry_after_seconds: float | None = None,
        **facts: str,
    ) -> None:
        details = [
            error_details_pb2.ErrorInfo(reason=reason, domain="readymark", metadata={"code": code, **facts}),
            error_details_pb2.LocalizedMessage(locale="en", message=sentence),
        ]
        if retry_after_seconds is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(int(retry_after_seconds * 1000))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        packed = []
        for detail in details:
            box = any_pb2.Any()
            box.Pack(detail)
            packed.append(box)
        status = status_pb2.Status(code=grpc_code, message="english", details=packed)
        await context.abort_with_status(rpc_status.to_status(status))

    return abort


class CuttingProxy:
    """Passes bytes between a client and a server, and cuts the first connections after some bytes."""

    def __init__(self, target: str, cut_after_bytes: int, cuts: int) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self._cut_after_bytes = cut_after_bytes
        self.cuts_left = cuts
        self.cuts_done = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        back = asyncio.create_task(self._pass_back(up_reader, writer))
        passed = 0
        try:
            while data := await reader.read(16384):
                passed += len(data)
                if self.cuts_left and passed > self._cut_after_bytes:
                    self.cuts_left -= 1
                    self.cuts_done += 1
                    writer.transport.abort()
                    return
                up_writer.write(data)
                await up_writer.drain()
        except OSError:
            pass
        finally:
            back.cancel()
            up_writer.close()
            writer.close()

    @staticmethod
    async def _pass_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(16384):
            writer.write(data)


__all__ = ["CuttingProxy", "Refuse", "ScriptedIngest", "code_pb2", "pb"]
