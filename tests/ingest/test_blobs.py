"""The blob store over a real folder."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.ingest.blobs import BlobStore, blob_key, open_blob_store, snapshot_key
from services.ingest.model import JobId
from shared.errors import DependencyUnavailableError, ResourceNotFoundError
from tests.support.documents import files


async def chunks(count: int, size: int = 1 << 20, error: Exception | None = None) -> AsyncIterator[bytes]:
    for number in range(count):
        yield bytes([number % 256]) * size
    if error is not None:
        raise error


async def test_a_stream_is_read_back_byte_for_byte(blob_store: BlobStore, tmp_path: Path) -> None:
    expected = b"".join([piece async for piece in chunks(11)])
    await blob_store.put_stream("uploads/a", chunks(11))
    await blob_store.promote("uploads/a", blob_key("ab" * 32))
    pieces = [piece async for piece in blob_store.iterate(blob_key("ab" * 32), 300_000)]
    assert b"".join(pieces) == expected
    assert max(map(len, pieces)) <= 300_000
    await blob_store.download_to(blob_key("ab" * 32), tmp_path / "copy")
    assert hashlib.sha256((tmp_path / "copy").read_bytes()).digest() == hashlib.sha256(expected).digest()


@pytest.mark.parametrize("count", [0, 1, 20])
async def test_a_failed_stream_leaves_no_file(blob_store: BlobStore, blob_folder: Path, count: int) -> None:
    with pytest.raises(RuntimeError, match="gone"):
        await blob_store.put_stream("uploads/a", chunks(count, error=RuntimeError("gone")))
    await _wait_until_empty(blob_folder)


async def test_a_cancelled_stream_leaves_no_file(blob_store: BlobStore, blob_folder: Path) -> None:
    half_way, never = asyncio.Event(), asyncio.Event()

    async def stalling() -> AsyncIterator[bytes]:
        async for piece in chunks(20):
            yield piece
        half_way.set()
        await never.wait()

    task = asyncio.create_task(blob_store.put_stream("uploads/a", stalling()))
    await half_way.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _wait_until_empty(blob_folder)


async def _wait_until_empty(folder: Path) -> None:
    # The dropped writer removes its part file on a thread of the store.
    for _ in range(200):
        if not files(folder):
            return
        await asyncio.sleep(0.01)
    assert files(folder) == []


async def test_a_missing_key_is_a_missing_blob_and_deleting_it_is_fine(blob_store: BlobStore) -> None:
    for call in (blob_store.get_bytes("blobs/aa/none"), blob_store.promote("uploads/none", "blobs/aa/x")):
        with pytest.raises(ResourceNotFoundError) as caught:
            await call
        assert caught.value.reason == "BLOB_MISSING"
    await blob_store.delete("blobs/aa/none")


async def test_a_store_that_cannot_be_written_is_unavailable(
    blob_store: BlobStore, blob_folder: Path
) -> None:
    (blob_folder / "blobs").write_text("a file where a folder has to be")
    with pytest.raises(DependencyUnavailableError) as caught:
        await blob_store.put_bytes("blobs/aa/x", b"x")
    assert caught.value.reason == "STORAGE_UNAVAILABLE"


async def test_keys_are_listed_with_their_size_and_age(blob_store: BlobStore) -> None:
    await blob_store.put_bytes(snapshot_key(JobId(7), 1), b"12345")
    await blob_store.put_bytes(snapshot_key(JobId(8), 1), b"1")
    (found,) = [file async for file in blob_store.list_keys("snapshots/7")]
    assert (found.key, found.size_bytes) == ("snapshots/7/1", 5)
    assert abs(found.modified_at.timestamp() - time.time()) < 60


async def test_only_old_uploads_are_abandoned(blob_store: BlobStore, blob_folder: Path) -> None:
    await blob_store.put_bytes("uploads/old", b"x")
    await blob_store.put_bytes("uploads/young", b"x")
    await blob_store.put_bytes("blobs/aa/old", b"x")
    (blob_folder / "uploads" / "killed#1").write_bytes(b"half")
    for name in ("uploads/old", "uploads/killed#1", "blobs/aa/old"):
        os.utime(blob_folder / name, (1, 1))
    assert await blob_store.remove_abandoned_uploads(3600) == 2
    assert files(blob_folder) == ["blobs/aa/old", "uploads/young"]


def test_a_url_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="gopher"):
        open_blob_store("gopher://somewhere/x")


async def test_a_file_url_and_a_path_name_the_same_store(tmp_path: Path) -> None:
    await open_blob_store(f"file://{tmp_path}/new folder").put_bytes("a/b", b"1")
    assert await open_blob_store(str(tmp_path / "new folder")).get_bytes("a/b") == b"1"
