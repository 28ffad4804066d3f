"""The order of the stages of one attempt: status first, then action, READY last.

Knows nothing of leases beyond the epoch it hands on, and no SQL. Each stage's status is
committed before its work starts (rule D2), so that after a crash the database names the
last stage that began.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import hashlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from services.ingest import snapshots
from services.ingest.blobs import BlobStore, blob_key, snapshot_key
from services.ingest.chunking import Chunker, chunk_warnings
from services.ingest.lifecycle import DocumentStatus
from services.ingest.model import Asset, Chunk, ParsedDocument
from services.ingest.parsing.fingerprint import parser_fingerprint
from services.ingest.parsing.limits import ParseLimits
from services.ingest.parsing.results import asset_path
from services.ingest.parsing.sandbox import ParserPool
from services.ingest.repository import jobs, publication
from services.ingest.repository.jobs import Lease
from services.ingest.repository.publication import IndexedChunk, SnapshotRecord, SnapshotRow, VectorSpace
from services.ingest.snapshots import Snapshot, SnapshotInvalidError
from shared import telemetry, terms
from shared.embedder_client import EmbedderClient, ModelInfo
from shared.errors import (
    DeadlineExceededError,
    DependencyUnavailableError,
    InvalidArgumentError,
    InvalidDocumentError,
    OverloadedError,
    ResourceNotFoundError,
)
from shared.postgres import Pool

# Chunks that one statement batch of INDEXING carries; bounds memory, not speed.
INDEX_BATCH = 200
PROGRESS_SECONDS = 0.5
# A row with its vector must fit a page; create_vector_space() has the same limit.
MAX_DIMENSION = 3500


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPolicy:
    max_tokens: int
    overlap_tokens: int


class DocumentProcessingService:
    """Brings one version from its stored original to READY. Safe to use for several jobs at once."""

    def __init__(
        self,
        *,
        pool: Pool,
        blobs: BlobStore,
        parsers: ParserPool,
        embedder: EmbedderClient,
        chunk_policy: ChunkPolicy,
        parse_limits: ParseLimits,
    ) -> None:
        self._pool = pool
        self._blobs = blobs
        self._parsers = parsers
        self._embedder = embedder
        self._chunk_policy = chunk_policy
        self._parse_limits = parse_limits
        self._chunkers: dict[str, Chunker] = {}
        self._chunker_lock = asyncio.Lock()
        # After a fault of the storage it is tried before anything more is claimed.
        self._storage_failed = False

    async def ready(self) -> None:
        """Returns when the embedder answers and its tokenizer is loaded; raises what it raises otherwise.

        Asked before every claim: while the embedder is away no attempt is begun. And the tokenizer
        comes first because loading it takes a second or two and holds the interpreter, which no
        lease should have to outlast.
        """
        if self._storage_failed:
            await self._blobs.probe()
            self._storage_failed = False
        try:
            model = await self._embedder.refresh_model()
            if model.dimension > MAX_DIMENSION:
                raise ValueError(f"its vectors have {model.dimension} numbers, the limit is {MAX_DIMENSION}")
            await self._chunker(model)
        except (DependencyUnavailableError, DeadlineExceededError, OverloadedError) as error:
            raise DependencyUnavailableError("EMBEDDER_UNAVAILABLE") from error
        except ValueError as error:
            raise DependencyUnavailableError("MODEL_UNSUITABLE", cause=error) from error

    async def process(self, lease: Lease) -> None:
        """Runs the stages. Raises LeaseLostError when the epoch is not held any more.

        1. PARSING and CHUNKING, unless a valid snapshot of the same bytes is there (rule J17).
           A crash before the snapshot row is written leaves nothing; the next attempt parses again.
        2. EMBEDDING: vectors are staged as they come. A crash leaves those that were staged, and
           the next attempt computes only the others.
        3. INDEXING: one transaction writes the chunks and sets READY and SUCCEEDED. A crash
           before its commit leaves nothing visible, after it everything.
        """
        try:
            await self._process(lease)
        except DependencyUnavailableError as error:
            self._storage_failed |= error.reason == "STORAGE_UNAVAILABLE"
            raise

    async def _process(self, lease: Lease) -> None:
        model = await self._embedder.refresh_model()
        chunker = await self._chunker(model)
        snapshot = await self._resumable_snapshot(lease, chunker)
        if snapshot is None:
            with tempfile.TemporaryDirectory(prefix="readymark-") as folder:
                document = await self._parse(lease, Path(folder))
                snapshot = await self._chunk(lease, document, chunker, Path(folder))
        space, chunks = await self._embed(lease, snapshot, model)
        await self._index(lease, space, chunks)

    async def _resumable_snapshot(self, lease: Lease, chunker: Chunker) -> Snapshot | None:
        row = await publication.find_snapshot(self._pool, lease.version_id)
        if row is None:
            return None
        try:
            data = await self._blobs.get_bytes(row.file_key)
            snapshot = await asyncio.to_thread(snapshots.read_snapshot, data)
        except (SnapshotInvalidError, ResourceNotFoundError):
            # Damaged or gone: it is only a shortcut, the original is parsed again.
            return None
        is_resumable = snapshots.is_resumable(
            snapshot, lease.blob_sha256, parser_fingerprint(), chunker.fingerprint
        )
        return snapshot if is_resumable else None

    async def _parse(self, lease: Lease, folder: Path) -> ParsedDocument:
        await self._begin(lease, DocumentStatus.PARSING)
        with telemetry.span("parse", {"readymark.bytes": lease.size_bytes}):
            original = folder / "original"
            if await self._blobs.download_to(blob_key(lease.blob_sha256), original) != lease.blob_sha256:
                raise ResourceNotFoundError("BLOB_DAMAGED")
            progress = _Progress(self._pool, lease, "pages")
            try:
                return await self._parsers.parse(
                    original,
                    folder,
                    display_name=lease.display_name,
                    declared_media_type=lease.declared_media_type,
                    limits=self._parse_limits,
                    on_progress=progress.report_soon,
                )
            finally:
                await progress.close()

    async def _chunk(
        self, lease: Lease, document: ParsedDocument, chunker: Chunker, folder: Path
    ) -> Snapshot:
        began_at = await self._begin(lease, DocumentStatus.CHUNKING)
        with telemetry.span("chunk") as span:
            chunks = await _split(chunker, document, str(lease.document_id))
            if not chunks:
                raise InvalidDocumentError("NO_TEXT")
            span.set_attribute("readymark.chunks", len(chunks))
            snapshot = self._snapshot(lease, document, chunker, chunks, began_at)
            await self._save(lease, snapshot, folder)
            return snapshot

    def _snapshot(
        self,
        lease: Lease,
        document: ParsedDocument,
        chunker: Chunker,
        chunks: Sequence[Chunk],
        written_at: datetime.datetime,
    ) -> Snapshot:
        return Snapshot(
            written_at=written_at,
            document_id=str(lease.document_id),
            version=lease.version_number,
            source_sha256=lease.blob_sha256,
            media_type=document.media_type,
            title=document.title,
            page_count=document.page_count,
            parser_fingerprint=parser_fingerprint(),
            chunker_fingerprint=chunker.fingerprint,
            warnings=document.warnings + chunk_warnings(chunks),
            assets=document.assets,
            chunks=tuple(chunks),
        )

    async def _save(self, lease: Lease, snapshot: Snapshot, folder: Path) -> None:
        """Fail-closed: without a stored snapshot and its row no embedding call is made."""
        data = await asyncio.to_thread(snapshots.write_snapshot, snapshot)
        # The epoch is in the key: a worker that lost its lease cannot overwrite its successor's file.
        key = snapshot_key(lease.job_id, lease.lease_epoch)
        await self._blobs.put_bytes(key, data)

        async def store_asset(asset: Asset) -> None:
            content = await asyncio.to_thread(asset_path(folder, asset.sha256).read_bytes)
            await self._blobs.put_bytes(blob_key(asset.sha256), content)

        replaced = await publication.save_snapshot(
            self._pool,
            lease,
            SnapshotRecord(
                row=SnapshotRow(
                    file_key=key,
                    file_sha256=hashlib.sha256(data).hexdigest(),
                    source_sha256=snapshot.source_sha256,
                    parser_fingerprint=snapshot.parser_fingerprint,
                    chunker_fingerprint=snapshot.chunker_fingerprint,
                ),
                size_bytes=len(data),
                chunk_count=len(snapshot.chunks),
                token_count=snapshot.token_count,
                media_type=snapshot.media_type,
                title=snapshot.title,
                warnings=snapshot.warnings,
                assets=snapshot.assets,
            ),
            store_asset,
        )
        if replaced is not None:
            await self._blobs.delete(replaced)

    async def _embed(
        self, lease: Lease, snapshot: Snapshot, model: ModelInfo
    ) -> tuple[VectorSpace, list[IndexedChunk]]:
        await self._begin(lease, DocumentStatus.EMBEDDING)
        with telemetry.span("embed", {"readymark.chunks": len(snapshot.chunks)}) as span:
            space = await publication.bind_vector_space(
                self._pool,
                lease,
                fingerprint=model.fingerprint,
                model_id=model.model_id,
                dimension=model.dimension,
            )
            chunks = await asyncio.to_thread(_index_chunks, snapshot.chunks, int(lease.collection_id))
            missing = await self._without_vector(lease, space, chunks)
            span.set_attribute("readymark.chunks.reused", len(chunks) - len(missing))
            progress = _Progress(self._pool, lease, "vectors", total=len(chunks))
            progress.done = len(chunks) - len(missing)

            async def stage(start: int, vectors: NDArray[np.float32]) -> None:
                batch = [
                    (item.chunk.ordinal, item.text_sha256) for item in missing[start : start + len(vectors)]
                ]
                await publication.stage_vectors(self._pool, lease, space, batch, vectors)
                await progress.advance(len(vectors))

            if missing:
                try:
                    await self._embedder.embed_documents(
                        [item.chunk.embed_text for item in missing],
                        [item.chunk.token_count for item in missing],
                        expected_fingerprint=model.fingerprint,
                        on_batch=stage,
                    )
                except InvalidArgumentError as error:
                    # A text the model cannot embed is the document's fault: no retry can help.
                    raise InvalidDocumentError(
                        error.reason, retry_after_seconds=None, **error.parameters
                    ) from error
            return space, chunks

    async def _without_vector(
        self, lease: Lease, space: VectorSpace, chunks: Sequence[IndexedChunk]
    ) -> list[IndexedChunk]:
        """Returns the chunks that no earlier attempt and no served version has a vector for."""
        staged = await publication.list_staged(self._pool, lease, space)
        missing = [item for item in chunks if staged.get(item.chunk.ordinal) != item.text_sha256]
        if missing and lease.version_number > 1:
            wanted = [(item.chunk.ordinal, item.text_sha256) for item in missing]
            await publication.adopt_served_vectors(self._pool, lease, space, wanted)
            staged = await publication.list_staged(self._pool, lease, space)
            missing = [item for item in missing if staged.get(item.chunk.ordinal) != item.text_sha256]
        return missing

    async def _index(self, lease: Lease, space: VectorSpace, chunks: list[IndexedChunk]) -> None:
        await self._begin(lease, DocumentStatus.INDEXING)
        with telemetry.span("index", {"readymark.chunks": len(chunks)}):
            await publication.publish_version(
                self._pool, lease, space, _batches(chunks), chunk_count=len(chunks)
            )

    async def _begin(self, lease: Lease, stage: DocumentStatus) -> datetime.datetime:
        return await jobs.begin_stage(self._pool, lease, stage, trace_id=telemetry.current_trace_id())

    async def _chunker(self, model: ModelInfo) -> Chunker:
        """Returns the chunker for this model; the tokenizer is fetched once and kept."""
        async with self._chunker_lock:
            chunker = self._chunkers.get(model.fingerprint)
            if chunker is None:
                tokenizer_json = await self._embedder.tokenizer_bytes(model.fingerprint)
                chunker = await asyncio.to_thread(
                    Chunker,
                    tokenizer_json,
                    max_tokens=min(self._chunk_policy.max_tokens, model.max_input_tokens),
                    overlap_tokens=self._chunk_policy.overlap_tokens,
                    document_overhead_tokens=model.document_overhead_tokens,
                    unknown_token_id=model.unknown_token_id,
                    model_fingerprint=model.fingerprint,
                )
                # One model is loaded at a time; an older one's tokenizer would only hold memory.
                self._chunkers = {model.fingerprint: chunker}
            return chunker


async def _split(chunker: Chunker, document: ParsedDocument, document_id: str) -> list[Chunk]:
    """Splits in a thread, which ends soon after this is cancelled: nobody waits for it any more."""
    cancelled = threading.Event()

    def go_on(done: int, total: int) -> None:
        if cancelled.is_set():
            raise _SplitCancelledError

    try:
        return await asyncio.to_thread(chunker.split, document, document_id, go_on)
    except asyncio.CancelledError:
        cancelled.set()
        raise


class _SplitCancelledError(Exception):
    """Ends the thread; nobody waits for it any more."""


def _index_chunks(chunks: Sequence[Chunk], collection_id: int) -> list[IndexedChunk]:
    return [
        IndexedChunk(
            chunk,
            hashlib.sha256(chunk.embed_text.encode()).digest(),
            terms.document_weights(chunk.embed_text, collection_id),
        )
        for chunk in chunks
    ]


def _batches(chunks: list[IndexedChunk]) -> Iterator[list[IndexedChunk]]:
    for start in range(0, len(chunks), INDEX_BATCH):
        yield chunks[start : start + INDEX_BATCH]


class _Progress:
    """Writes progress at most twice a second; what is not written is overtaken by the next report."""

    def __init__(self, pool: Pool, lease: Lease, unit: str, *, total: int = 0) -> None:
        self._pool = pool
        self._lease = lease
        self._unit = unit
        self._total = total
        self._written_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self.done = 0

    async def advance(self, count: int) -> None:
        self.done += count
        if time.monotonic() - self._written_at >= PROGRESS_SECONDS or self.done == self._total:
            await self._write()

    def report_soon(self, done: int, total: int) -> None:
        """For callers that cannot wait; at most one write is under way."""
        self.done, self._total = done, total
        is_writing = self._task is not None and not self._task.done()
        if not is_writing and time.monotonic() - self._written_at >= PROGRESS_SECONDS:
            self._task = asyncio.get_running_loop().create_task(self._write())

    async def close(self) -> None:
        """Waits for a write under way; a lost lease shows in the next stage, not here."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _write(self) -> None:
        self._written_at = time.monotonic()
        await jobs.report_progress(
            self._pool, self._lease, done=self.done, total=self._total, unit=self._unit
        )
