"""Translation between protobuf messages and the SDK's values, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from google.protobuf import json_format, struct_pb2, timestamp_pb2
from readymark.common.v1 import types_pb2
from readymark.embedder.v1 import embedder_service_pb2 as embedder_pb2
from readymark.ingest.v1 import ingest_service_pb2 as ingest_pb2
from readymark.search.v1 import search_service_pb2 as search_pb2

from readymark_client import values
from readymark_client.errors import read_details

DUPLICATE_POLICIES = {
    values.DuplicatePolicy.DEFAULT: ingest_pb2.DUPLICATE_POLICY_UNSPECIFIED,
    values.DuplicatePolicy.REJECT: ingest_pb2.DUPLICATE_POLICY_REJECT,
    values.DuplicatePolicy.RETURN: ingest_pb2.DUPLICATE_POLICY_RETURN_EXISTING,
    values.DuplicatePolicy.REPLACE: ingest_pb2.DUPLICATE_POLICY_REPLACE,
    values.DuplicatePolicy.KEEP: ingest_pb2.DUPLICATE_POLICY_KEEP_BOTH,
}
SEARCH_MODES = {
    values.SearchMode.HYBRID: search_pb2.SEARCH_MODE_HYBRID,
    values.SearchMode.VECTOR: search_pb2.SEARCH_MODE_VECTOR,
    values.SearchMode.KEYWORD: search_pb2.SEARCH_MODE_KEYWORD,
}


def document_name(document_id: str) -> str:
    """Returns the resource name for an id; a full name is kept."""
    return document_id if document_id.startswith("collections/") else f"collections/-/documents/{document_id}"


def collection_name(collection: str | None) -> str:
    return f"collections/{collection or '-'}"


def status_value(status: values.DocumentStatus | str | None) -> Any:
    if status is None:
        return ingest_pb2.DOCUMENT_STATUS_UNSPECIFIED
    return ingest_pb2.DocumentStatus.Value(f"DOCUMENT_STATUS_{values.DocumentStatus(status)}")


def struct(metadata: Mapping[str, Any] | None) -> struct_pb2.Struct:
    message = struct_pb2.Struct()
    message.update(dict(metadata or {}))
    return message


def document(message: ingest_pb2.Document, *, already_existed: bool = False) -> values.Document:
    return values.Document(
        document_id=message.document_id,
        name=message.name,
        collection=message.collection,
        source_key=message.source_key,
        display_name=message.display_name,
        media_type=message.media_type,
        size_bytes=message.size_bytes,
        sha256=message.sha256,
        metadata=json_format.MessageToDict(message.metadata),
        status=_document_status(message.status),
        job_status=_job_status(message.job_status),
        version=message.version,
        served_version=message.served_version or None,
        searchable=message.searchable,
        progress=_progress(message),
        attempts=message.attempts,
        max_attempts=message.max_attempts,
        failure=failure(message.failure) if message.HasField("failure") else None,
        warnings=tuple(_warning(item) for item in message.warnings),
        chunk_count=message.chunk_count,
        token_count=message.token_count,
        title=message.title,
        parser_fingerprint=message.parser_fingerprint,
        chunker_fingerprint=message.chunker_fingerprint,
        model_fingerprint=message.model_fingerprint,
        created_at=_moment(message, "create_time"),
        updated_at=_moment(message, "update_time"),
        ready_at=_moment(message, "ready_time"),
        available_at=_moment(message, "available_time"),
        trace_id=message.trace_id,
        etag=message.etag,
        already_existed=already_existed,
    )


def failure(message: types_pb2.Failure) -> values.Failure:
    details = read_details(message.status)
    parameters, sentence = (details[2], details[3]) if details else ({}, "")
    return values.Failure(
        code=message.code,
        reason=message.reason,
        message=sentence or message.status.message,
        parameters=parameters,
        retryable=message.retryable,
        stage=message.stage,
        attempt=message.attempt,
        max_attempts=message.max_attempts,
        occurred_at=_moment(message, "occur_time"),
        next_attempt_at=_moment(message, "next_attempt_time"),
    )


def change(message: ingest_pb2.WatchDocumentsResponse) -> values.Change | None:
    """Returns the event, None for a sign of life."""
    event = message.WhichOneof("event")
    token = message.resume_token
    if event == "deleted_name":
        kind = values.ChangeKind.DELETED
        return values.Change(kind=kind, name=message.deleted_name, document=None, resume_token=token)
    if event == "snapshot":
        found, kind = message.snapshot, values.ChangeKind.SNAPSHOT
    elif event == "changed":
        found, kind = message.changed, values.ChangeKind.CHANGED
    else:
        return None
    return values.Change(kind=kind, name=found.name, document=document(found), resume_token=token)


def attempt(message: ingest_pb2.Attempt) -> values.Attempt:
    return values.Attempt(
        number=message.number,
        version=message.version,
        worker=message.worker,
        lease_epoch=message.lease_epoch,
        started_at=_moment(message, "start_time"),
        ended_at=_moment(message, "end_time"),
        last_stage=message.last_stage,
        outcome=message.outcome,
        stages=tuple(
            values.StageTiming(stage=_document_status(item.stage), started_at=_moment(item, "start_time"))
            for item in message.stages
        ),
        failure=failure(message.failure) if message.HasField("failure") else None,
        trace_id=message.trace_id,
    )


def chunk(message: ingest_pb2.Chunk, version: int) -> values.Chunk:
    return values.Chunk(
        chunk_id=message.chunk_id,
        version=version,
        ordinal=message.ordinal,
        content=message.content,
        prefix=message.prefix,
        token_count=message.token_count,
        kind=message.kind,
        locator=locator(message.locator),
        asset_ids=tuple(message.asset_ids),
    )


def locator(message: types_pb2.Locator) -> values.Locator:
    return values.Locator(
        heading_path=tuple(message.heading_path),
        page=message.page or None,
        end_page=message.end_page or None,
        start_char=message.start_char,
        end_char=message.end_char,
        start_line=message.start_line or None,
        end_line=message.end_line or None,
        sheet=message.sheet or None,
        cell_range=message.cell_range or None,
    )


def search_result(message: search_pb2.SearchResponse) -> values.SearchResult:
    mode = search_pb2.SearchMode.Name(message.applied_mode)
    return values.SearchResult(
        hits=tuple(_hit(item) for item in message.hits),
        applied_mode=mode.removeprefix("SEARCH_MODE_").lower(),
        degraded_reasons=tuple(message.degraded_reasons),
        fingerprint=message.fingerprint,
        candidate_count=message.candidate_count,
        exhausted=message.exhausted,
        stage_seconds={name: _seconds(item) for name, item in message.stage_times.items()},
    )


def queue_stats(message: ingest_pb2.GetQueueStatsResponse) -> values.QueueStats:
    waits = message.HasField("oldest_pending_age")
    return values.QueueStats(
        documents_by_status=dict(message.documents_by_status),
        jobs_by_status=dict(message.jobs_by_status),
        oldest_pending_seconds=_seconds(message.oldest_pending_age) if waits else None,
        ready_last_minute=message.ready_last_minute,
        live_workers=message.live_workers,
        served_chunks=message.served_chunks,
    )


def embedding_model(message: embedder_pb2.Model) -> values.EmbeddingModel:
    return values.EmbeddingModel(
        model_id=message.model_id,
        fingerprint=message.fingerprint,
        dimension=message.dimension,
        max_input_tokens=message.max_input_tokens,
        max_batch_inputs=message.max_batch_inputs,
        max_batch_bytes=message.max_batch_bytes,
        normalized=message.normalized,
        pooling=message.pooling,
        query_prefix=message.query_prefix,
        document_prefix=message.document_prefix,
        execution_providers=tuple(message.execution_providers),
    )


def _hit(message: search_pb2.Hit) -> values.Hit:
    explained = {
        field: getattr(message, field)
        for field in ("vector_score", "vector_rank", "keyword_score", "keyword_rank")
        if message.HasField(field)
    }
    return values.Hit(
        chunk_id=message.chunk_id,
        document_id=message.document_id,
        document_name=message.document_name,
        document_version=message.document_version,
        display_name=message.display_name,
        ordinal=message.ordinal,
        content=message.content,
        score=message.score,
        locator=locator(message.locator),
        metadata=json_format.MessageToDict(message.metadata),
        **explained,
    )


def _warning(message: types_pb2.Warning) -> values.Warning:
    return values.Warning(
        reason=message.reason,
        message=message.message,
        parameters=dict(message.parameters),
        page=message.page or None,
    )


def _progress(message: ingest_pb2.Document) -> values.Progress | None:
    progress = message.progress
    if not progress.total_units:
        return None
    return values.Progress(done=progress.done_units, total=progress.total_units, unit=progress.unit)


def _document_status(number: int) -> values.DocumentStatus:
    # A newer service may know more statuses; the number alone must not break a reader.
    name = ingest_pb2.DocumentStatus.DESCRIPTOR.values_by_number.get(number)
    text = name.name.removeprefix("DOCUMENT_STATUS_") if name is not None else "UNKNOWN"
    return (
        values.DocumentStatus(text)
        if text in values.DocumentStatus.__members__
        else values.DocumentStatus.UNKNOWN
    )


def _job_status(number: int) -> values.JobStatus:
    name = ingest_pb2.IngestionJobStatus.DESCRIPTOR.values_by_number.get(number)
    text = name.name.removeprefix("INGESTION_JOB_STATUS_") if name is not None else "UNKNOWN"
    return values.JobStatus(text) if text in values.JobStatus.__members__ else values.JobStatus.UNKNOWN


def _moment(message: Any, field: str) -> datetime | None:
    if not message.HasField(field):
        return None
    moment: timestamp_pb2.Timestamp = getattr(message, field)
    return moment.ToDatetime(tzinfo=UTC)


def _seconds(duration: Any) -> float:
    return float(duration.seconds) + float(duration.nanos) / 1e9
