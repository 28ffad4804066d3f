"""Faults that other systems showed in public, against ours: real processes, provoked from outside.

Each docstring names its cases. The embedder is the fake one, so that it can be slowed, failed,
stopped or switched to another model; everything else is real.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from readymark_client import AsyncReadymark, ModelMismatch, ReadymarkClientError
from readymark_client.values import Document

from shared import postgres
from shared.postgres import Pool
from tests.support import rows
from tests.support.observer import observing
from tests.support.processes import Cluster, Process
from tests.support.workers import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@contextlib.asynccontextmanager
async def started(cluster: Cluster) -> AsyncIterator[AsyncReadymark]:
    """The system without a worker; `control(cluster, ...)` steers its embedder."""
    control(cluster)
    cluster.fake_embedder(control_file(cluster))
    cluster.ingest()
    cluster.search()
    addresses = cluster.addresses
    async with AsyncReadymark(addresses["ingest"], addresses["search"], addresses["embedder"]) as client:
        yield client


def control_file(cluster: Cluster) -> Path:
    return cluster.folder / "embedder.json"


def control(cluster: Cluster, **behaviour: object) -> None:
    """Sets fields of the fake embedder's `Behaviour`, from its next call on; the others as at its start."""
    control_file(cluster).write_text(json.dumps(behaviour), encoding="utf-8")


def embedder_of(cluster: Cluster) -> Process:
    return next(process for process in reversed(cluster.processes) if process.name == "embedder")


@contextlib.asynccontextmanager
async def database(cluster: Cluster) -> AsyncIterator[Pool]:
    pool = postgres.create_pool(cluster.ingest_url, application_name="test", max_size=2)
    await pool.open(wait=True)
    try:
        yield pool
    finally:
        await pool.close()


def text_with(word: str, paragraphs: int = 3) -> str:
    return "\n\n".join(
        f"Paragraph {n} of the {word} report tells how the pump number {n} was repaired with great care."
        for n in range(paragraphs)
    )


def outcome(document: Document) -> tuple[str, str]:
    return str(document.status), "" if document.failure is None else document.failure.reason


BLANK = {
    "empty.txt": b"",
    "spaces.txt": b" \t \r\n" * 1000,
    "newlines.md": b"\n" * (1 << 20),
    "mark.txt": b"\xef\xbb\xbf",
    "mark16.txt": b"\xff\xfe",
    "hidden.txt": "\u200b\u2060\u00ad".encode() * 100,
    "comment.html": b"<!-- nothing to see -->",
    "rule.md": b"---\n\n***\n",
}


async def test_blank_documents_fail_by_name_and_the_others_go_on(cluster: Cluster) -> None:
    """Cases D4 and D15: no blank stalls the queue, and what failed is still listed after a restart."""
    async with started(cluster) as client:
        cluster.worker()
        blanks: list[str] = []
        refused: list[str] = []
        good: list[str] = []
        for number, (name, content) in enumerate(BLANK.items()):
            try:
                blanks.append((await client.submit(content, display_name=name)).document_id)
            except ReadymarkClientError as error:
                refused.append(error.reason)
            good += [
                (await client.submit(text_with(f"w{number}{half}"))).document_id for half in ("left", "right")
            ]
        assert refused == ["EMPTY_DOCUMENT"]
        settled = await client.wait([*blanks, *good], 60)
        assert {outcome(document) for document in settled[len(blanks) :]} == {("READY", "")}
        reasons = {outcome(document) for document in settled[: len(blanks)]}
        assert reasons <= {("FAILED", "EMPTY_DOCUMENT"), ("FAILED", "NO_TEXT")}
        assert {document.attempts for document in settled} == {1}
        ingest = next(process for process in cluster.processes if process.name == "ingest")
        ingest.kill()
        cluster.ingest()
        listed = {document.document_id async for document in client.list(status="FAILED")}
        assert listed == set(blanks)


async def test_a_stage_longer_than_two_leases_is_one_attempt_and_never_unknown(cluster: Cluster) -> None:
    """Cases D8 and Q4: a status does not run out, however slow the embedder is."""
    async with started(cluster) as client:
        control(cluster, delay_seconds=5.0)
        cluster.worker()
        cluster.worker()
        document = await client.submit(text_with("slow"))
        statuses: list[str] = []
        while (document := await client.get(document.document_id)).status not in ("READY", "FAILED"):
            statuses.append(str(document.status))
            await asyncio.sleep(0.05)
        assert (outcome(document), document.attempts) == (("READY", ""), 1)
        assert statuses.count("EMBEDDING") > 40
        assert list(dict.fromkeys(statuses))[-1] in ("EMBEDDING", "INDEXING")


