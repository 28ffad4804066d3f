"""Sending a document: by the upload stream in constant memory, or inline when it is small.

Owns frames, checksum and repetition under one request id. Never decides duplicates.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from readymark.ingest.v1 import ingest_service_pb2 as ingest_pb2

from readymark_client.connection import DEFAULT_TIMEOUT_SECONDS, Connection
from readymark_client.errors import InvalidArgument, ReadymarkClientError, local_error

FRAME_BYTES = 256 << 10
MAX_INLINE_BYTES = 1 << 20
# Slow enough for a poor line: a deadline is there to end what hangs, not what is slow.
SLOWEST_BYTES_PER_SECOND = 256 << 10

OnSent = Callable[[int, int], None]
OpenSource = Callable[[], BinaryIO]


def upload_timeout_seconds(size_bytes: int) -> float:
    """Returns the default deadline: 30 s and what the size needs on a slow line."""
    return DEFAULT_TIMEOUT_SECONDS + size_bytes / SLOWEST_BYTES_PER_SECOND


async def send_inline(
    connection: Connection,
    header: ingest_pb2.DocumentHeader,
    content: bytes | str,
    *,
    timeout_seconds: float | None,
) -> Any:
    """Returns the answer of CreateDocument; `content` has at most MAX_INLINE_BYTES."""
    if isinstance(content, str):
        request = ingest_pb2.CreateDocumentRequest(header=header, text=content)
    else:
        request = ingest_pb2.CreateDocumentRequest(header=header, data=content)
    return await connection.call("CreateDocument", request, timeout_seconds=timeout_seconds)


async def send_stream(
    connection: Connection,
    header: ingest_pb2.DocumentHeader,
    open_source: OpenSource,
    *,
    timeout_seconds: float | None,
    on_sent: OnSent | None = None,
) -> Any:
    """Returns the answer of UploadDocument; a cut stream is sent again whole, under the same request id."""

    async def once(remaining_seconds: float) -> Any:
        # The blocking stub, whose own thread reads and hashes the file. The one for asyncio
        # loses the service's answer when it comes before all is sent (grpc/grpc#36066), and
        # that is how every refusal at the header comes.
        frames = _Frames(header, open_source, on_sent)
        call = connection.blocking_stub.UploadDocument.future(
            iter(frames), timeout=remaining_seconds, metadata=connection.outgoing_metadata()
        )
        try:
            await _ended(call)
        finally:
            call.cancel()
        if frames.fault is not None:
            raise _not_readable(connection.language, frames.fault.filename, frames.fault) from frames.fault
        return call.result()

    if timeout_seconds is None:
        timeout_seconds = upload_timeout_seconds(header.size_bytes)
    return await connection.repeat(once, timeout_seconds=timeout_seconds)


async def _ended(call: Any) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wake(_: Any) -> None:
        # A loop that was closed meanwhile has nobody left who waits.
        if not loop.is_closed():
            loop.call_soon_threadsafe(ended.set)

    call.add_done_callback(wake)
    await ended.wait()


class _Frames:
    """The messages of one try; each try opens the source anew, so a late reader disturbs no other."""

    def __init__(
        self, header: ingest_pb2.DocumentHeader, open_source: OpenSource, on_sent: OnSent | None
    ) -> None:
        self._header = header
        self._open_source = open_source
        self._on_sent = on_sent
        self.fault: OSError | None = None

    def __iter__(self) -> Iterator[ingest_pb2.UploadDocumentRequest]:
        yield ingest_pb2.UploadDocumentRequest(header=self._header)
        checksum = hashlib.sha256()
        sent_bytes = 0
        try:
            with self._open_source() as source:
                while frame := source.read(FRAME_BYTES):
                    checksum.update(frame)
                    yield ingest_pb2.UploadDocumentRequest(data=frame)
                    sent_bytes += len(frame)
                    if self._on_sent is not None:
                        self._on_sent(sent_bytes, self._header.size_bytes)
        except OSError as error:
            # Ends the stream without a trailer, so the service keeps nothing of it.
            self.fault = error
            return
        trailer = ingest_pb2.UploadTrailer(sha256=checksum.hexdigest(), size_bytes=sent_bytes)
        yield ingest_pb2.UploadDocumentRequest(trailer=trailer)


def inspect_source(source: os.PathLike[str] | bytes | str, language: str) -> tuple[OpenSource, int]:
    """Returns how to open a source and its size in bytes; raises InvalidArgument for an unreadable path."""
    if isinstance(source, bytes | str):
        content = source.encode() if isinstance(source, str) else source
        return (lambda: io.BytesIO(content)), len(content)
    path = Path(source)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            problem = "it is a folder" if stat.S_ISDIR(status.st_mode) else "it is not a file"
            raise local_error(InvalidArgument, "FILE_NOT_READABLE", language, path=path, problem=problem)
        with path.open("rb"):
            return (lambda: path.open("rb")), status.st_size
    except OSError as error:
        raise _not_readable(language, path, error) from error


def _not_readable(language: str, path: object, error: OSError) -> ReadymarkClientError:
    problem = (error.strerror or str(error)).lower()
    return local_error(InvalidArgument, "FILE_NOT_READABLE", language, path=path, problem=problem)
