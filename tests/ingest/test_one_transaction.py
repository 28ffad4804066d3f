"""Rules J11 and J18: document and job move together, or not at all, for workers and for users.

A lock taken by the test stops each move in its middle. Whatever the move has committed by then,
another reader sees; so nothing may have changed until the test lets it go on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable

import pytest
from readymark.ingest.v1 import ingest_service_pb2 as pb

from services.ingest.lifecycle import DocumentStatus
from services.ingest.repository import jobs
from services.ingest.repository.jobs import Lease
from shared import postgres
from shared.postgres import Pool
from tests.ingest.conftest import Api
from tests.support import rows
from tests.support.documents import (
    DIMENSION,
    FINGERPRINT,
    advance,
    claim,
    fail,
    pairs,
    publish,
    retry_later,
    upload,
)
from tests.support.workers import until


async def is_stopped(pool: Pool) -> bool:
    """True once a connection of this database waits for a lock."""
    found = await rows.execute(
        pool,
        "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()",
    )
    return bool(found)


@contextlib.asynccontextmanager
async def stopped_in_the_middle(pool: Pool, lock: str, move: Awaitable[object]) -> AsyncIterator[None]:
    """Lends the moment in which `move` waits for what `lock` holds; then lets it end."""
    async with postgres.transaction(pool) as holder:
        await holder.execute(lock.encode())
        moving = asyncio.ensure_future(move)
        await until(lambda: is_stopped(pool))
        yield
    await moving


def claim_or_settle(pool: Pool) -> Awaitable[object]:
    return jobs.claim_ingestion_jobs(pool, worker="other", lease_seconds=60, max_jobs=1)


def move_of(name: str, api: Api, lease: Lease) -> Awaitable[object]:
    moves = {
        "retry later": lambda: retry_later(api.pool, lease),
        "give up": lambda: fail(api.pool, lease),
        "hand back": lambda: jobs.hand_back(api.pool, lease),
        "settle": lambda: claim_or_settle(api.pool),
    }
    return moves[name]()


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("retry later", ("PENDING", "PENDING")),
        ("give up", ("FAILED", "FAILED")),
        ("hand back", ("PENDING", "PENDING")),
        ("settle", ("FAILED", "FAILED")),
    ],
)
async def test_j11_no_reader_sees_half_of_what_a_worker_does(
    api: Api, name: str, after: tuple[str, str]
) -> None:
    await upload(api.stub)
    lease = await claim(api.pool)
    await advance(api.pool, lease, DocumentStatus.EMBEDDING)
    if name == "settle":
        await rows.expire_lease(api.pool, lease.job_id)
        await rows.execute(api.pool, "UPDATE ingestion_jobs SET attempts = max_attempts")
    lock = "SELECT FROM document_versions FOR NO KEY UPDATE"
    async with stopped_in_the_middle(api.pool, lock, move_of(name, api, lease)):
        assert await pairs(api.pool) == [("EMBEDDING", "RUNNING")]
    assert await pairs(api.pool) == [after]


async def test_j7_j11_no_reader_sees_half_of_a_publication(api: Api) -> None:
    await upload(api.stub)
    lease = await claim(api.pool)
    # The collection's row is the last that a publication writes. Its first model is written there
    # too, before the stages: so it has one already.
    await rows.execute(
        api.pool,
        "UPDATE collections SET vector_space_id = create_vector_space(%s, 'test', %s)",
        FINGERPRINT,
        DIMENSION,
    )
    lock = "SELECT FROM collections FOR NO KEY UPDATE"
    async with stopped_in_the_middle(api.pool, lock, publish(api.pool, api.blobs, lease)):
        assert await pairs(api.pool) == [("INDEXING", "RUNNING")]
        assert await rows.execute(api.pool, "SELECT ordinal FROM chunks_1") == []
    assert await pairs(api.pool) == [("READY", "SUCCEEDED")]


@pytest.mark.parametrize(
    ("name", "situation", "last_table", "after"),
    [
        ("cancel", "EMBEDDING", "ingestion_attempts", [("FAILED", "FAILED")]),
        ("retry", "FAILED", "ingestion_jobs", [("PENDING", "PENDING")]),
        ("delete", "READY", "collections", []),
        ("submit again", "EMBEDDING", "documents", [("FAILED", "FAILED"), ("PENDING", "PENDING")]),
    ],
)
async def test_j18_j11_no_reader_sees_half_of_what_a_user_does(
    api: Api, name: str, situation: str, last_table: str, after: list[tuple[str, str]]
) -> None:
    document = await bring_to(api, situation)
    before = await pairs(api.pool)
    lock = f"LOCK TABLE {last_table} IN SHARE MODE"
    async with stopped_in_the_middle(api.pool, lock, call_of(name, api, document)):
        assert await pairs(api.pool) == before
    assert await pairs(api.pool) == after


async def bring_to(api: Api, situation: str) -> pb.Document:
    document = (await upload(api.stub, source_key="k")).document
    lease = await claim(api.pool)
    if situation == "READY":
        await publish(api.pool, api.blobs, lease)
    elif situation == "FAILED":
        await fail(api.pool, lease)
    else:
        await advance(api.pool, lease, DocumentStatus(situation))
    return document


def call_of(name: str, api: Api, document: pb.Document) -> Awaitable[object]:
    calls = {
        "cancel": lambda: api.stub.CancelDocument(pb.CancelDocumentRequest(name=document.name)),
        "retry": lambda: api.stub.RetryDocument(pb.RetryDocumentRequest(name=document.name)),
        "delete": lambda: api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=document.name)),
        "submit again": lambda: upload(api.stub, b"other bytes", source_key="k"),
    }
    return calls[name]()
