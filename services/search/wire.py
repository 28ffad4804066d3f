"""Between protobuf messages and the values of this service; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import duration_pb2
from readymark.common.v1 import types_pb2
from readymark.search.v1 import search_service_pb2 as messages

from services.search.query import SearchMode, SearchQuery, checked_query
from services.search.retrieval import Hit, SearchResult
from shared.errors import InvalidArgumentError

_MODES = {
    messages.SEARCH_MODE_UNSPECIFIED: SearchMode.HYBRID,
    messages.SEARCH_MODE_VECTOR: SearchMode.VECTOR,
    messages.SEARCH_MODE_KEYWORD: SearchMode.KEYWORD,
    messages.SEARCH_MODE_HYBRID: SearchMode.HYBRID,
}
_MODE_NUMBERS = {
    SearchMode.VECTOR: messages.SEARCH_MODE_VECTOR,
    SearchMode.KEYWORD: messages.SEARCH_MODE_KEYWORD,
    SearchMode.HYBRID: messages.SEARCH_MODE_HYBRID,
}
_LOCATOR_FIELDS = frozenset(types_pb2.Locator.DESCRIPTOR.fields_by_name)


def to_query(request: messages.SearchRequest, *, max_characters: int) -> SearchQuery:
    """Returns the checked question; raises InvalidArgumentError that names the wrong field."""
    mode = _MODES.get(request.mode)
    if mode is None:
        raise InvalidArgumentError("FIELD_INVALID", field="mode", problem="UNKNOWN_VALUE")
    return checked_query(
        parent=request.parent,
        text=request.query,
        mode=mode,
        top_k=request.top_k,
        documents=request.documents,
        explain=request.explain,
        max_characters=max_characters,
    )


def to_response(query: SearchQuery, result: SearchResult) -> messages.SearchResponse:
    return messages.SearchResponse(
        hits=[_hit(query, hit) for hit in result.hits],
        applied_mode=_MODE_NUMBERS[result.applied_mode],
        degraded_reasons=result.degraded_reasons,
        fingerprint=result.fingerprint,
        candidate_count=result.candidate_count,
        exhausted=result.exhausted,
        stage_times={name: _duration(seconds) for name, seconds in result.stage_seconds.items()},
    )


def _hit(query: SearchQuery, hit: Hit) -> messages.Hit:
    chunk = hit.chunk
    message = messages.Hit(
        chunk_id=str(chunk.chunk_id),
        document_name=f"collections/{query.collection}/documents/{chunk.document_id}",
        document_id=str(chunk.document_id),
        document_version=chunk.version_number,
        display_name=chunk.display_name,
        ordinal=chunk.ordinal,
        content=chunk.content,
        score=hit.fused.score,
        locator=_locator(chunk.locator),
    )
    message.metadata.update(chunk.metadata)
    if query.explain:
        vector, keyword = hit.fused.vector, hit.fused.keyword
        if vector is not None:
            message.vector_score, message.vector_rank = vector.score, vector.rank
        if keyword is not None:
            message.keyword_score, message.keyword_rank = keyword.score, keyword.rank
    return message


def _locator(stored: Mapping[str, Any]) -> types_pb2.Locator:
    # A newer ingest may store more than this contract knows.
    return types_pb2.Locator(**{name: value for name, value in stored.items() if name in _LOCATOR_FIELDS})


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
