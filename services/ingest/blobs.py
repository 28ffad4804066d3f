"""Where bytes lie: originals, assets, snapshot files. A local folder by default, or an object store by URL.

Owns keys and files; knows no database. Every write is atomic: a key shows all of its bytes
or is not there. A store that does not answer is a DependencyUnavailableError, a key that is
not there a ResourceNotFoundError.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import hashlib
import os
import re
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from services.ingest.model import JobId
from shared.errors import DependencyUnavailableError, ResourceNotFoundError

BLOB_PREFIX = "blobs/"
SNAPSHOT_PREFIX = "snapshots/"
UPLOAD_PREFIX = "uploads/"
# Object stores take parts of at least 5 MiB; a smaller file goes up in one request.
_PART_BYTES = 5 << 20
# How the local store names a file that is still being written.
_UNFINISHED = re.compile(r"#\d+$")


class BlobStoreError(ValueError):
    """No store can be made of this URL; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFile:
    key: str
    size_bytes: int
    modified_at: datetime.datetime

    @property
    def age_seconds(self) -> float:
        """By this machine's clock: good for grace periods of minutes, not for ordering."""
        return time.time() - self.modified_at.timestamp()


def blob_key(sha256: str) -> str:
    """Returns where an original or an asset with this hash lies."""
    return f"{BLOB_PREFIX}{sha256[:2]}/{sha256}"


def snapshot_key(job_id: JobId, lease_epoch: int) -> str:
    """Returns where the holder of this lease writes its snapshot; nobody else ever writes there.

    Of the job, not the version: a retry by hand makes a new job, whose epochs begin anew.
    """
    return f"{SNAPSHOT_PREFIX}{job_id}/{lease_epoch}"


def upload_key() -> str:
    """Returns a fresh key for bytes whose hash is not known yet."""
    return f"{UPLOAD_PREFIX}{uuid.uuid4()}"


def open_blob_store(url: str) -> BlobStore:
    """Returns the store at `url`: a path, file:///..., s3://..., gs://... or az://...; makes a local folder.

    Raises BlobStoreError for a URL that no store can be made of.
    """
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        folder = Path(unquote(parts.path) if parts.scheme else url).expanduser().resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BlobStoreError(f"the blob folder cannot be made: {error.strerror}") from error
        return BlobStore(LocalStore(folder), folder=folder)
    try:
        return BlobStore(from_url(url), folder=None)
    except BaseError as error:
        raise BlobStoreError(f"the blob store {parts.scheme}:// cannot be opened") from error


class BlobStore:
    """Files by key. `folder` is set for a local store only, whose files are flushed to the disk."""

    def __init__(self, store: Any, *, folder: Path | None) -> None:
        self._store = store
        self._folder = folder

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """Stores `chunks` under `key`; an error of `chunks` or a cancellation leaves nothing behind."""
        with _translated(key):
            writer = obstore.open_writer_async(self._store, key, buffer_size=_PART_BYTES, max_concurrency=2)
        # Not as a context manager: leaving that by an error would close, and so keep, half a file.
        try:
            async for chunk in chunks:
                with _translated(key):
                    await writer.write(chunk)
            with _translated(key):
                await writer.close()
        finally:
            # A writer that is dropped without close discards what it has. Dropped by hand, because
            # the traceback of an error would keep it, and its half file, alive.
            del writer

    async def promote(self, temporary_key: str, key: str) -> None:
        """Moves `temporary_key` to `key`; what was there is replaced in one step."""
        with _translated(temporary_key):
            await self._flush(temporary_key)
            await obstore.rename_async(self._store, temporary_key, key)

    async def put_bytes(self, key: str, data: bytes) -> None:
        with _translated(key):
            await obstore.put_async(self._store, key, data)
            await self._flush(key)

    async def get_bytes(self, key: str) -> bytes:
        with _translated(key):
            found = await obstore.get_async(self._store, key)
            return bytes(await found.bytes_async())

    async def iterate(self, key: str, chunk_size: int = 256 << 10) -> AsyncIterator[bytes]:
        """Yields the file in pieces of at most `chunk_size` bytes."""
        with _translated(key):
            found = await obstore.get_async(self._store, key)
            async for piece in found.stream(min_chunk_size=chunk_size):
                view = memoryview(piece)
                for start in range(0, len(view), chunk_size):
                    yield bytes(view[start : start + chunk_size])

    async def download_to(self, key: str, path: Path) -> str:
        """Writes the file to `path`, with constant memory; returns the SHA-256 of what came, in hex."""
        taken = hashlib.sha256()
        try:
            with path.open("wb") as file:
                async for piece in self.iterate(key, 1 << 20):
                    taken.update(piece)
                    await asyncio.to_thread(file.write, piece)
        except OSError as error:
            # Of this machine's disk, most likely full.
            raise DependencyUnavailableError("STORAGE_UNAVAILABLE") from error
        return taken.hexdigest()

    async def probe(self) -> None:
        """Writes and removes a small file; raises DependencyUnavailableError while that is not possible."""
        key = f"{UPLOAD_PREFIX}probe-{uuid.uuid4()}"
        await self.put_bytes(key, bytes(1 << 16))
        await self.delete(key)

    async def delete(self, key: str) -> None:
        """Removes `key`; one that is not there is fine."""
        with _translated(key), contextlib.suppress(FileNotFoundError):
            await obstore.delete_async(self._store, key)
        if self._folder is not None and key.startswith(SNAPSHOT_PREFIX):
            # A folder a job would stay behind for ever; one that is not empty stays by itself.
            with contextlib.suppress(OSError):
                (self._folder / key).parent.rmdir()

    async def list_keys(self, prefix: str) -> AsyncIterator[StoredFile]:
        """Yields the files whose keys start with the folders of `prefix`, in no order."""
        with _translated(prefix):
            async for batch in obstore.list(self._store, prefix):
                for item in batch:
                    yield StoredFile(item["path"], item["size"], item["last_modified"])

    async def remove_abandoned_uploads(self, older_than_seconds: float) -> int:
        """Removes what uploads left that were killed with their process; returns how many files."""
        files = [file async for file in self.list_keys(UPLOAD_PREFIX)]
        abandoned = [file.key for file in files if file.age_seconds > older_than_seconds]
        for key in abandoned:
            await self.delete(key)
        border = time.time() - older_than_seconds
        return len(abandoned) + await asyncio.to_thread(self._remove_unfinished, border)

    def _remove_unfinished(self, border: float) -> int:
        # The local store never lists these; object stores have a life cycle rule for theirs.
        if self._folder is None or not (self._folder / UPLOAD_PREFIX).is_dir():
            return 0
        found = [path for path in (self._folder / UPLOAD_PREFIX).iterdir() if _UNFINISHED.search(path.name)]
        old = [path for path in found if path.stat().st_mtime < border]
        for path in old:
            path.unlink(missing_ok=True)
        return len(old)

    async def _flush(self, key: str) -> None:
        # An accepted document survives a power cut; the rename that follows is in the folder's own journal.
        if self._folder is not None:
            await asyncio.to_thread(_fsync, self._folder / key)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _translated(key: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ResourceNotFoundError("BLOB_MISSING") from error
    except (BaseError, OSError) as error:
        raise DependencyUnavailableError("STORAGE_UNAVAILABLE") from error
