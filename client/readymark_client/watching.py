"""Following documents across broken streams: resume tokens, pauses, limits.

Owns when a watch is taken up again. Never polls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from readymark.ingest.v1 import ingest_service_pb2 as ingest_pb2

from readymark_client import wire
from readymark_client.connection import MAX_DELAY_SECONDS, Connection, retry_delay_seconds
from readymark_client.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Overloaded,
    ReadymarkClientError,
    Unavailable,
    local_error,
)
from readymark_client.values import Change, ChangeKind, Document

MAX_NAMES = 1000
# One stream's deadline; a watch without an end is taken up again after it.
STREAM_SECONDS = 600.0
# The service gives a sign of life far more often; longer silence is a dead connection.
IDLE_SECONDS = 60.0
# About half a minute of failed tries in a row, the restart of a service included.
MAX_FAILED_TRIES = 10


async def watch_changes(
    connection: Connection, request: ingest_pb2.WatchDocumentsRequest, *, timeout_seconds: float | None
) -> AsyncIterator[Change]:
    """Yields every event; a broken stream is resumed where it broke.

    Ends when `request.until_settled` is set and every named document is READY, FAILED or
    deleted. Raises DeadlineExceeded after `timeout_seconds`, Unavailable when the service
    stays away.
    """
    clock = asyncio.get_running_loop().time
    deadline = None if timeout_seconds is None else clock() + timeout_seconds
    unsettled = {name.rsplit("/", 1)[-1] for name in request.names}
    failed_tries = 0
    while True:
        stream_seconds = STREAM_SECONDS if deadline is None else min(STREAM_SECONDS, deadline - clock())
        if stream_seconds <= 0:
            raise connection.timed_out(timeout_seconds or 0)
        delay = 0.0
        try:
            messages = connection.stream(
                "WatchDocuments", request, timeout_seconds=stream_seconds, idle_seconds=IDLE_SECONDS
            )
            async with contextlib.aclosing(messages):  # type: ignore[type-var]
                async for message in messages:
                    failed_tries = 0
                    change = wire.change(message)
                    if change is not None:
                        _note(change, unsettled)
                        yield change
                    # After the yield: an event counts as told once the caller has taken it.
                    request.resume_token = message.resume_token or request.resume_token
            if request.until_settled and not unsettled:
                return
            # A service that stops may end its streams without an error.
            failed_tries += 1
            delay = min(0.2 * failed_tries, MAX_DELAY_SECONDS)
        except ReadymarkClientError as error:
            failed_tries += 1
            delay = _delay_after(error, request, failed_tries)
        if deadline is not None:
            delay = min(delay, max(deadline - clock(), 0))
        await asyncio.sleep(delay)


def _note(change: Change, unsettled: set[str]) -> None:
    document = change.document
    if document is None or document.status.is_settled:
        unsettled.discard(change.document_id)
    else:
        # Back to PENDING by a retry from elsewhere: the service waits for it again.
        unsettled.add(change.document_id)


def _delay_after(
    error: ReadymarkClientError, request: ingest_pb2.WatchDocumentsRequest, failed_tries: int
) -> float:
    """Returns the pause before the next stream; raises `error` when none would help."""
    if isinstance(error, DeadlineExceeded):
        return 0.0
    if isinstance(error, InvalidArgument) and error.reason == "RESUME_TOKEN_INVALID" and request.resume_token:
        request.resume_token = ""
        return 0.0
    if isinstance(error, Unavailable | Overloaded) and failed_tries <= MAX_FAILED_TRIES:
        return retry_delay_seconds(failed_tries, error)
    raise error


async def wait_until_settled(
    connection: Connection, document_ids: Sequence[str], *, timeout_seconds: float
) -> AsyncIterator[Document]:
    """Yields each document in the state in which it settled, batch by batch.

    Raises NotFound when one is deleted meanwhile, DeadlineExceeded with reason NOT_SETTLED.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_seconds
    for start in range(0, len(document_ids), MAX_NAMES):
        batch = document_ids[start : start + MAX_NAMES]
        names = [wire.document_name(document_id) for document_id in batch]
        request = ingest_pb2.WatchDocumentsRequest(names=names, until_settled=True)
        latest: dict[str, Document] = {}
        try:
            changes = watch_changes(connection, request, timeout_seconds=deadline - clock())
            async with contextlib.aclosing(changes):  # type: ignore[type-var]
                async for change in changes:
                    if change.kind is ChangeKind.DELETED or change.document is None:
                        raise local_error(
                            NotFound, "DOCUMENT_DELETED", connection.language, document=change.document_id
                        )
                    latest[change.document_id] = change.document
        except DeadlineExceeded as error:
            waiting = len(names) - sum(document.status.is_settled for document in latest.values())
            raise local_error(
                DeadlineExceeded,
                "NOT_SETTLED",
                connection.language,
                seconds=f"{timeout_seconds:g}",
                count=waiting + len(document_ids) - start - len(batch),
            ) from error
        for document in latest.values():
            yield document