async def test_a_failure_is_never_shown_beside_a_later_stage_and_leaves_with_success(
    cluster: Cluster,
) -> None:
    """Cases D11 and D12: one attempt fails; polled and watched until READY."""
    # Long enough that the watch shows the wait between the attempts.
    cluster.settings["READYMARK_INGEST_RETRY_DELAY_SECONDS"] = "2"
    async with started(cluster) as client, observing(cluster, client) as observer:
        control(cluster, fail_next=1, fail_code="INTERNAL")
        document = await client.submit(text_with("alpha", 40))
        observer.words[document.document_id] = "alpha"
        cluster.worker()
        seen = [
            change.document
            async for change in client.watch(document.document_id, until_settled=True, timeout_seconds=60)
            if change.document is not None
        ]
        failing = [state for state in seen if state.failure is not None]
        assert failing, "the failed attempt was not shown at all"
        assert {(str(state.status), str(state.job_status)) for state in failing} <= {
            ("PENDING", "PENDING"),
            ("PENDING", "RUNNING"),
        }
        last = await client.get(document.document_id)
        assert (outcome(last), str(last.job_status), last.attempts) == (("READY", ""), "SUCCEEDED", 2)
        assert [attempt.outcome async for attempt in client.attempts(last.document_id)] == [
            "SUCCEEDED",
            "RETRY_LATER",
        ]
        assert observer.illegal == set()


@pytest.mark.parametrize(
    ("fail_code", "failure", "attempts"),
    [("INVALID_ARGUMENT", "VECTOR_INVALID", 1), ("INTERNAL", "INTERNAL", 3)],
)
async def test_a_text_that_the_embedder_always_refuses_fails_and_holds_up_nobody(
    cluster: Cluster, fail_code: str, failure: str, attempts: int
) -> None:
    """Cases D3, D38, Q25: one bad document is tried as often as the rules say, and the others go on."""
    async with started(cluster) as client:
        control(cluster, fail_texts_containing="poison", fail_code=fail_code)
        cluster.worker()
        bad = await client.submit(text_with("poison"))
        good = [(await client.submit(text_with(f"good{number}"))).document_id for number in range(5)]
        first, *others = await client.wait([bad.document_id, *good], 30)
        assert (outcome(first), first.attempts) == (("FAILED", failure), attempts)
        assert len([attempt async for attempt in client.attempts(bad.document_id)]) == attempts
        assert {outcome(document) for document in others} == {("READY", "")}


@pytest.mark.parametrize("dimension", [384, 768])
async def test_another_model_is_refused_with_both_names_and_touches_nothing(
    cluster: Cluster, dimension: int
) -> None:
    """Cases D29, D38, E17: other dimension or the same one; another collection goes on meanwhile."""
    cluster.settings["READYMARK_INGEST_MAX_ATTEMPTS"] = "1"
    async with started(cluster) as client, database(cluster) as pool:
        worker = cluster.worker()
        first = await client.submit(text_with("alpha"))
        assert outcome((await client.wait(first.document_id, 60))[0]) == ("READY", "")
        worker.stop()
        waiting = await client.submit(text_with("beta"))
        other = "d" * 64
        control(cluster, fingerprint=other, dimension=dimension)
        before = await rows.execute(pool, "SELECT * FROM chunks_1 ORDER BY version_id, ordinal")
        cluster.worker()
        (met,) = await client.wait(waiting.document_id, 60)
        assert outcome(met) == ("FAILED", "EMBEDDING_MODEL_MISMATCH")
        assert met.failure is not None
        assert before
        own = str((await rows.execute(pool, "SELECT fingerprint FROM vector_spaces"))[0]["fingerprint"])
        assert other[:12] in met.failure.message
        assert own[:12] in met.failure.message
        for mode in ("vector", "hybrid"):
            with pytest.raises(ModelMismatch) as refused:
                await client.search("pump", mode=mode)
            assert other[:12] in str(refused.value)
            assert own[:12] in str(refused.value)
        healthy = await client.submit(text_with("gamma"), collection="healthy")
        assert outcome((await client.wait(healthy.document_id, 60))[0]) == ("READY", "")
        assert len((await client.search("gamma", collection="healthy")).hits) > 0
        # What was there is as it was, and keywords need no model.
        assert await rows.execute(pool, "SELECT * FROM chunks_1 ORDER BY version_id, ordinal") == before
        (staged,) = await rows.execute(pool, "SELECT count(*) AS count FROM chunk_staging")
        assert staged["count"] == 0
        hits = (await client.search("alpha", mode="keyword")).hits
        assert {hit.document_id for hit in hits} == {first.document_id}


