"""Whatever dies, and in whatever stage: all of a document becomes searchable, or nothing.

Real processes over real gRPC, the real model. A worker is held in a stage by a lock the
test takes in the database, so that SIGKILL and SIGSTOP hit exactly there; no hook in
the code, no sleeping to hope.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator

import psycopg
import pytest
from readymark_client import AsyncReadymark

from shared.postgres import Pool
from tests.support import rows
from tests.support.observer import Observer, observing
from tests.support.processes import Cluster, Process
from tests.support.workers import until
from tests.system.conftest import LEASE_SECONDS, POLL_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STAGES = ["PARSING", "CHUNKING", "EMBEDDING", "INDEXING"]
SENTENCES = 40
# The server may take a second to notice a dead client; the rest is patience with a busy machine.
NOTICE_SECONDS = 2.0


def text_with(word: str) -> str:
    """A document of several chunks, each of which holds `word`."""
    return "\n\n".join(
        f"Paragraph {n} of the {word} report tells how the pump number {n} was repaired."
        for n in range(SENTENCES)
    )


@contextlib.asynccontextmanager
async def started(cluster: Cluster) -> AsyncIterator[tuple[AsyncReadymark, Observer]]:
    cluster.embedder()
    cluster.ingest()
    cluster.search()
    addresses = cluster.addresses
    async with (
        AsyncReadymark(addresses["ingest"], addresses["search"], addresses["embedder"]) as client,
        observing(cluster, client) as observer,
    ):
        yield client, observer


async def submit(client: AsyncReadymark, observer: Observer, word: str) -> str:
    document = await client.submit(text_with(word), display_name=f"{word}.txt")
    observer.words[document.document_id] = word
    return document.document_id


# A worker that would move a document of this stage on waits as long as the test holds the lock.
HOLD_STAGE = """
CREATE OR REPLACE FUNCTION readymark.wait_for_the_test() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock_shared(4711); RETURN NEW; END $$;
CREATE OR REPLACE TRIGGER wait_for_the_test BEFORE UPDATE OF status ON readymark.document_versions FOR EACH ROW
WHEN (OLD.status = '{stage}' AND NEW.status <> OLD.status AND NEW.status NOT IN ('PENDING', 'FAILED'))
EXECUTE FUNCTION readymark.wait_for_the_test()
"""


@contextlib.contextmanager
def stage_held(cluster: Cluster, stage: str) -> Iterator[Callable[[], None]]:
    """While this is open no document leaves `stage` forward; yields what ends it early."""
    with psycopg.connect(cluster.postgres.uri("postgres", "readymark"), autocommit=True) as holder:
        holder.execute(HOLD_STAGE.format(stage=stage).encode())
        holder.execute("SELECT pg_advisory_lock(4711)")
        yield lambda: holder.execute("SELECT pg_advisory_unlock_all()") and None


async def is_held_in(observer: Observer, stage: str, document_id: str) -> None:
    """Returns once the worker has done all of `stage` and waits to leave it."""

    async def waits() -> bool:
        waiting = await rows.execute(
            observer.pool, "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        )
        return bool(waiting) and (await observer.pairs())[document_id] == (stage, "RUNNING")

    await until(waits, 60)


def assert_clean(observer: Observer, chunk_counts: dict[str, int]) -> None:
    assert observer.illegal == set()
    assert observer.found_while_not_ready == set()
    for document_id, count in chunk_counts.items():
        assert observer.chunks_seen.get(document_id, set()) <= {count}, "a part of a document was found"
    assert all(rounds > 10 for rounds in observer.rounds.values()), observer.rounds


async def all_ready(observer: Observer, document_ids: list[str]) -> bool:
    pairs = await observer.pairs()
    return all(pairs[document_id] == ("READY", "SUCCEEDED") for document_id in document_ids)


async def chunk_counts(client: AsyncReadymark, document_ids: list[str]) -> dict[str, int]:
    return {document_id: (await client.get(document_id)).chunk_count for document_id in document_ids}


async def fully_found(client: AsyncReadymark, word: str, count: int) -> bool:
    result = await client.search(word, mode="keyword", top_k=200)
    return len(result.hits) == count


@pytest.mark.parametrize("stage", STAGES)
async def test_d1_d2_d3_j5_a_killed_worker_is_replaced_within_a_lease_and_two_polls(
    cluster: Cluster, stage: str
) -> None:
    """Cases D2, D17, O8: SIGKILL in each of the four stages, other documents in flight."""
    async with started(cluster) as (client, observer):
        victim = cluster.worker()
        with stage_held(cluster, stage) as release:
            held = await submit(client, observer, "alpha")
            await is_held_in(observer, stage, held)
            # The one that will take over is up and waits: what is measured is not its start.
            cluster.worker()
            others = [await submit(client, observer, word) for word in ("beta", "gamma", "delta")]
            assert (await observer.pairs())[held] == (stage, "RUNNING")
            victim.kill()
            killed_at = await database_now(observer.pool)
            # Rule D2: the database names the stage that had begun.
            assert (await observer.pairs())[held] == (stage, "RUNNING")
            release()
        documents = [held, *others]
        await until(lambda: all_ready(observer, documents), 120)
        await assert_taken_over_in_time(observer.pool, held, killed_at)
        counts = await chunk_counts(client, documents)
        for document_id, word in observer.words.items():
            await until(lambda d=document_id, w=word: fully_found(client, w, counts[d]))  # type: ignore[misc]
        assert_clean(observer, counts)


async def database_now(pool: Pool):  # type: ignore[no-untyped-def]
    (row,) = await rows.execute(pool, "SELECT clock_timestamp() AS now")
    return row["now"]


async def assert_taken_over_in_time(pool: Pool, document_id: str, killed_at) -> None:  # type: ignore[no-untyped-def]
    attempts = await rows.execute(
        pool,
        "SELECT a.* FROM ingestion_attempts a JOIN document_versions v USING (version_id) "
        "WHERE v.document_id = %s ORDER BY a.lease_epoch",
        document_id,
    )
    # On a starved machine a later attempt may lose its lease too; what counts is when the second began.
    first, second, last = attempts[0], attempts[1], attempts[-1]
    assert (first["outcome"], last["outcome"]) == ("LEASE_EXPIRED", "SUCCEEDED")
    late = (second["started_at"] - killed_at).total_seconds()
    assert late <= LEASE_SECONDS + 2 * POLL_SECONDS * 1.1 + NOTICE_SECONDS


async def everything(pool: Pool) -> dict[str, list[dict[str, object]]]:
    tables = [
        row["tablename"]
        for row in await rows.execute(pool, "SELECT tablename FROM pg_tables WHERE schemaname = 'readymark'")
    ]
    return {
        table: sorted(await rows.execute(pool, f"SELECT * FROM readymark.{table}"), key=str)
        for table in tables
    }


@pytest.mark.parametrize("stage", STAGES)
async def test_j14_a_sleeper_past_its_lease_changes_nothing(cluster: Cluster, stage: str) -> None:
    """Cases D43, Q2: SIGSTOP past the lease, another finishes, SIGCONT."""
    async with started(cluster) as (client, observer):
        sleeper = cluster.worker()
        with stage_held(cluster, stage) as release:
            document_id = await submit(client, observer, "alpha")
            await is_held_in(observer, stage, document_id)
            sleeper.send(signal.SIGSTOP)
            await expired(observer.pool)
            release()
        cluster.worker()
        await until(lambda: all_ready(observer, [document_id]), 120)
        before = await everything(observer.pool)
        sleeper.send(signal.SIGCONT)
        line = await asyncio.to_thread(
            sleeper.wait_for_line,
            lambda line: line.get("event") == "attempt ended" and line.get("document_id") == document_id,
        )
        assert line["outcome"] == "lease lost"
        assert await everything(observer.pool) == before
        counts = await chunk_counts(client, [document_id])
        assert await fully_found(client, "alpha", counts[document_id])
        assert_clean(observer, counts)
        # It lives on, and works: for the next job it is a worker like any other.
        next_one = await submit(client, observer, "beta")
        await until(lambda: all_ready(observer, [next_one]), 120)


async def expired(pool: Pool) -> None:
    async def is_expired() -> bool:
        (row,) = await rows.execute(
            pool,
            "SELECT locked_at <= now() - make_interval(secs => lease_seconds) AS expired FROM ingestion_jobs "
            "WHERE status = 'RUNNING'",
        )
        return bool(row["expired"])

    await until(is_expired, LEASE_SECONDS + 20)


async def test_j15_a_stopped_worker_hands_back_at_once_and_another_finishes(cluster: Cluster) -> None:
    """Cases O7, D10, Q18: SIGTERM in the middle of EMBEDDING costs no attempt."""
    async with started(cluster) as (client, observer):
        first = cluster.worker()
        with stage_held(cluster, "EMBEDDING") as release:
            document_id = await submit(client, observer, "alpha")
            await is_held_in(observer, "EMBEDDING", document_id)
            began = time.monotonic()
            assert await asyncio.to_thread(first.stop) == 0
            assert time.monotonic() - began < 10
            assert (await observer.pairs())[document_id] == ("PENDING", "PENDING")
            release()
        cluster.worker()
        await until(lambda: all_ready(observer, [document_id]), 120)
        document = await client.get(document_id)
        assert document.attempts == 1
        outcomes = [attempt.outcome async for attempt in client.attempts(document_id)]
        assert outcomes == ["SUCCEEDED", "HANDED_BACK"]
        assert_clean(observer, await chunk_counts(client, [document_id]))


async def test_j17_the_attempt_after_a_crash_in_embedding_neither_parses_nor_chunks_again(
    cluster: Cluster,
) -> None:
    async with started(cluster) as (client, observer):
        victim = cluster.worker()
        with stage_held(cluster, "INDEXING") as release:
            document_id = await submit(client, observer, "alpha")
            await is_held_in(observer, "INDEXING", document_id)
            victim.kill()
            release()
        calls_before = embed_calls(cluster)
        cluster.worker()
        await until(lambda: all_ready(observer, [document_id]), 120)
        attempts = [attempt async for attempt in client.attempts(document_id)]
        stages = [[str(timing.stage) for timing in attempt.stages] for attempt in reversed(attempts)]
        assert stages == [["PARSING", "CHUNKING", "EMBEDDING", "INDEXING"], ["EMBEDDING", "INDEXING"]]
        # Every vector had been staged, so nothing was embedded again.
        assert embed_calls(cluster) == calls_before


def embed_calls(cluster: Cluster) -> int:
    embedder = next(process for process in cluster.processes if process.name == "embedder")
    return sum(1 for line in embedder.lines if str(line.get("method", "")).endswith("/Embed"))


async def test_d1_every_process_is_killed_and_the_queue_goes_on_by_itself(cluster: Cluster) -> None:
    """Cases D1, D5, Q14: SIGKILL of everything, PostgreSQL included; no call is made afterwards."""
    async with started(cluster) as (client, observer):
        cluster.worker()
        documents = [await submit(client, observer, f"word{number}") for number in range(12)]

        async def some_are_ready() -> bool:
            ready = [pair for pair in (await observer.pairs()).values() if pair[0] == "READY"]
            return 1 <= len(ready) < len(documents)

        await until(some_are_ready, 60)
        for process in cluster.processes:
            process.kill()
        cluster.postgres.restart("immediate")
        cluster.embedder()
        cluster.ingest()
        cluster.search()
        cluster.worker()
        await until(lambda: all_ready(observer, documents), 120)
        counts = await chunk_counts(client, documents)
        for document_id, word in observer.words.items():
            await until(lambda d=document_id, w=word: fully_found(client, w, counts[d]))  # type: ignore[misc]
        assert_clean(observer, counts)


async def test_a_worker_that_dies_in_its_last_attempt_leaves_failed_and_a_reason(cluster: Cluster) -> None:
    """Rule J12, cases Q9, O8: a document that kills its worker ends FAILED and blocks nobody."""
    cluster.settings["READYMARK_INGEST_MAX_ATTEMPTS"] = "2"
    async with started(cluster) as (client, observer):
        with stage_held(cluster, "EMBEDDING") as release:
            document_id = await submit(client, observer, "alpha")
            victims: list[Process] = []
            for attempt in (1, 2):
                victims.append(cluster.worker())

                async def is_held(attempt: int = attempt) -> bool:
                    document = await client.get(document_id)
                    return document.attempts == attempt and document.status == "EMBEDDING"

                await until(is_held, 60)
                victims[-1].kill()
            release()
        cluster.worker()

        async def failed() -> bool:
            return (await observer.pairs())[document_id] == ("FAILED", "FAILED")

        await until(failed, 60)
        document = await client.get(document_id)
        assert document.failure is not None
        assert document.failure.reason == "LEASE_EXPIRED"
        assert "maximum number of attempts was reached" in document.failure.message
        other = await submit(client, observer, "beta")
        await until(lambda: all_ready(observer, [other]), 60)
        assert (await client.search("alpha", mode="keyword")).hits == ()
        retried = await client.retry(document_id)
        assert (str(retried.status), retried.failure) == ("PENDING", None)
        await until(lambda: all_ready(observer, [document_id]), 60)
        assert_clean(observer, await chunk_counts(client, [document_id, other]))
