"""Between messages of the contract and the values of this service, both ways. Decides nothing.

Sentences are rendered here, in the language of the call.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

from google.protobuf import struct_pb2, timestamp_pb2
from google.protobuf.duration_pb2 import Duration
from readymark.common.v1 import types_pb2
from readymark.ingest.v1 import ingest_service_pb2 as pb

from services.ingest.catalog import AttemptPage, ChunkPage, Download, ListedChunk
from services.ingest.header import DocumentHeader, DuplicatePolicy
from services.ingest.lifecycle import DocumentStatus
from services.ingest.model import Locator
from services.ingest.repository.states import Attempt, DocumentState, QueueStats
from services.ingest.submission import Frame, Trailer
from services.ingest.watching import Changed, Deleted, SignOfLife, Snapshot, Told
from shared import messages
from shared.errors import (
    BY_CODE,
    ConflictError,
    InternalError,
    InvalidArgumentError,
    LeaseLostError,
    ReadymarkError,
)
from shared.rpc.status import to_rpc_status

# Failures that are stored but never raised, by the error that comes closest.
_STORED_KINDS: Mapping[str, type[ReadymarkError]] = {
    **BY_CODE,
    "CANCELLED": ConflictError,
    "LEASE_EXPIRED": LeaseLostError,
}


async def upload_frames(requests: AsyncIterator[pb.UploadDocumentRequest]) -> AsyncIterator[Frame]:
    """Yields what the messages of an upload hold; an empty message is an empty piece of data."""
    async for request in requests:
        kind = request.WhichOneof("frame")
        if kind == "header":
            yield document_header(request.header)
        elif kind == "trailer":
            yield Trailer(request.trailer.sha256, request.trailer.size_bytes)
        else:
            yield request.data


def document_header(header: pb.DocumentHeader) -> DocumentHeader:
    return DocumentHeader(
        parent=header.parent,
        source_key=header.source_key,
        display_name=header.display_name,
        media_type=header.media_type,
        metadata=_plain_struct(header.metadata),
        duplicate_policy=_duplicate_policy(header.duplicate_policy),
        request_id=header.request_id,
        size_bytes=header.size_bytes or None,
    )


def inline_content(request: pb.CreateDocumentRequest) -> bytes:
    return request.data if request.WhichOneof("content") == "data" else request.text.encode()


def document_status(value: pb.DocumentStatus.ValueType) -> DocumentStatus | None:
    """Returns None for "unspecified"; raises InvalidArgumentError for one this release does not know."""
    if value not in pb.DocumentStatus.values():
        raise InvalidArgumentError("FIELD_INVALID", field="status", problem="UNKNOWN_VALUE")
    name = pb.DocumentStatus.Name(value)
    return next((status for status in DocumentStatus if name == f"DOCUMENT_STATUS_{status}"), None)


def document(state: DocumentState, language: str) -> pb.Document:
    message = pb.Document(
        name=state.name,
        document_id=state.document_id,
        collection=state.collection,
        source_key=state.source_key or "",
        display_name=state.display_name,
        media_type=state.media_type,
        size_bytes=state.size_bytes,
        sha256=state.blob_sha256,
        status=pb.DocumentStatus.Value(f"DOCUMENT_STATUS_{state.status}"),
        job_status=pb.IngestionJobStatus.Value(f"INGESTION_JOB_STATUS_{state.job_status}"),
        version=state.version_number,
        served_version=state.served_version_number,
        searchable=state.served_version_number > 0,
        progress=pb.Progress(
            done_units=state.progress_done, total_units=state.progress_total, unit=state.progress_unit
        ),
        attempts=state.attempts,
        max_attempts=state.max_attempts,
        warnings=[warning(stored, language) for stored in state.warnings],
        chunk_count=state.chunk_count,
        token_count=state.token_count,
        title=state.title,
        parser_fingerprint=state.parser_fingerprint,
        chunker_fingerprint=state.chunker_fingerprint,
        model_fingerprint=state.model_fingerprint,
        create_time=_timestamp(state.created_at),
        update_time=_timestamp(state.updated_at),
        available_time=_timestamp(state.available_at),
        trace_id=state.trace_id,
        etag=state.etag,
    )
    message.metadata.update(state.metadata)
    if state.failure is not None:
        message.failure.CopyFrom(failure(state.failure, language))
    if state.ready_at is not None:
        message.ready_time.CopyFrom(_timestamp(state.ready_at))
    return message


def failure(stored: Mapping[str, Any], language: str) -> types_pb2.Failure:
    """Returns a stored failure, its sentence in `language`."""
    parameters = {str(name): str(value) for name, value in stored.get("parameters", {}).items()}
    kind = _STORED_KINDS.get(stored["code"], InternalError)
    error = kind(stored["reason"])
    error.parameters = parameters
    status = to_rpc_status(error, language)
    if stored["retryable"]:
        status.message = messages.render(
            "WILL_BE_RETRIED",
            {
                "attempt": str(stored["attempt"]),
                "max_attempts": str(stored["max_attempts"]),
                "cause": messages.render(stored["reason"], parameters, language),
            },
            language,
        )
    message = types_pb2.Failure(
        status=status,
        code=stored["code"],
        reason=stored["reason"],
        retryable=stored["retryable"],
        stage=stored.get("stage") or "",
        attempt=stored["attempt"],
        max_attempts=stored["max_attempts"],
        occur_time=_timestamp(datetime.datetime.fromisoformat(stored["occurred_at"])),
    )
    if stored.get("next_attempt_at"):
        message.next_attempt_time.CopyFrom(
            _timestamp(datetime.datetime.fromisoformat(stored["next_attempt_at"]))
        )
    return message


def warning(stored: Mapping[str, Any], language: str) -> types_pb2.Warning:
    parameters = {str(name): str(value) for name, value in stored.get("parameters", {}).items()}
    return types_pb2.Warning(
        reason=stored["reason"],
        message=messages.render(stored["reason"], parameters, language),
        page=stored.get("page") or 0,
        parameters=parameters,
    )


def watch_event(told: Told, language: str) -> pb.WatchDocumentsResponse:
    response = pb.WatchDocumentsResponse(resume_token=told.resume_token)
    match told.event:
        case Snapshot(state):
            response.snapshot.CopyFrom(document(state, language))
        case Changed(state):
            response.changed.CopyFrom(document(state, language))
        case Deleted(name):
            response.deleted_name = name
        case SignOfLife():
            response.heartbeat.time.GetCurrentTime()
    return response


def attempt_page(page: AttemptPage, language: str) -> pb.ListAttemptsResponse:
    attempts = [_attempt(attempt, language) for attempt in page.attempts]
    return pb.ListAttemptsResponse(attempts=attempts, next_page_token=page.next_page_token)


def chunk_page(page: ChunkPage) -> pb.ListChunksResponse:
    return pb.ListChunksResponse(
        chunks=[_chunk(listed) for listed in page.chunks],
        next_page_token=page.next_page_token,
        version=page.version_number,
    )


async def download_pieces(download: Download) -> AsyncIterator[pb.DownloadBlobResponse]:
    """Yields the pieces; type and size in the first message only."""
    is_first = True
    async for piece in download.pieces:
        if is_first:
            yield pb.DownloadBlobResponse(
                data=piece, media_type=download.media_type, total_bytes=download.total_bytes
            )
        else:
            yield pb.DownloadBlobResponse(data=piece)
        is_first = False


def queue_stats(stats: QueueStats) -> pb.GetQueueStatsResponse:
    response = pb.GetQueueStatsResponse(
        documents_by_status=stats.documents_by_status,
        jobs_by_status=stats.jobs_by_status,
        ready_last_minute=stats.ready_last_minute,
        live_workers=stats.live_workers,
        served_chunks=stats.served_chunks,
    )
    if stats.oldest_pending_seconds is not None:
        nanos = round(stats.oldest_pending_seconds * 1e9)
        response.oldest_pending_age.CopyFrom(Duration(seconds=nanos // 10**9, nanos=nanos % 10**9))
    return response


def _attempt(attempt: Attempt, language: str) -> pb.Attempt:
    message = pb.Attempt(
        number=attempt.number,
        version=attempt.version_number,
        worker=attempt.worker,
        lease_epoch=attempt.lease_epoch,
        start_time=_timestamp(attempt.started_at),
        last_stage=attempt.last_stage,
        outcome=attempt.outcome,
        stages=[
            pb.StageTiming(
                stage=pb.DocumentStatus.Value(f"DOCUMENT_STATUS_{stage['stage']}"),
                start_time=_timestamp(datetime.datetime.fromisoformat(stage["started_at"])),
            )
            for stage in attempt.stages
        ],
        trace_id=attempt.trace_id,
    )
    if attempt.ended_at is not None:
        message.end_time.CopyFrom(_timestamp(attempt.ended_at))
    if attempt.failure is not None:
        message.failure.CopyFrom(failure(attempt.failure, language))
    return message


def _chunk(listed: ListedChunk) -> pb.Chunk:
    chunk = listed.chunk
    return pb.Chunk(
        chunk_id=chunk.chunk_id,
        ordinal=chunk.ordinal,
        content=chunk.content,
        prefix=chunk.prefix,
        token_count=chunk.token_count,
        kind=str(chunk.kind),
        locator=_locator(chunk.locator),
        asset_ids=listed.asset_ids,
    )


def _locator(locator: Locator) -> types_pb2.Locator:
    return types_pb2.Locator(
        heading_path=locator.heading_path,
        page=locator.page or 0,
        end_page=locator.end_page or 0,
        start_char=locator.start_char,
        end_char=locator.end_char,
        sheet=locator.sheet or "",
        cell_range=locator.cell_range or "",
        start_line=locator.start_line or 0,
        end_line=locator.end_line or 0,
    )


def _duplicate_policy(value: pb.DuplicatePolicy.ValueType) -> DuplicatePolicy:
    # Never guessed: a policy of a newer release may mean anything but to replace.
    if value not in pb.DuplicatePolicy.values():
        raise InvalidArgumentError("FIELD_INVALID", field="duplicate_policy", problem="UNKNOWN_VALUE")
    name = pb.DuplicatePolicy.Name(value)
    known = (policy for policy in DuplicatePolicy if name == f"DUPLICATE_POLICY_{policy}")
    return next(known, DuplicatePolicy.UNSPECIFIED)


def _plain_struct(struct: struct_pb2.Struct) -> dict[str, Any]:
    return {name: _plain_value(value) for name, value in struct.fields.items()}


def _plain_value(value: struct_pb2.Value) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            # A Struct has floating numbers only; 3 shall not come back as 3.0 in a filter.
            is_whole = math.isfinite(number) and number.is_integer() and abs(number) < 2**53
            return int(number) if is_whole else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return _plain_struct(value.struct_value)
        case "list_value":
            return [_plain_value(item) for item in value.list_value.values]
        case _:
            return None


def _timestamp(moment: datetime.datetime) -> timestamp_pb2.Timestamp:
    message = timestamp_pb2.Timestamp()
    message.FromDatetime(moment)
    return message
