"""Accepts documents: header checked, bytes streamed into the blob store, document and job in one transaction.

Owns what is accepted and what happens to duplicates. Parses nothing: what is in the bytes
is found out by a worker. Memory stays constant, whatever the size of the upload.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Sequence

from services.ingest.blobs import BlobStore, blob_key, upload_key
from services.ingest.header import (
    CheckedHeader,
    DocumentHeader,
    DuplicatePolicy,
    check_header,
    check_size,
    is_text_type,
)
from services.ingest.lifecycle import CANCEL, DocumentStatus
from services.ingest.model import CollectionId, DocumentId
from services.ingest.model_check import ModelCheck
from services.ingest.names import DocumentName
from services.ingest.parsing.accepted import ACCEPTED
from services.ingest.repository import documents, states
from services.ingest.repository.documents import Draft, JobTerms, LockedDocument
from services.ingest.repository.states import DocumentState
from shared import postgres, telemetry
from shared.errors import (
    AlreadyExistsError,
    ConflictError,
    DeadlineExceededError,
    InvalidArgumentError,
    InvalidDocumentError,
    OverloadedError,
    ResourceNotFoundError,
)
from shared.postgres import Connection, Pool

MAX_INLINE_BYTES = 1 << 20
BUSY_RETRY_SECONDS = 1.0
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")


@dataclasses.dataclass(frozen=True, slots=True)
class Trailer:
    """Ends an upload; what was received must match."""

    sha256: str | None
    """Lower case hex; None when the content came with the call and cannot have been cut off."""
    size_bytes: int


Frame = DocumentHeader | bytes | Trailer


@dataclasses.dataclass(frozen=True, slots=True)
class Submitted:
    state: DocumentState
    created: bool


@dataclasses.dataclass(slots=True)
class _Received:
    """What has come so far."""

    size_bytes: int = 0
    hash: hashlib._Hash = dataclasses.field(default_factory=hashlib.sha256)


class SubmissionService:
    """The use cases UploadDocument and CreateDocument."""

    def __init__(
        self,
        pool: Pool,
        blobs: BlobStore,
        *,
        model_check: ModelCheck,
        terms: JobTerms,
        max_upload_bytes: int,
        idle_seconds: float,
        max_uploads: int,
    ) -> None:
        self._pool = pool
        self._blobs = blobs
        self._model_check = model_check
        self._terms = terms
        self._max_upload_bytes = max_upload_bytes
        self._idle_seconds = idle_seconds
        self._max_uploads = max_uploads
        self._uploads = 0

    async def upload(self, frames: AsyncIterator[Frame]) -> Submitted:
        """Takes header, data and trailer; a header that will not do is refused before any data is read.

        Each upload holds some megabytes, so there is a limit; OverloadedError beyond it.
        """
        if self._uploads >= self._max_uploads:
            raise OverloadedError("OVERLOADED", retry_after_seconds=BUSY_RETRY_SECONDS)
        self._uploads += 1
        try:
            return await self._upload(frames)
        finally:
            self._uploads -= 1

    async def _upload(self, frames: AsyncIterator[Frame]) -> Submitted:
        sent = await self._next(frames)
        if not isinstance(sent, DocumentHeader):
            raise InvalidArgumentError("HEADER_EXPECTED", field="header")
        header = await self._admit(sent)
        return await self._store_and_record(header, self._content_of(frames), sent.size_bytes)

    async def create(self, sent: DocumentHeader, content: bytes) -> Submitted:
        """As `upload`, for content that came with the call."""
        if len(content) > MAX_INLINE_BYTES:
            raise InvalidArgumentError(
                "INLINE_TOO_LARGE", field="content", actual=len(content), limit=MAX_INLINE_BYTES
            )
        header = await self._admit(sent)
        return await self._store_and_record(header, _as_stream(content), sent.size_bytes)

    async def _admit(self, sent: DocumentHeader) -> CheckedHeader:
        header = check_header(sent, max_upload_bytes=self._max_upload_bytes)
        async with postgres.connect(self._pool) as connection:
            collection = await states.find_collection(connection, header.collection)
        await self._model_check.require(None if collection is None else collection.fingerprint)
        return header

    async def _store_and_record(
        self, header: CheckedHeader, content: AsyncIterator[bytes | Trailer], declared_bytes: int | None
    ) -> Submitted:
        """In this order, so that a crash at any point leaves a whole document or a file that is swept:

        1. the bytes, under a key of their own; an error or a cancelled call leaves nothing;
        2. in one transaction the request id, the blob's row, the file under its hash, document,
           version and job: a crash before the commit leaves a file that no row names;
        3. the file of a submission that made no document goes.
        """
        received = _Received()
        key = upload_key()
        await self._blobs.put_stream(key, self._checked(header, content, received, declared_bytes))
        upload = _Upload(self._blobs, key, received.hash.hexdigest(), received.size_bytes)
        try:
            submitted = await documents.run_transaction(
                self._pool, lambda connection: self._record(connection, header, upload)
            )
        finally:
            await upload.discard()
        if not submitted.created:
            # The row was made to hold the bytes; without a version it names a file that is not there.
            await documents.drop_blob(self._pool, upload.sha256, upload.remove_file)
        return submitted

    async def _checked(
        self,
        header: CheckedHeader,
        content: AsyncIterator[bytes | Trailer],
        received: _Received,
        declared_bytes: int | None,
    ) -> AsyncIterator[bytes]:
        """Yields the bytes on their way to the store; raises when they must not be kept."""
        trailer: Trailer | None = None
        async for frame in content:
            if isinstance(frame, Trailer):
                trailer = frame
                break
            if not frame:
                continue
            if received.size_bytes == 0:
                _refuse_binary(header, frame)
            received.size_bytes += len(frame)
            check_size(received.size_bytes, self._max_upload_bytes)
            received.hash.update(frame)
            yield frame
        if trailer is None:
            raise InvalidArgumentError("TRAILER_EXPECTED", field="trailer")
        _require_match(received, trailer, declared_bytes)

    async def _content_of(self, frames: AsyncIterator[Frame]) -> AsyncIterator[bytes | Trailer]:
        while (frame := await self._next(frames)) is not None:
            if isinstance(frame, DocumentHeader):
                raise InvalidArgumentError("HEADER_EXPECTED", field="header")
            yield frame

    async def _next(self, frames: AsyncIterator[Frame]) -> Frame | None:
        try:
            async with asyncio.timeout(self._idle_seconds):
                return await anext(frames, None)
        except TimeoutError:
            raise DeadlineExceededError("UPLOAD_STALLED", seconds=f"{self._idle_seconds:g}") from None

    async def _record(self, connection: Connection, header: CheckedHeader, upload: _Upload) -> Submitted:
        if header.request_id is not None:
            digest = header.digest(upload.sha256)
            known = await documents.remember_request(connection, header.request_id, digest)
            if known is not None:
                return await _first_answer(connection, header, known, digest)
        document_id, created = await self._find_or_make(connection, header, upload)
        if header.request_id is not None:
            await documents.settle_request(connection, header.request_id, document_id, created=created)
        return Submitted(await _get_state(connection, document_id), created)

    async def _find_or_make(
        self, connection: Connection, header: CheckedHeader, upload: _Upload
    ) -> tuple[DocumentId, bool]:
        collection = await documents.ensure_collection(connection, header.collection)
        if header.source_key is not None:
            await documents.hold_source_key(connection, collection.collection_id, header.source_key)
        await documents.hold_blob(connection, upload.sha256, upload.size_bytes)
        draft = self._draft(header, upload, collection.collection_id)
        duplicate: LockedDocument | None = None
        if header.duplicate_policy is not DuplicatePolicy.KEEP_BOTH or header.source_key is not None:
            duplicate = await _lock_duplicate(connection, draft)
        if duplicate is None:
            await upload.keep()
            return await documents.create_document(connection, draft), True
        if not _is_replaced(duplicate, header, draft):
            if duplicate.blob_sha256 == upload.sha256:
                # Heals a document whose file was lost: it can be retried now.
                await upload.keep()
            return duplicate.document_id, False
        await upload.keep()
        if duplicate.status in CANCEL.document_from:
            await documents.end_job(connection, duplicate, "SUPERSEDED")
        await documents.add_version(connection, duplicate, draft)
        return duplicate.document_id, True

    def _draft(self, header: CheckedHeader, upload: _Upload, collection_id: CollectionId) -> Draft:
        return Draft(
            collection_id=collection_id,
            source_key=header.source_key,
            display_name=header.display_name,
            metadata=header.metadata,
            declared_media_type=header.media_type,
            sha256=upload.sha256,
            size_bytes=upload.size_bytes,
            trace_id=telemetry.current_trace_id(),
            terms=self._terms.in_current_trace(),
        )


class _Upload:
    """Bytes that lie under a key of their own until `keep`."""

    def __init__(self, blobs: BlobStore, key: str, sha256: str, size_bytes: int) -> None:
        self._blobs = blobs
        self._key: str | None = key
        self.sha256 = sha256
        self.size_bytes = size_bytes

    async def keep(self) -> None:
        """Moves the bytes to where their hash says; again is fine, since a transaction may run again."""
        if self._key is not None:
            await self._blobs.promote(self._key, blob_key(self.sha256))
            self._key = None

    async def discard(self) -> None:
        if self._key is not None:
            await self._blobs.delete(self._key)

    async def remove_file(self) -> None:
        await self._blobs.delete(blob_key(self.sha256))


async def _as_stream(content: bytes) -> AsyncIterator[bytes | Trailer]:
    yield content
    yield Trailer(None, len(content))


def _refuse_binary(header: CheckedHeader, start: bytes) -> None:
    """Only what is clear from the first bytes; parsing looks at all of them."""
    is_marked = start.startswith(_BYTE_ORDER_MARKS) or b"%PDF-" in start[:1024]
    if is_text_type(header) and not is_marked and b"\0" in start:
        raise InvalidDocumentError("BINARY_OR_UNKNOWN", accepted=ACCEPTED)


def _require_match(received: _Received, trailer: Trailer, declared_bytes: int | None) -> None:
    if received.size_bytes == 0:
        raise InvalidDocumentError("EMPTY_DOCUMENT")
    for declared in (trailer.size_bytes, declared_bytes):
        if declared is not None and declared != received.size_bytes:
            raise InvalidDocumentError("SIZE_MISMATCH", declared=declared, received=received.size_bytes)
    digest = received.hash.hexdigest()
    if trailer.sha256 is not None and trailer.sha256.lower() != digest:
        raise InvalidDocumentError("CHECKSUM_MISMATCH", declared=trailer.sha256[:64], received=digest)


async def _first_answer(
    connection: Connection, header: CheckedHeader, known: documents.RememberedRequest, digest: str
) -> Submitted:
    if known.digest != digest:
        raise ConflictError("REQUEST_ID_REUSED", request_id=header.request_id)
    return Submitted(await _get_state(connection, known.document_id), known.created)


async def _get_state(connection: Connection, document_id: DocumentId) -> DocumentState:
    state = await states.find_state(connection, document_id)
    if state is None:
        raise ResourceNotFoundError("DOCUMENT_NOT_FOUND", document=str(DocumentName(None, document_id)))
    return state


async def _lock_duplicate(connection: Connection, draft: Draft) -> LockedDocument | None:
    found = await documents.find_duplicate(
        connection, draft.collection_id, source_key=draft.source_key, sha256=draft.sha256
    )
    if found is None:
        return None
    locked = await documents.lock_document(connection, found)
    if locked is None:
        # Deleted since it was found; the next try will not find it.
        raise documents.DocumentMovedError
    return locked


def _is_replaced(duplicate: LockedDocument, header: CheckedHeader, draft: Draft) -> bool:
    """True: build a new version. False: return the existing document. Or raises, as the policy says."""
    name = str(DocumentName(header.collection, duplicate.document_id))
    policy = header.duplicate_policy
    if policy is DuplicatePolicy.UNSPECIFIED:
        is_same = duplicate.blob_sha256 == draft.sha256
        policy = DuplicatePolicy.RETURN_EXISTING if is_same else DuplicatePolicy.REPLACE
    if policy is DuplicatePolicy.REJECT:
        raise AlreadyExistsError("DOCUMENT_EXISTS", document=name)
    if policy is DuplicatePolicy.KEEP_BOTH:
        raise ConflictError("SOURCE_KEY_TAKEN", source_key=draft.source_key, document=name)
    if policy is DuplicatePolicy.RETURN_EXISTING:
        return False
    return duplicate.status is DocumentStatus.FAILED or _differs(duplicate, draft)


def _differs(duplicate: LockedDocument, draft: Draft) -> bool:
    before: Sequence[object] = (
        duplicate.blob_sha256,
        duplicate.display_name,
        duplicate.declared_media_type,
        dict(duplicate.metadata),
    )
    return before != (draft.sha256, draft.display_name, draft.declared_media_type, dict(draft.metadata))
