"""Sending a document: by the upload stream in constant memory, or inline when it is small.

Owns frames, checksum and repetition under one request id. Never decides duplicates.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import grpc
import grpc.aio
from readymark.ingest.v1 import ingest_service_pb2 as ingest_pb2

from readymark_client.connection import DEFAULT_TIMEOUT_SECONDS, Connection
from readymark_client.errors import InvalidArgument, local_error

FRAME_BYTES = 256 << 10
# Read in larger pieces than frames: one hop to a thread each costs more than the read.
READ_BYTES = 4 * FRAME_BYTES
MAX_INLINE_BYTES = 1 << 20
# Slow enough for a poor line: a deadline is there to end what hangs, not what is slow.
SLOWEST_BYTES_PER_SECOND = 256 << 10

OnSent = Callable[[int, int], None]


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
    source: BinaryIO,
    *,
    timeout_seconds: float | None,
    on_sent: OnSent | None = None,
) -> Any:
    """Returns the answer of UploadDocument; a cut stream is sent again whole, under the same request id."""

    async def once(remaining_seconds: float) -> Any:
        source.seek(0)
        call = connection.stub.UploadDocument(
            timeout=remaining_seconds, metadata=connection.outgoing_metadata()
        )
        try:
            # The service may answer before all is sent: a too large file is refused at its
            # header. Writing fails then, and the answer below says why.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await _write_frames(call, header, source, on_sent)
            return await call
        finally:
            call.cancel()

    if timeout_seconds is None:
        timeout_seconds = upload_timeout_seconds(header.size_bytes)
    return await connection.repeat(once, timeout_seconds=timeout_seconds)


async def _write_frames(
    call: Any, header: ingest_pb2.DocumentHeader, source: BinaryIO, on_sent: OnSent | None
) -> None:
    checksum = hashlib.sha256()
    sent_bytes = 0
    await call.write(ingest_pb2.UploadDocumentRequest(header=header))
    while piece := await asyncio.to_thread(_read_and_hash, source, checksum):
        for start in range(0, len(piece), FRAME_BYTES):
            frame = piece[start : start + FRAME_BYTES]
            await call.write(ingest_pb2.UploadDocumentRequest(data=frame))
            sent_bytes += len(frame)
            if on_sent is not None:
                on_sent(sent_bytes, header.size_bytes)
    trailer = ingest_pb2.UploadTrailer(sha256=checksum.hexdigest(), size_bytes=sent_bytes)
    await call.write(ingest_pb2.UploadDocumentRequest(trailer=trailer))
    await call.done_writing()


def _read_and_hash(source: BinaryIO, checksum: Any) -> bytes:
    piece = source.read(READ_BYTES)
    checksum.update(piece)
    return piece


def open_source(source: os.PathLike[str] | bytes | str, language: str) -> tuple[BinaryIO, int]:
    """Returns a seekable source and its size in bytes; raises InvalidArgument for an unreadable path."""
    if isinstance(source, bytes):
        return io.BytesIO(source), len(source)
    if isinstance(source, str):
        return open_source(source.encode(), language)
    path = Path(source)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            problem = "it is a folder" if stat.S_ISDIR(status.st_mode) else "it is not a file"
            raise local_error(InvalidArgument, "FILE_NOT_READABLE", language, path=path, problem=problem)
        return path.open("rb"), status.st_size
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
        raise local_error(
            InvalidArgument, "FILE_NOT_READABLE", language, path=path, problem=problem
        ) from error