async def test_an_embedder_that_is_away_costs_time_and_no_attempt(cluster: Cluster) -> None:
    """Case D37: killed in the middle of EMBEDDING, back after three leases; nothing is parsed twice."""
    async with started(cluster) as client:
        control(cluster, delay_seconds=0.4)
        cluster.worker()
        running = await client.submit(text_with("running", 900))

        async def has_begun() -> bool:
            progress = (await client.get(running.document_id)).progress
            return progress is not None and progress.unit == "vectors" and progress.done > 0

        await until(has_begun, 60)
        embedder_of(cluster).kill()
        waiting = [(await client.submit(text_with(f"waiting{n}"))).document_id for n in range(5)]
        # Three leases, and with the delays of this cluster time enough to use up every attempt.
        await asyncio.sleep(6)  # why: three leases of two seconds
        states = [await client.get(document_id) for document_id in waiting]
        assert {str(state.status) for state in states} == {"PENDING"}
        cluster.fake_embedder(control_file(cluster))
        settled = await client.wait([running.document_id, *waiting], 60)
        assert {outcome(document) for document in settled} == {("READY", "")}
        assert {document.attempts for document in settled} == {1}
        (attempt,) = [attempt async for attempt in client.attempts(running.document_id)]
        assert [str(timing.stage) for timing in attempt.stages] == [
            "PARSING",
            "CHUNKING",
            "EMBEDDING",
            "INDEXING",
        ]


async def test_rolling_restarts_lose_no_job_and_cost_no_attempt(cluster: Cluster) -> None:
    """Cases Q12, Q17, Q18, Q19: SIGTERM at random moments, while one long job runs and short ones come."""
    cluster.settings["READYMARK_INGEST_SLOTS"] = "1"
    cluster.settings["READYMARK_INGEST_LEASE_SECONDS"] = "30"
    chance = random.Random(1)
    async with started(cluster) as client, database(cluster) as pool:
        control(cluster, delay_seconds=0.3)
        long = await client.submit(text_with("long", 1200))
        short: list[str] = []
        for number in range(6):
            short.append((await client.submit(text_with(f"short{number}"))).document_id)
            worker = cluster.worker()
            await asyncio.sleep(chance.uniform(0.0, 1.2))
            assert await asyncio.to_thread(worker.stop) == 0
            # Nothing is left under a dead worker: a lease of 30 s would outlast this test's patience.
            assert (
                await rows.execute(pool, "SELECT job_id FROM ingestion_jobs WHERE status = 'RUNNING'") == []
            )
        control(cluster)
        cluster.worker()
        settled = await client.wait([long.document_id, *short], 20)
        assert {outcome(document) for document in settled} == {("READY", "")}
        assert {document.attempts for document in settled} == {1}
        outcomes = {attempt.outcome async for attempt in client.attempts(long.document_id)}
        assert outcomes == {"SUCCEEDED", "HANDED_BACK"}


