"""The values that the SDK gives back, frozen, with moments in UTC and lengths in seconds.

Owns their shape and their JSON form. Never knows protobuf: `wire.py` makes them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from datetime import datetime
from typing import Any


class DocumentStatus(enum.StrEnum):
    """What a user sees. READY is the commit mark; READY and FAILED are settled."""

    PENDING = "PENDING"
    PARSING = "PARSING"
    CHUNKING = "CHUNKING"
    EMBEDDING = "EMBEDDING"
    INDEXING = "INDEXING"
    READY = "READY"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"
    """A status from a newer release than this SDK."""

    @property
    def is_settled(self) -> bool:
        return self in (DocumentStatus.READY, DocumentStatus.FAILED)


class JobStatus(enum.StrEnum):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"


class DuplicatePolicy(enum.StrEnum):
    """What happens when the same source key, or without one the same bytes, exist already."""

    DEFAULT = "default"
    """Equal bytes return the existing document; other bytes under an equal source key replace it."""
    REJECT = "reject"
    RETURN = "return"
    REPLACE = "replace"
    KEEP = "keep"


class SearchMode(enum.StrEnum):
    HYBRID = "hybrid"
    VECTOR = "vector"
    KEYWORD = "keyword"


class ChangeKind(enum.StrEnum):
    SNAPSHOT = "snapshot"
    """The state when the watch began."""
    CHANGED = "changed"
    DELETED = "deleted"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Locator:
    """Where a chunk stands in the original; pages and lines count from 1, None = the format has none."""

    heading_path: tuple[str, ...] = ()
    page: int | None = None
    end_page: int | None = None
    start_char: int = 0
    end_char: int = 0
    """Code points into the parsed text, half open."""
    start_line: int | None = None
    end_line: int | None = None
    sheet: str | None = None
    cell_range: str | None = None

    def __str__(self) -> str:
        parts = [" > ".join(self.heading_path)] if self.heading_path else []
        if self.page is not None:
            last = self.end_page or self.page
            parts.append(f"p. {self.page}" if last == self.page else f"p. {self.page}-{last}")
        elif self.sheet is not None:
            parts.append(f"{self.sheet}!{self.cell_range}" if self.cell_range else self.sheet)
        elif self.start_line is not None:
            last = self.end_line or self.start_line
            parts.append(
                f"line {self.start_line}" if last == self.start_line else f"lines {self.start_line}-{last}"
            )
        return ", ".join(parts) or f"characters {self.start_char}-{self.end_char}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt failed: `code` is the kind, `reason` the exact cause, `message` the sentence."""

    code: str
    reason: str
    message: str
    parameters: Mapping[str, str]
    retryable: bool
    """True when the system itself will try again."""
    stage: str
    attempt: int
    max_attempts: int
    occurred_at: datetime | None = None
    next_attempt_at: datetime | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Warning:
    """Something to know although the document is READY."""

    reason: str
    message: str
    parameters: Mapping[str, str]
    page: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    done: int
    total: int
    unit: str
    """"pages", "chunks" or "vectors"."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document; `status`, counts and failure are those of its newest version."""

    document_id: str
    name: str
    collection: str
    source_key: str
    display_name: str
    media_type: str
    size_bytes: int
    sha256: str
    metadata: Mapping[str, Any]
    status: DocumentStatus
    job_status: JobStatus
    version: int
    served_version: int | None
    """The version that search serves; None when there is none."""
    searchable: bool
    progress: Progress | None
    attempts: int
    max_attempts: int
    failure: Failure | None
    warnings: tuple[Warning, ...]
    chunk_count: int
    token_count: int
    title: str
    parser_fingerprint: str
    chunker_fingerprint: str
    model_fingerprint: str
    created_at: datetime | None
    updated_at: datetime | None
    ready_at: datetime | None
    available_at: datetime | None
    """When a waiting job becomes due."""
    trace_id: str
    etag: str
    already_existed: bool = False
    """True only in the answer of `submit`, when an existing document was returned unchanged."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One event of a watch; `document` is None when it was deleted."""

    kind: ChangeKind
    name: str
    document: Document | None
    resume_token: str

    @property
    def document_id(self) -> str:
        return self.name.rsplit("/", 1)[-1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageTiming:
    stage: DocumentStatus
    started_at: datetime | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One claim of a document's job and how it ended."""

    number: int
    version: int
    worker: str
    lease_epoch: int
    started_at: datetime | None
    ended_at: datetime | None
    last_stage: str
    outcome: str
    """RUNNING, SUCCEEDED, RETRY_LATER, FAILED, LEASE_EXPIRED, HANDED_BACK or CANCELLED."""
    stages: tuple[StageTiming, ...]
    failure: Failure | None
    trace_id: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The unit that gets a vector; `content` is an exact slice of the parsed text."""

    chunk_id: str
    version: int
    ordinal: int
    content: str
    prefix: str
    """Heading path or table header that is embedded in front of `content`."""
    token_count: int
    kind: str
    locator: Locator
    asset_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A chunk that answers a query; `score` compares inside one answer only, higher is better."""

    chunk_id: str
    document_id: str
    document_name: str
    document_version: int
    display_name: str
    ordinal: int
    content: str
    score: float
    locator: Locator
    metadata: Mapping[str, Any]
    vector_score: float | None = None
    """Cosine similarity; this and the next three with `explain` only."""
    vector_rank: int | None = None
    keyword_score: float | None = None
    keyword_rank: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    hits: tuple[Hit, ...]
    applied_mode: str
    degraded_reasons: tuple[str, ...]
    """Non-empty when a channel was skipped, e.g. "VECTOR_UNAVAILABLE"."""
    fingerprint: str
    candidate_count: int
    exhausted: bool
    stage_seconds: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    documents_by_status: Mapping[str, int]
    jobs_by_status: Mapping[str, int]
    oldest_pending_seconds: float | None
    """Age of the oldest job that is due and waits; None when none waits."""
    ready_last_minute: int
    live_workers: int
    """Workers that hold a live lease; idle workers are not counted."""
    served_chunks: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingModel:
    """Identity and limits of the model that the embedder runs."""

    model_id: str
    fingerprint: str
    dimension: int
    max_input_tokens: int
    max_batch_inputs: int
    max_batch_bytes: int
    normalized: bool
    pooling: str
    query_prefix: str
    document_prefix: str
    execution_providers: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    media_type: str
    size_bytes: int


def to_json(value: Any) -> Any:
    """Returns a value of this file as plain JSON values; moments as ISO 8601 in UTC."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, enum.Enum) else value
