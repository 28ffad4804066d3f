"""The stages of one attempt over a real database, parser processes and gRPC; the embedder is the fake.

The fake embedder provokes faults and counts what it is asked; everything else is real.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from services.ingest.blobs import BlobStore, blob_key
from services.ingest.lifecycle import DocumentStatus
from services.ingest.parsing.limits import ParseLimits
from services.ingest.parsing.sandbox import ParserPool
from services.ingest.processing import ChunkPolicy, DocumentProcessingService
from services.ingest.repository import jobs, publication
from services.ingest.repository.jobs import Lease
from shared.embedder_client import EmbedderClient, Patience
from shared.errors import (
    DependencyUnavailableError,
    InvalidDocumentError,
    LeaseLostError,
    ModelMismatchError,
    ResourceNotFoundError,
)
from shared.postgres import Pool
from tests.support import rows
from tests.support.fake_embedder import Behaviour, FakeEmbedder, start_fake_embedder
from tests.support.files import encrypted_pdf, scanned_pdf

TEXT = "\n\n".join(f"Paragraph {n} tells how pump number {n} was repaired." for n in range(30))
POLICY = ChunkPolicy(max_tokens=40, overlap_tokens=5)


@dataclasses.dataclass
class Bench:
    """Everything one attempt needs, and what the test wants to see of it."""

    pool: Pool
    blobs: BlobStore
    embedder: FakeEmbedder
    service: DocumentProcessingService
    stop_embedder: Callable[[], Awaitable[None]]

    async def submit(
        self, content: bytes | str, display_name: str = "a.txt", **fields: object
    ) -> rows.Submitted:
        data = content.encode() if isinstance(content, str) else content
        await self.blobs.put_bytes(blob_key(hashlib.sha256(data).hexdigest()), data)
        return await rows.submit(self.pool, content=data, display_name=display_name, **fields)  # type: ignore[arg-type]

    def embedded_texts(self) -> list[str]:
        return [text for call in self.embedder.calls for text in call.texts]

    async def contents(self) -> list[str]:
        found = await rows.execute(self.pool, "SELECT content FROM chunks_1 ORDER BY version_id, ordinal")
        return [row["content"] for row in found]


@pytest.fixture
async def bench(pool: Pool, blob_store: BlobStore) -> AsyncIterator[Bench]:
    async with contextlib.AsyncExitStack() as stack:
        fake = FakeEmbedder(Behaviour(dimension=8))
        address, serving, _ = await start_fake_embedder(fake)
        stack.push_async_callback(serving.stop, 0)
        patience = Patience(batch_texts=4, retry_budget_seconds=1.0, max_backoff_seconds=0.1)
        client = EmbedderClient(address, patience=patience)
        stack.push_async_callback(client.close)
        parsers = ParserPool()
        stack.push_async_callback(parsers.close)
        service = DocumentProcessingService(
            pool=pool,
            blobs=blob_store,
            parsers=parsers,
            embedder=client,
            chunk_policy=POLICY,
            parse_limits=ParseLimits(wall_seconds=20),
        )
        await service.ready()
        yield Bench(pool, blob_store, fake, service, lambda: serving.stop(0))


async def stages_of(pool: Pool, submitted: rows.Submitted) -> list[list[str]]:
    return [
        [entry["stage"] for entry in row["stages"]] for row in await rows.attempts(pool, submitted.job_id)
    ]


async def test_d1_d2_the_stages_run_in_order_and_end_in_ready(bench: Bench) -> None:
    submitted = await bench.submit(TEXT)
    lease = await rows.claim(bench.pool)
    await bench.service.process(lease)
    assert await stages_of(bench.pool, submitted) == [["PARSING", "CHUNKING", "EMBEDDING", "INDEXING"]]
    assert await rows.pair(bench.pool, submitted) == ("READY", "SUCCEEDED")
    contents = await bench.contents()
    assert len(contents) > 5
    assert all(f"pump number {n} " in " ".join(contents) for n in range(30))
    version = await rows.version(bench.pool, submitted.version_id)
    assert (version["chunk_count"], version["media_type"]) == (len(contents), "text/plain")
    assert version["token_count"] > 0


@pytest.mark.parametrize(
    ("stage", "held_by"),
    [
        (DocumentStatus.CHUNKING, "snapshots"),
        (DocumentStatus.EMBEDDING, "the embedder's answer"),
        (DocumentStatus.INDEXING, "documents"),
    ],
)
async def test_d2_the_status_is_committed_before_the_work_of_its_stage(
    bench: Bench, stage: DocumentStatus, held_by: str
) -> None:
    submitted = await bench.submit(TEXT)
    lease = await rows.claim(bench.pool)
    async with bench.pool.connection() as holder:
        if held_by == "the embedder's answer":
            bench.embedder.gate.clear()
        else:
            # The table that the stage, and none before it, writes to.
            await holder.set_autocommit(False)
            await holder.execute(f"LOCK TABLE {held_by} IN SHARE MODE")
        running = asyncio.create_task(bench.service.process(lease))
        async with asyncio.timeout(20):
            while await rows.pair(bench.pool, submitted) != (stage, "RUNNING"):
                await asyncio.sleep(0.01)
        assert not running.done()
        await holder.rollback()
        await holder.set_autocommit(True)
    bench.embedder.gate.set()
    await running
    assert await rows.pair(bench.pool, submitted) == ("READY", "SUCCEEDED")


@pytest.mark.parametrize("is_lost", [False, True])
async def test_d2_what_fails_in_parsing_leaves_the_status_parsing(bench: Bench, is_lost: bool) -> None:
    """Reading the original belongs to the stage too."""
    content = bytes(range(256)) * 40
    if is_lost:
        submitted = await rows.submit(bench.pool, content=content)
    else:
        submitted = await bench.submit(content)
    with pytest.raises(ResourceNotFoundError if is_lost else InvalidDocumentError):
        await bench.service.process(await rows.claim(bench.pool))
    assert await rows.pair(bench.pool, submitted) == ("PARSING", "RUNNING")


async def test_d1_no_embedding_call_is_made_before_the_snapshot_is_stored(
    bench: Bench, blob_folder: object
) -> None:
    """Fail-closed: the snapshot cannot be written, so nothing is embedded, and the error is a temporary one."""
    submitted = await bench.submit(TEXT)
    lease = await rows.claim(bench.pool)
    (blob_folder / "snapshots").write_text("a file where the folder should be")  # type: ignore[operator]
    with pytest.raises(DependencyUnavailableError):
        await bench.service.process(lease)
    assert bench.embedder.calls == []
    assert await rows.pair(bench.pool, submitted) == ("CHUNKING", "RUNNING")


async def test_j17_the_next_attempt_goes_straight_to_embedding_and_embeds_only_what_is_missing(
    bench: Bench,
) -> None:
    """Cases D37, D19: a failure in EMBEDDING neither parses again nor pays twice for vectors."""
    submitted = await bench.submit(TEXT, retry_delay_seconds=0.0)
    first = await rows.claim(bench.pool)
    bench.embedder.behaviour.fail_texts_containing = "pump number 29 "
    with pytest.raises(DependencyUnavailableError):
        await bench.service.process(first)
    await jobs.retry_later(
        bench.pool, first, delay_seconds=0, error_message="later", failure={"reason": "EMBEDDER_UNAVAILABLE"}
    )
    staged = await rows.execute(bench.pool, "SELECT ordinal FROM chunk_staging")
    assert staged
    bench.embedder.behaviour.fail_texts_containing = ""
    bench.embedder.calls.clear()
    second = await rows.claim(bench.pool)
    await bench.service.process(second)
    assert await stages_of(bench.pool, submitted) == [
        ["PARSING", "CHUNKING", "EMBEDDING"],
        ["EMBEDDING", "INDEXING"],
    ]
    contents = await bench.contents()
    assert len(bench.embedded_texts()) == len(contents) - len(staged)


@pytest.mark.parametrize("damage", ["other bytes", "cut off", "gone", "other chunker"])
async def test_j17_a_damaged_or_foreign_snapshot_is_built_anew(bench: Bench, damage: str) -> None:
    submitted = await bench.submit(TEXT)
    first = await rows.claim(bench.pool)
    bench.embedder.behaviour.fail_texts_containing = "Paragraph"
    with pytest.raises(DependencyUnavailableError):
        await bench.service.process(first)
    await jobs.hand_back(bench.pool, first)
    row = await publication.find_snapshot(bench.pool, first.version_id)
    assert row is not None
    data = await bench.blobs.get_bytes(row.file_key)
    if damage == "other bytes":
        await bench.blobs.put_bytes(row.file_key, data[:-20] + bytes(20))
    elif damage == "cut off":
        await bench.blobs.put_bytes(row.file_key, data[: len(data) // 2])
    elif damage == "gone":
        await bench.blobs.delete(row.file_key)
    else:
        bench.service._chunk_policy = ChunkPolicy(max_tokens=30, overlap_tokens=0)
        bench.service._chunkers.clear()
    bench.embedder.behaviour.fail_texts_containing = ""
    await bench.service.process(await rows.claim(bench.pool))
    assert (await stages_of(bench.pool, submitted))[1] == ["PARSING", "CHUNKING", "EMBEDDING", "INDEXING"]
    assert await rows.pair(bench.pool, submitted) == ("READY", "SUCCEEDED")


async def test_a_new_version_embeds_only_the_chunks_that_changed(bench: Bench) -> None:
    """Case D19."""
    first = await bench.submit(TEXT)
    await bench.service.process(await rows.claim(bench.pool))
    before = await bench.contents()
    bench.embedder.calls.clear()
    changed = TEXT.replace("pump number 29 was", "pump number 29 never was")
    await bench.submit(changed, document_id=first.document_id)
    await bench.service.process(await rows.claim(bench.pool))
    after = await bench.contents()
    assert after != before
    assert len(bench.embedded_texts()) == len(set(after) - set(before)) < len(after)


async def test_j14_a_worker_that_lost_its_lease_in_embedding_stages_no_vector(bench: Bench) -> None:
    submitted = await bench.submit(TEXT)
    sleeper = await rows.claim(bench.pool)
    bench.embedder.gate.clear()
    running = asyncio.create_task(bench.service.process(sleeper))
    async with asyncio.timeout(20):
        # From the call on it writes nothing, so nothing renews the lease, until it is answered.
        while not bench.embedder.calls:
            await asyncio.sleep(0.01)
    await rows.expire_lease(bench.pool, submitted.job_id)
    other = await rows.claim(bench.pool, worker="other")
    bench.embedder.gate.set()
    with pytest.raises(LeaseLostError):
        await running
    assert await rows.execute(bench.pool, "SELECT ordinal FROM chunk_staging") == []
    await bench.service.process(other)
    assert await rows.pair(bench.pool, submitted) == ("READY", "SUCCEEDED")


@pytest.mark.parametrize(
    ("content", "display_name", "reason"),
    [
        (b" \n\t\n ", "blank.txt", "EMPTY_DOCUMENT"),
        (b"\xef\xbb\xbf", "bom.txt", "EMPTY_DOCUMENT"),
        (b"\xff\xfe \0\n\0", "bom16.txt", "EMPTY_DOCUMENT"),
        (b"\n" * 1_000_000, "newlines.md", "EMPTY_DOCUMENT"),
        (bytes(range(256)) * 40, "binary.txt", "BINARY_OR_UNKNOWN"),
        (encrypted_pdf(), "secret.pdf", "PASSWORD_PROTECTED"),
        (scanned_pdf([None]), "scan.pdf", "NO_TEXT_LAYER"),
        (b"%PDF-1.7\nnot really", "broken.pdf", "CORRUPT_FILE"),
        (b"PK\x03\x04" + bytes(64), "archive.zip", "UNSUPPORTED_TYPE"),
    ],
)
async def test_p15_d4_d13_a_wrong_file_is_a_permanent_error_with_a_reason(
    bench: Bench, content: bytes, display_name: str, reason: str
) -> None:
    await bench.submit(content, display_name)
    lease = await rows.claim(bench.pool)
    with pytest.raises(InvalidDocumentError) as refused:
        await bench.service.process(lease)
    assert (
        refused.value.reason in {reason, "NO_TEXT"}
        if reason == "NO_TEXT_LAYER"
        else refused.value.reason == reason
    )
    assert bench.embedder.calls == []


async def test_a_lost_original_is_a_permanent_error(bench: Bench) -> None:
    await rows.submit(bench.pool, content=b"never stored")
    with pytest.raises(ResourceNotFoundError):
        await bench.service.process(await rows.claim(bench.pool))


async def test_a_damaged_original_never_becomes_ready(bench: Bench, blob_folder: Path) -> None:
    submitted = await bench.submit(TEXT)
    (stored,) = [path for path in (blob_folder / "blobs").rglob("*") if path.is_file()]
    stored.write_bytes(b"Something else altogether.")
    with pytest.raises(ResourceNotFoundError) as refused:
        await bench.service.process(await rows.claim(bench.pool))
    assert refused.value.reason == "BLOB_DAMAGED"
    assert await rows.pair(bench.pool, submitted) == ("PARSING", "RUNNING")


async def test_after_a_fault_of_the_storage_nothing_is_claimed_until_it_works_again(
    bench: Bench, blob_folder: Path
) -> None:
    """An outage must not use up the attempts of the whole queue."""
    await bench.submit(TEXT)
    obstacle = blob_folder / "snapshots"
    obstacle.write_text("a file where the folder should be")
    with pytest.raises(DependencyUnavailableError):
        await bench.service.process(await rows.claim(bench.pool))
    (blob_folder / "uploads").write_text("and another")
    with pytest.raises(DependencyUnavailableError) as refused:
        await bench.service.ready()
    assert refused.value.reason == "STORAGE_UNAVAILABLE"
    obstacle.unlink()
    (blob_folder / "uploads").unlink()
    await bench.service.ready()


async def test_a_model_that_cannot_be_used_is_waited_out_and_named(bench: Bench) -> None:
    for behaviour in ({"dimension": 5000}, {"dimension": 9, "max_input_tokens": 4}):
        for name, value in behaviour.items():
            setattr(bench.embedder.behaviour, name, value)
        with pytest.raises(DependencyUnavailableError) as refused:
            await bench.service.ready()
        assert refused.value.reason == "MODEL_UNSUITABLE"


async def test_d29_another_model_is_refused_and_writes_nothing(bench: Bench) -> None:
    await bench.submit(TEXT)
    await bench.service.process(await rows.claim(bench.pool))
    before = await bench.contents()
    submitted = await bench.submit("Another text about something else.")
    bench.embedder.behaviour.fingerprint = "b" * 64
    with pytest.raises(ModelMismatchError) as refused:
        await bench.service.process(await rows.claim(bench.pool))
    assert refused.value.parameters["actual"].startswith("bbb")
    assert await bench.contents() == before
    assert await rows.pair(bench.pool, submitted) == ("EMBEDDING", "RUNNING")


async def test_a_text_the_model_gives_no_vector_for_is_the_documents_fault(bench: Bench) -> None:
    await bench.submit(TEXT)
    bench.embedder.behaviour.fail_texts_containing = "pump number 3 "
    bench.embedder.behaviour.fail_code = "INVALID_ARGUMENT"
    with pytest.raises(InvalidDocumentError) as refused:
        await bench.service.process(await rows.claim(bench.pool))
    assert refused.value.reason == "VECTOR_INVALID"


async def test_vectors_that_are_no_numbers_are_never_stored(bench: Bench) -> None:
    """Case E8, the side of ingest."""
    submitted = await bench.submit(TEXT)
    bench.embedder.behaviour.is_nan = True
    with pytest.raises(Exception):  # noqa: B017
        await bench.service.process(await rows.claim(bench.pool))
    assert await rows.pair(bench.pool, submitted) == ("EMBEDDING", "RUNNING")
    assert await rows.execute(bench.pool, "SELECT ordinal FROM chunk_staging") == []


async def test_progress_is_told_in_vectors(bench: Bench) -> None:
    # Enough for several calls one after another: two are in flight at once, with four texts each.
    submitted = await bench.submit(TEXT + TEXT.replace("pump", "valve"))
    bench.embedder.behaviour.delay_seconds = 0.3
    running = asyncio.create_task(bench.service.process(await rows.claim(bench.pool)))
    told: list[tuple[int, int]] = []
    while not running.done():
        row = await rows.version(bench.pool, submitted.version_id)
        if row["progress_unit"] == "vectors":
            told.append((row["progress_done"], row["progress_total"]))
        await asyncio.sleep(0.02)
    await running
    assert told
    assert told == sorted(told)
    assert all(0 < done <= total for done, total in told)


async def test_a_worker_is_not_ready_while_the_embedder_is_away(bench: Bench) -> None:
    """Case D37: so nothing is claimed and no attempt is used up, however long it stays away."""
    await bench.service.ready()
    await bench.stop_embedder()
    with pytest.raises(DependencyUnavailableError):
        await bench.service.ready()


async def test_other_documents_go_on_beside_a_hanging_embedder_call(bench: Bench) -> None:
    await bench.submit(TEXT)
    await bench.submit(TEXT.replace("pump", "valve"))
    leases: tuple[Lease, ...] = (
        await jobs.claim_ingestion_jobs(bench.pool, worker="w", lease_seconds=60, max_jobs=2)
    ).leases
    await asyncio.gather(*(bench.service.process(lease) for lease in leases))
    found = await rows.execute(bench.pool, "SELECT status FROM document_versions")
    assert [row["status"] for row in found] == ["READY", "READY"]