ORPHANS = {
    "chunks of a version that is not served": (
        "SELECT c.version_id FROM chunks_1 c LEFT JOIN documents d ON d.served_version_id = c.version_id "
        "LEFT JOIN document_versions v ON v.version_id = c.version_id "
        "WHERE d.document_id IS NULL OR v.status IS DISTINCT FROM 'READY'"
    ),
    "counts of chunks that are wrong": (
        "SELECT v.version_id FROM document_versions v WHERE v.status = 'READY' "
        "AND v.chunk_count <> (SELECT count(*) FROM chunks_1 c WHERE c.version_id = v.version_id)"
    ),
    "counters of collections that are wrong": (
        "SELECT c.name FROM collections c "
        "WHERE c.ready_chunks <> (SELECT count(*) FROM chunks_1 k WHERE k.collection_id = c.collection_id)"
    ),
    "staged vectors of a settled version": (
        "SELECT s.version_id FROM chunk_staging s JOIN document_versions v USING (version_id) "
        "WHERE v.status = 'READY' OR v.failure ->> 'code' = 'CANCELLED'"
    ),
    "attempts that run without a job that runs": (
        "SELECT a.job_id FROM ingestion_attempts a JOIN ingestion_jobs j USING (job_id) "
        "WHERE a.outcome = 'RUNNING' AND (j.status <> 'RUNNING' OR j.lease_epoch <> a.lease_epoch)"
    ),
    "unsettled versions that nothing drives": (
        "SELECT v.version_id FROM document_versions v WHERE v.status NOT IN ('READY', 'FAILED') AND NOT EXISTS "
        "(SELECT FROM ingestion_jobs j WHERE j.version_id = v.version_id AND j.status IN ('PENDING', 'RUNNING'))"
    ),
}


async def test_users_and_crashes_at_random_leave_no_orphan(cluster: Cluster) -> None:
    """Cases D3, D28: clients submit, replace, cancel, retry and delete while workers and PostgreSQL die."""
    chance = random.Random(2)
    async with started(cluster) as client, observing(cluster, client) as observer:
        workers = [cluster.worker(), cluster.worker()]
        ends_at = asyncio.get_running_loop().time() + 11.0
        known: set[str] = set()

        async def act() -> None:
            document_id = chance.choice(sorted(known)) if known else None
            action = chance.choice(["submit", "submit", "submit", "cancel", "retry", "delete"])
            if action == "submit" or document_id is None:
                made = await client.submit(
                    text_with(f"w{chance.randrange(9)}", chance.choice([1, 20])),
                    source_key=f"key{chance.randrange(6)}",
                )
                known.add(made.document_id)
            elif action == "delete":
                await client.delete(document_id, allow_missing=True)
                known.discard(document_id)
            else:
                await (client.cancel if action == "cancel" else client.retry)(document_id)

        async def behave() -> None:
            while asyncio.get_running_loop().time() < ends_at:
                with contextlib.suppress(ReadymarkClientError):
                    await act()
                await asyncio.sleep(chance.uniform(0.0, 0.1))

        async def destroy() -> None:
            for turn in ("worker", "postgres", "worker"):
                await asyncio.sleep(3)  # why: the next blow falls while they work
                if turn == "postgres":
                    # When one backend is killed, PostgreSQL ends all of them and recovers from its log.
                    pids = await rows.execute(
                        observer.pool, "SELECT pid FROM pg_stat_activity WHERE datname = 'readymark'"
                    )
                    os.kill(pids[0]["pid"], signal.SIGKILL)
                else:
                    workers.pop(0).kill()
                    workers.append(await asyncio.to_thread(cluster.worker))

        await asyncio.gather(destroy(), *(behave() for _ in range(12)))
        later = [(await client.submit(text_with(f"later{n}"))).document_id for n in range(10)]
        assert {outcome(document) for document in await client.wait(later, 60)} == {("READY", "")}

        async def is_settled() -> bool:
            return {status for status, _ in (await observer.pairs()).values()} <= {"READY", "FAILED"}

        await until(is_settled, 60)
        assert observer.illegal == set()
        found = {name: await rows.execute(observer.pool, statement) for name, statement in ORPHANS.items()}
        assert {name: orphans for name, orphans in found.items() if orphans} == {}
        await assert_files_are_there(cluster, observer.pool)


async def assert_files_are_there(cluster: Cluster, pool: Pool) -> None:
    """Every file that a row names is there and holds what its name says. More may lie there until the sweep."""
    folder = cluster.folder / "blobs"
    originals = await rows.execute(pool, "SELECT DISTINCT blob_sha256 AS sha256 FROM document_versions")
    for row in originals:
        content = (folder / "blobs" / row["sha256"][:2] / row["sha256"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == row["sha256"]
    for row in await rows.execute(pool, "SELECT file_key, file_sha256 FROM snapshots"):
        assert hashlib.sha256((folder / row["file_key"]).read_bytes()).hexdigest() == row["file_sha256"]
