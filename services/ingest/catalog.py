"""What people do with documents that are there: look, page, download, retry, cancel, delete.

Owns which of it is allowed when; the statuses before and after come from lifecycle.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
import uuid
from collections.abc import AsyncIterator

from services.ingest import page_tokens, snapshots
from services.ingest.blobs import BlobStore, blob_key
from services.ingest.lifecycle import CANCEL, RETRY_BY_HAND, DocumentStatus
from services.ingest.model import Chunk, CollectionId, DocumentId
from services.ingest.names import DocumentName, parse_collection_or_any, parse_document
from services.ingest.repository import documents, states
from services.ingest.repository.documents import JobTerms, LockedDocument, OrphanedFiles
from services.ingest.repository.publication import asset_id
from services.ingest.repository.states import AssetFile, Attempt, DocumentState, QueueStats
from shared import postgres
from shared.errors import (
    ConflictError,
    DependencyUnavailableError,
    InvalidArgumentError,
    ReadymarkError,
    ResourceNotFoundError,
)
from shared.postgres import Connection, Pool
from shared.telemetry import log_event

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentPage:
    states: tuple[DocumentState, ...]
    next_page_token: str


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptPage:
    attempts: tuple[Attempt, ...]
    next_page_token: str


@dataclasses.dataclass(frozen=True, slots=True)
class ListedChunk:
    chunk: Chunk
    asset_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkPage:
    version_number: int
    chunks: tuple[ListedChunk, ...]
    next_page_token: str


@dataclasses.dataclass(frozen=True, slots=True)
class Download:
    """A file in pieces. The first one has been read already, so that a missing file is an error."""

    media_type: str
    total_bytes: int
    pieces: AsyncIterator[bytes]


class CatalogService:
    """The use cases on documents that exist."""

    def __init__(self, pool: Pool, blobs: BlobStore, *, terms: JobTerms) -> None:
        self._pool = pool
        self._blobs = blobs
        self._terms = terms

    async def get(self, name: str) -> DocumentState:
        async with postgres.connect(self._pool) as connection:
            return await _get_state(connection, parse_document(name))

    async def list_documents(
        self, parent: str, *, page_size: int, page_token: str, status: DocumentStatus | None
    ) -> DocumentPage:
        """Returns a page of documents, newest first. An unknown collection is an error, not an empty list."""
        collection = parse_collection_or_any(parent)
        size = page_tokens.checked_page_size(page_size, 50)
        list_name = f"documents {collection} {status}"
        key = page_tokens.decode(page_token, list_name, str, str)
        before = None if key is None else _listing_key(*key)
        async with postgres.connect(self._pool) as connection:
            keys = await states.list_document_ids(
                connection,
                collection_id=await _collection_id(connection, collection),
                status=status,
                before=before,
                max_documents=size + 1,
            )
            loaded = await states.load_states(connection, [document_id for _, document_id in keys[:size]])
        found = [loaded[document_id] for _, document_id in keys[:size] if document_id in loaded]
        # Between the two looks a document may have moved on; the filter is kept to.
        shown = tuple(state for state in found if status is None or state.status is status)
        if len(keys) <= size:
            return DocumentPage(shown, "")
        created_at, document_id = keys[size - 1]
        return DocumentPage(shown, page_tokens.encode(list_name, created_at.isoformat(), document_id))

    async def list_attempts(self, name: str, *, page_size: int, page_token: str) -> AttemptPage:
        """Returns attempts of all versions that are still there, newest first."""
        parsed = parse_document(name)
        size = page_tokens.checked_page_size(page_size, 50)
        list_name = f"attempts {parsed.document_id}"
        key = page_tokens.decode(page_token, list_name, int, int)
        async with postgres.connect(self._pool) as connection:
            await _get_state(connection, parsed)
            attempts = await states.list_attempts(
                connection,
                parsed.document_id,
                before=None if key is None else (key[0], key[1]),
                max_attempts=size + 1,
            )
        token = ""
        if len(attempts) > size:
            token = page_tokens.encode(list_name, attempts[size - 1].job_id, attempts[size - 1].lease_epoch)
        return AttemptPage(tuple(attempts[:size]), token)

    async def list_chunks(
        self, name: str, *, version_number: int, page_size: int, page_token: str
    ) -> ChunkPage:
        """Returns chunks in order, out of the snapshot; all pages of one list are of one version."""
        parsed = parse_document(name)
        size = page_tokens.checked_page_size(page_size, 100)
        list_name = f"chunks {parsed.document_id} {version_number}"
        key = page_tokens.decode(page_token, list_name, int, int)
        if key is not None:
            version_number = key[0]
        start = 0 if key is None else key[1]
        async with postgres.connect(self._pool) as connection:
            await _get_state(connection, parsed)
            file = await states.find_snapshot(connection, parsed.document_id, version_number)
        if file is None:
            raise _no_chunks(parsed, version_number)
        chunks = await self._read_chunks(file.file_key, parsed, file.version_number)
        shown = tuple(_listed(parsed.document_id, chunk) for chunk in chunks[start : start + size])
        token = ""
        if start + size < len(chunks):
            token = page_tokens.encode(list_name, file.version_number, start + size)
        return ChunkPage(file.version_number, shown, token)

    async def _read_chunks(self, key: str, name: DocumentName, version_number: int) -> tuple[Chunk, ...]:
        try:
            data = await self._blobs.get_bytes(key)
            return (await asyncio.to_thread(snapshots.read_snapshot, data)).chunks
        except ResourceNotFoundError as error:
            # Replaced or removed since its row was read.
            raise _no_chunks(name, version_number) from error
        except snapshots.SnapshotInvalidError as error:
            raise DependencyUnavailableError("STORAGE_UNAVAILABLE") from error

    async def download(self, name: str, asset: str) -> Download:
        """Returns the original of the newest version, or one asset."""
        parsed = parse_document(name)
        found: AssetFile | None = None
        async with postgres.connect(self._pool) as connection:
            state = await _get_state(connection, parsed)
            if _is_uuid(asset):
                found = await states.find_asset(connection, parsed.document_id, str(uuid.UUID(asset)))
        if not asset:
            found = AssetFile(state.blob_sha256, state.media_type, state.size_bytes)
        if found is None:
            raise ResourceNotFoundError("ASSET_NOT_FOUND", document=name, asset=asset[:64])
        return await self._open(found)

    async def _open(self, file: AssetFile) -> Download:
        pieces = self._blobs.iterate(blob_key(file.sha256))
        first = await anext(pieces, b"")

        async def all_pieces() -> AsyncIterator[bytes]:
            yield first
            async for piece in pieces:
                yield piece

        return Download(file.media_type or "application/octet-stream", file.size_bytes, all_pieces())

    async def measure_queue(self, parent: str) -> QueueStats:
        collection = parse_collection_or_any(parent) if parent else None
        async with postgres.connect(self._pool) as connection:
            return await states.measure_queue(connection, await _collection_id(connection, collection))

    async def retry(self, name: str) -> DocumentState:
        """FAILED to PENDING with a new job; raises ConflictError from any other status."""
        parsed = parse_document(name)

        async def body(connection: Connection) -> DocumentState:
            locked = await _lock(connection, parsed)
            if (
                locked.status not in RETRY_BY_HAND.document_from
                or locked.job_status not in RETRY_BY_HAND.job_from
            ):
                raise ConflictError("DOCUMENT_NOT_FAILED", document=name, status=locked.status)
            await documents.reopen_version(connection, locked, self._terms.in_current_trace())
            return await _get_state(connection, parsed)

        return await documents.run_transaction(self._pool, body)

    async def cancel(self, name: str) -> DocumentState:
        """Unfinished to FAILED with reason CANCELLED; raises ConflictError for a settled document."""
        parsed = parse_document(name)

        async def body(connection: Connection) -> DocumentState:
            locked = await _lock(connection, parsed)
            if locked.status not in CANCEL.document_from or locked.job_status not in CANCEL.job_from:
                raise ConflictError("DOCUMENT_NOT_RUNNING", document=name, status=locked.status)
            await documents.end_job(connection, locked, "CANCELLED")
            return await _get_state(connection, parsed)

        return await documents.run_transaction(self._pool, body)

    async def delete(self, name: str, *, etag: str, allow_missing: bool) -> None:
        """Removes the document, whatever its status. Rows first, in one transaction; then the files.

        A crash in between leaves files that nothing names; the sweep removes them.
        """
        parsed = parse_document(name)

        async def body(connection: Connection) -> OrphanedFiles:
            try:
                locked = await _lock(connection, parsed)
            except ResourceNotFoundError:
                if allow_missing:
                    return OrphanedFiles((), ())
                raise
            if etag and etag != f"{locked.version_id}.{locked.revision}":
                raise ConflictError("ETAG_MISMATCH", document=name)
            return await documents.delete_document(connection, locked)

        await self._remove_files(await documents.run_transaction(self._pool, body))

    async def _remove_files(self, files: OrphanedFiles) -> None:
        # The document is gone for everybody already; a store that is down must not make that look undone.
        try:
            for key in files.snapshot_keys:
                await self._blobs.delete(key)
            for sha256 in files.blob_sha256s:
                await documents.drop_blob(self._pool, sha256, _Removal(self._blobs, blob_key(sha256)))
        except ReadymarkError as error:
            log_event(_logger, "files are left to the sweep", logging.WARNING, reason=error.reason)


@dataclasses.dataclass(frozen=True, slots=True)
class _Removal:
    blobs: BlobStore
    key: str

    async def __call__(self) -> None:
        await self.blobs.delete(self.key)


async def _get_state(connection: Connection, name: DocumentName) -> DocumentState:
    state = await states.find_state(connection, name.document_id)
    if state is None or name.collection not in (None, state.collection):
        raise _not_found(name)
    return state


async def _lock(connection: Connection, name: DocumentName) -> LockedDocument:
    # Looked up under the name first: the id alone must not reach into another collection.
    await _get_state(connection, name)
    locked = await documents.lock_document(connection, name.document_id)
    if locked is None:
        raise _not_found(name)
    return locked


async def _collection_id(connection: Connection, collection: str | None) -> CollectionId | None:
    if collection is None:
        return None
    found = await states.find_collection(connection, collection)
    if found is None:
        raise ResourceNotFoundError("COLLECTION_NOT_FOUND", collection=collection)
    return found.collection_id


def _listing_key(created_at: str, document_id: str) -> tuple[datetime.datetime, DocumentId]:
    try:
        return datetime.datetime.fromisoformat(created_at), DocumentId(str(uuid.UUID(document_id)))
    except ValueError:
        raise InvalidArgumentError("PAGE_TOKEN_INVALID", field="page_token") from None


def _listed(document_id: DocumentId, chunk: Chunk) -> ListedChunk:
    return ListedChunk(chunk, tuple(str(asset_id(document_id, sha256)) for sha256 in chunk.asset_sha256s))


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


def _not_found(name: DocumentName) -> ResourceNotFoundError:
    return ResourceNotFoundError("DOCUMENT_NOT_FOUND", document=str(name))


def _no_chunks(name: DocumentName, version_number: int) -> ResourceNotFoundError:
    return ResourceNotFoundError("VERSION_NOT_FOUND", document=str(name), version=version_number)
