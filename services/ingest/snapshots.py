"""The chunk snapshot: all chunks of a version as one file, written before the first vector.

Owns its form (docs/snapshot.md) and the decision whether an attempt may go on from one. It
holds no vectors, so a change of model alone does not make it stale. Stores nothing: bytes
in, bytes out.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
from typing import Any

import zstandard

from services.ingest import model

SCHEMA_VERSION = 1
STAGE = "post_chunk_pre_embedding"
_COMPRESSION_LEVEL = 3  # Higher levels gain 5 % in size and cost ten times the processor time.
_MAX_BYTES = 512 << 20
"""Of the JSON. A small file that unpacks to more is no snapshot of ours."""


class SnapshotInvalidError(Exception):
    """The bytes are damaged or not a snapshot that this release reads; the caller builds it anew."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything about a version that embedding and indexing need."""

    written_at: datetime.datetime
    document_id: str
    version: int
    source_sha256: str
    """Of the original bytes, in hex."""
    media_type: str
    title: str | None
    parser_fingerprint: str
    chunker_fingerprint: str
    """Includes the tokenizer and the token budget."""
    page_count: int | None
    warnings: tuple[model.Warning, ...]
    assets: tuple[model.Asset, ...]
    chunks: tuple[model.Chunk, ...]

    @property
    def token_count(self) -> int:
        return sum(chunk.token_count for chunk in self.chunks)


def write_snapshot(snapshot: Snapshot) -> bytes:
    """Returns the file. Same snapshot, same bytes; `written_at` is the caller's."""
    assert snapshot.written_at.tzinfo is not None, "a moment without a time zone is none"
    body = {
        "schema_version": SCHEMA_VERSION,
        "stage": STAGE,
        "written_at": snapshot.written_at.astimezone(datetime.UTC).isoformat(),
        "document_id": snapshot.document_id,
        "version": snapshot.version,
        "source_sha256": snapshot.source_sha256,
        "media_type": snapshot.media_type,
        "title": snapshot.title,
        "parser_fingerprint": snapshot.parser_fingerprint,
        "chunker_fingerprint": snapshot.chunker_fingerprint,
        "page_count": snapshot.page_count,
        "warnings": model.to_json(snapshot.warnings),
        "assets": model.to_json(snapshot.assets),
        "chunk_count": len(snapshot.chunks),
        "token_count": snapshot.token_count,
        "chunks": model.to_json(snapshot.chunks),
    }
    text = _canonical(body)
    # The hash stands in front, so that it is taken over exactly the bytes that follow it.
    content = b'{"sha256":"%s","snapshot":%s}' % (hashlib.sha256(text).hexdigest().encode(), text)
    return zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL, write_checksum=True).compress(content)


def read_snapshot(data: bytes) -> Snapshot:
    """Returns what `write_snapshot` wrote; raises SnapshotInvalidError for anything else."""
    try:
        envelope = json.loads(_unpack(data))
        body = envelope["snapshot"]
        if body["schema_version"] != SCHEMA_VERSION or body["stage"] != STAGE:
            raise SnapshotInvalidError("the snapshot is of another schema or stage")
        if hashlib.sha256(_canonical(body)).hexdigest() != envelope["sha256"]:
            raise SnapshotInvalidError("the snapshot is not what its hash says")
        snapshot = _from_json(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotInvalidError(f"the snapshot cannot be read: {type(error).__name__}") from error
    ordinals = [chunk.ordinal for chunk in snapshot.chunks]
    if len(ordinals) != body["chunk_count"] or ordinals != list(range(len(ordinals))):
        raise SnapshotInvalidError("chunks are missing or out of order")
    return snapshot


def is_resumable(
    snapshot: Snapshot, source_sha256: str, parser_fingerprint: str, chunker_fingerprint: str
) -> bool:
    """True if parsing and chunking these bytes now would give the same chunks again."""
    return (
        snapshot.source_sha256 == source_sha256
        and snapshot.parser_fingerprint == parser_fingerprint
        and snapshot.chunker_fingerprint == chunker_fingerprint
        and len(snapshot.chunks) > 0
    )


def _unpack(data: bytes) -> bytes:
    """The size in the header is what would be allocated, so it is looked at first."""
    try:
        if not 0 < zstandard.frame_content_size(data) <= _MAX_BYTES:
            raise SnapshotInvalidError("the snapshot has no size or a larger one than any of ours")
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise SnapshotInvalidError("the snapshot is damaged or not compressed by us") from error


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def _from_json(body: dict[str, Any]) -> Snapshot:
    return Snapshot(
        written_at=datetime.datetime.fromisoformat(body["written_at"]),
        document_id=str(body["document_id"]),
        version=int(body["version"]),
        source_sha256=str(body["source_sha256"]),
        media_type=str(body["media_type"]),
        title=body["title"],
        parser_fingerprint=str(body["parser_fingerprint"]),
        chunker_fingerprint=str(body["chunker_fingerprint"]),
        page_count=body["page_count"],
        warnings=tuple(model.warning_from_json(item) for item in body["warnings"]),
        assets=tuple(model.asset_from_json(item) for item in body["assets"]),
        chunks=tuple(model.chunk_from_json(item) for item in body["chunks"]),
    )
