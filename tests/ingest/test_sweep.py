"""What nothing refers to is removed once it is old enough; everything else stays."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

from services.ingest.blobs import BlobStore, blob_key, snapshot_key
from services.ingest.model import JobId
from services.ingest.sweep import sweep_once
from shared.postgres import Pool
from tests.support import rows

GRACE_SECONDS = 60.0


def age_files(folder: Path) -> None:
    old = time.time() - 10 * GRACE_SECONDS
    for path in folder.rglob("*"):
        os.utime(path, (old, old))


async def store(blobs: BlobStore, content: bytes) -> str:
    key = blob_key(hashlib.sha256(content).hexdigest())
    await blobs.put_bytes(key, content)
    return key


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


async def test_d28_orphans_go_and_everything_that_is_named_stays(
    pool: Pool, blob_store: BlobStore, blob_folder: Path
) -> None:
    await rows.submit(pool, content=b"kept")
    kept = await store(blob_store, b"kept")
    without_row = await store(blob_store, b"a process died before its transaction")
    unreferenced = await store(blob_store, b"its document was deleted")
    sha256 = hashlib.sha256(b"its document was deleted").hexdigest()
    await rows.execute(
        pool,
        "INSERT INTO blobs (sha256, size_bytes, touched_at) VALUES (%s, 1, now() - interval '1 hour')",
        sha256,
    )
    snapshot = snapshot_key(JobId(99), 1)
    await blob_store.put_bytes(snapshot, b"of a job that is gone")
    upload = "uploads/broken"
    await blob_store.put_bytes(upload, b"half of something")
    age_files(blob_folder)
    assert await sweep_once(pool, blob_store, grace_seconds=GRACE_SECONDS) == 4
    assert files(blob_folder) == {kept}
    found = await rows.execute(pool, "SELECT sha256 FROM blobs")
    assert [row["sha256"] for row in found] == [hashlib.sha256(b"kept").hexdigest()]
    assert without_row != unreferenced


async def test_young_files_stay_whatever_they_are(
    pool: Pool, blob_store: BlobStore, blob_folder: Path
) -> None:
    await store(blob_store, b"a submission is about to name it")
    await blob_store.put_bytes(snapshot_key(JobId(99), 1), b"just written")
    await rows.execute(pool, "INSERT INTO blobs (sha256, size_bytes) VALUES (%s, 1)", "a" * 64)
    before = files(blob_folder)
    assert await sweep_once(pool, blob_store, grace_seconds=GRACE_SECONDS) == 0
    assert files(blob_folder) == before


async def test_old_request_ids_and_tombstones_go(pool: Pool, blob_store: BlobStore) -> None:
    for age in ("1 hour", "25 hours"):
        await rows.execute(
            pool,
            "INSERT INTO request_ids (tenant_id, request_id, digest, document_id, version_number, created, created_at) "
            "VALUES (1, gen_random_uuid(), '', gen_random_uuid(), 1, true, now() - %s::interval)",
            age,
        )
        await rows.execute(
            pool,
            "INSERT INTO deleted_documents (document_id, collection_id, deleted_at) "
            "VALUES (gen_random_uuid(), 1, now() - %s::interval)",
            age,
        )
    assert await sweep_once(pool, blob_store, grace_seconds=GRACE_SECONDS) == 2
    for table in ("request_ids", "deleted_documents"):
        (row,) = await rows.execute(pool, f"SELECT count(*) AS n FROM {table}")
        assert row["n"] == 1
