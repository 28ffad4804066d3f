"""The worker over a real job table; the stages are scripted, everything else is real."""

from __future__ import annotations

import asyncio
import logging

import pytest

from services.ingest.lifecycle import STAGES, DocumentStatus
from services.ingest.repository import jobs
from services.ingest.repository.jobs import Lease
from shared.errors import DependencyUnavailableError, InvalidDocumentError, ResourceNotFoundError
from shared.postgres import Pool
from tests.support import rows
from tests.support.workers import ScriptedProcessing, running_worker, until


async def settled(pool: Pool, submitted: rows.Submitted) -> bool:
    return (await rows.job(pool, submitted.job_id))["status"] in ("SUCCEEDED", "FAILED")


async def is_running(pool: Pool, submitted: rows.Submitted) -> bool:
    return (await rows.job(pool, submitted.job_id))["status"] == "RUNNING"


async def test_j8_j10_a_job_that_always_fails_is_tried_max_attempts_times(pool: Pool) -> None:
    submitted = await rows.submit(pool, max_attempts=3, retry_delay_seconds=0)
    tried = []

    async def fail(lease: Lease) -> None:
        tried.append(lease.attempt)
        raise RuntimeError("secret path /srv/x")

    async with running_worker(pool, fail):
        await until(lambda: settled(pool, submitted))
    assert tried == [1, 2, 3]
    assert await rows.pair(pool, submitted) == ("FAILED", "FAILED")
    outcomes = [row["outcome"] for row in await rows.attempts(pool, submitted.job_id)]
    assert outcomes == ["RETRY_LATER", "RETRY_LATER", "FAILED"]
    row = await rows.version(pool, submitted.version_id)
    assert "/srv/x" not in row["error_message"]


@pytest.mark.parametrize(
    "error", [InvalidDocumentError("EMPTY_DOCUMENT"), ResourceNotFoundError("BLOB_MISSING")]
)
async def test_j8_a_permanent_error_ends_the_job_at_the_first_attempt(pool: Pool, error: Exception) -> None:
    submitted = await rows.submit(pool, max_attempts=5, retry_delay_seconds=0)

    async def fail(lease: Lease) -> None:
        await jobs.begin_stage(pool, lease, DocumentStatus.PARSING, trace_id=None)
        raise error

    async with running_worker(pool, fail):
        await until(lambda: settled(pool, submitted))
    row = await rows.version(pool, submitted.version_id)
    assert (row["status"], row["error_message"]) == ("FAILED", str(error))
    assert row["failure"]["stage"] == "PARSING"
    assert len(await rows.attempts(pool, submitted.job_id)) == 1


async def test_j9_a_job_that_failed_is_due_after_its_delay(pool: Pool) -> None:
    submitted = await rows.submit(pool, retry_delay_seconds=1000)

    async def fail(_: Lease) -> None:
        raise RuntimeError

    async def is_waiting() -> bool:
        return (await rows.job(pool, submitted.job_id))["locked_at"] is None and bool(
            await rows.attempts(pool, submitted.job_id)
        )

    async with running_worker(pool, fail):
        await until(is_waiting)
        (row,) = await rows.execute(
            pool,
            "SELECT extract(epoch FROM j.available_at - a.ended_at)::float AS delay_seconds "
            "FROM ingestion_jobs j JOIN ingestion_attempts a USING (job_id)",
        )
    # The cap of 300 seconds holds; jitter takes a fifth of it at most.
    assert 239 <= row["delay_seconds"] <= 301


async def test_one_failing_job_does_not_block_the_others(pool: Pool) -> None:
    bad = await rows.submit(pool, retry_delay_seconds=3600)
    good = [await rows.submit(pool) for _ in range(10)]

    async def process(lease: Lease) -> None:
        if lease.job_id == bad.job_id:
            raise RuntimeError
        await jobs.give_up(pool, lease, error_message="done", failure={"reason": "X"})

    async with running_worker(pool, process, slots=1):
        for submitted in good:
            await until(lambda submitted=submitted: settled(pool, submitted))  # type: ignore[misc]
    assert await rows.pair(pool, bad) == ("PENDING", "PENDING")


@pytest.mark.parametrize("stage", STAGES)
async def test_j15_a_worker_that_stops_hands_its_jobs_back_for_free(
    pool: Pool, stage: DocumentStatus
) -> None:
    """Cases O7, D10, Q18: in every stage, at once, without using up an attempt."""
    submitted = [await rows.submit(pool, max_attempts=1) for _ in range(3)]
    begun = asyncio.Semaphore(0)

    async def work_for_ever(lease: Lease) -> None:
        for passed in STAGES[: STAGES.index(stage) + 1]:
            await jobs.begin_stage(pool, lease, passed, trace_id=None)
        begun.release()
        await asyncio.Event().wait()

    async with running_worker(pool, work_for_ever) as worker:
        for _ in submitted:
            await begun.acquire()
        worker.stop()

        async def all_back() -> bool:
            return all([await rows.pair(pool, item) == ("PENDING", "PENDING") for item in submitted])

        await until(all_back, 2.0)
    for item in submitted:
        assert (await rows.job(pool, item.job_id))["attempts"] == 0


async def test_j15_a_stopping_worker_claims_nothing_more(pool: Pool) -> None:
    """Case Q15."""
    begun = asyncio.Event()

    async def work_for_ever(_: Lease) -> None:
        begun.set()
        await asyncio.Event().wait()

    await rows.submit(pool)
    async with running_worker(pool, work_for_ever, slots=8) as worker:
        await begun.wait()
        worker.stop()
        late = await rows.submit(pool)
        await rows.execute(pool, "NOTIFY readymark_jobs")
    assert await rows.pair(pool, late) == ("PENDING", "PENDING")
    assert await rows.attempts(pool, late.job_id) == []


async def test_an_error_that_the_cancellation_causes_is_a_hand_back_too(pool: Pool) -> None:
    submitted = await rows.submit(pool, max_attempts=1)
    begun = asyncio.Event()

    async def turns_cancellation_into_an_error(_: Lease) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as cancelled:
            raise DependencyUnavailableError("DATABASE_UNAVAILABLE") from cancelled

    async with running_worker(pool, turns_cancellation_into_an_error):
        await begun.wait()
    assert await rows.pair(pool, submitted) == ("PENDING", "PENDING")
    assert (await rows.job(pool, submitted.job_id))["attempts"] == 0


async def test_j8_a_failure_inside_a_task_group_is_a_failure_and_uses_up_its_attempt(pool: Pool) -> None:
    """A TaskGroup leaves its parent's cancellation count raised; that is not a stop of the worker."""
    submitted = await rows.submit(pool, max_attempts=2, retry_delay_seconds=0)

    async def fail() -> None:
        raise DependencyUnavailableError("EMBEDDER_UNAVAILABLE")

    async def embed_in_a_group(_: Lease) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                group.create_task(asyncio.sleep(60))  # why: cancelled by the failure of the other
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async with running_worker(pool, embed_in_a_group):
        await until(lambda: settled(pool, submitted))
    outcomes = [row["outcome"] for row in await rows.attempts(pool, submitted.job_id)]
    assert outcomes == ["RETRY_LATER", "FAILED"]


async def test_j4_a_job_longer_than_its_lease_keeps_it(pool: Pool) -> None:
    """Case Q4: five leases of work, one attempt, although others ask all the time."""
    submitted = await rows.submit(pool)
    done = asyncio.Event()

    async def long_work(lease: Lease) -> None:
        await asyncio.sleep(5.0)  # why: five leases of a second
        await jobs.give_up(pool, lease, error_message="done", failure={"reason": "X"})
        done.set()

    async with running_worker(pool, long_work, lease_seconds=1.0):
        await until(lambda: is_running(pool, submitted))
        while not done.is_set():
            claimed = await jobs.claim_ingestion_jobs(pool, worker="thief", lease_seconds=60, max_jobs=10)
            assert claimed == jobs.ClaimResult(0, ())
            await asyncio.sleep(0.05)
    assert len(await rows.attempts(pool, submitted.job_id)) == 1


async def test_j4_a_blocked_event_loop_does_not_stop_the_heartbeat(pool: Pool) -> None:
    """Case Q6, the half that a thread can promise: the loop hangs for three leases."""
    submitted = await rows.submit(pool)
    began = asyncio.Event()

    async def block_the_loop(_: Lease) -> None:
        import time

        began.set()
        time.sleep(3.0)  # noqa: ASYNC251  # why: three leases of a second, on the loop
        await asyncio.Event().wait()

    async with running_worker(pool, block_the_loop, lease_seconds=1.0):
        await until(lambda: is_running(pool, submitted))
        await began.wait()
        (row,) = await rows.execute(
            pool,
            "SELECT locked_at > now() - make_interval(secs => lease_seconds) AS alive FROM ingestion_jobs",
        )
        assert row["alive"]
    assert [row["outcome"] for row in await rows.attempts(pool, submitted.job_id)] == ["HANDED_BACK"]


async def test_j14_a_worker_that_lost_its_lease_stops_the_job_and_writes_nothing(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def work_for_ever(lease: Lease) -> None:
        await jobs.begin_stage(pool, lease, DocumentStatus.PARSING, trace_id=None)
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with running_worker(pool, work_for_ever, slots=1, beat_seconds=0.1):
        await begun.wait()
        # Somebody else takes over, as after a pause longer than the lease.
        await rows.execute(
            pool,
            "UPDATE ingestion_jobs SET lease_epoch = lease_epoch + 1, attempts = attempts + 1, "
            "locked_by = 'other'",
        )
        before = await rows.version(pool, submitted.version_id)
        async with asyncio.timeout(5):
            await cancelled.wait()
    row = await rows.job(pool, submitted.job_id)
    assert (row["status"], row["locked_by"], row["attempts"]) == ("RUNNING", "other", 2)
    assert await rows.version(pool, submitted.version_id) == before


async def test_a_lost_heartbeat_connection_does_not_lose_the_job(pool: Pool) -> None:
    """Case D44."""
    submitted = await rows.submit(pool)
    release = asyncio.Event()

    async def work(lease: Lease) -> None:
        await release.wait()
        await jobs.give_up(pool, lease, error_message="done", failure={"reason": "X"})

    async with running_worker(pool, work, lease_seconds=2.0, beat_seconds=0.2):
        await until(lambda: is_running(pool, submitted))

        async def killed() -> bool:
            return bool(
                await rows.execute(
                    pool,
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE application_name = 'worker-heartbeat'",
                )
            )

        await until(killed)
        before = (await rows.job(pool, submitted.job_id))["locked_at"]

        async def beaten() -> bool:
            return bool((await rows.job(pool, submitted.job_id))["locked_at"] > before)

        await until(beaten, 2.0)
        release.set()
        await until(lambda: settled(pool, submitted))
    assert len(await rows.attempts(pool, submitted.job_id)) == 1


async def test_while_something_it_needs_is_away_no_attempt_is_begun(pool: Pool) -> None:
    submitted = await rows.submit(pool, max_attempts=1)

    async def work(lease: Lease) -> None:
        await jobs.give_up(pool, lease, error_message="done", failure={"reason": "X"})

    processing = ScriptedProcessing(work)
    processing.available.clear()
    async with running_worker(pool, processing, poll_seconds=0.02):
        await asyncio.sleep(0.3)
        assert await rows.attempts(pool, submitted.job_id) == []
        processing.available.set()
        await until(lambda: settled(pool, submitted))


async def test_a_notification_wakes_the_worker_long_before_its_poll(pool: Pool) -> None:
    async def work(lease: Lease) -> None:
        await jobs.give_up(pool, lease, error_message="done", failure={"reason": "X"})

    async with running_worker(pool, work, poll_seconds=30):

        async def listening() -> bool:
            return bool(
                await rows.execute(
                    pool,
                    "SELECT pid FROM pg_stat_activity WHERE application_name = 'worker-listen' "
                    "AND query LIKE 'LISTEN%%' AND state = 'idle'",
                )
            )

        await until(listening)
        submitted = await rows.submit(pool)
        await rows.execute(pool, "NOTIFY readymark_jobs")
        await until(lambda: settled(pool, submitted), 5.0)


async def test_a_failure_that_cannot_be_written_now_is_written_when_the_database_is_back(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    submitted = await rows.submit(pool, max_attempts=1)

    async def kill_every_connection_and_fail(_: Lease) -> None:
        await rows.execute(
            pool,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND datname = current_database()",
        )
        raise InvalidDocumentError("EMPTY_DOCUMENT")

    with caplog.at_level(logging.WARNING):
        async with running_worker(pool, kill_every_connection_and_fail):
            await until(lambda: settled(pool, submitted))
    assert await rows.pair(pool, submitted) == ("FAILED", "FAILED")


async def test_j2_j11_many_workers_many_jobs_no_reader_sees_an_illegal_pair(pool: Pool) -> None:
    submitted = [await rows.submit(pool, retry_delay_seconds=0) for _ in range(40)]
    active: set[int] = set()

    async def process(lease: Lease) -> None:
        assert lease.job_id not in active, "a job ran twice at once"
        active.add(lease.job_id)
        try:
            for stage in STAGES:
                await jobs.begin_stage(pool, lease, stage, trace_id=None)
            if lease.attempt < 3:
                raise RuntimeError
            await jobs.give_up(pool, lease, error_message="done", failure={"reason": "X"})
        finally:
            active.discard(lease.job_id)

    seen: set[tuple[str, str]] = set()

    async def all_settled() -> bool:
        found = await rows.execute(
            pool,
            "SELECT v.status AS document, j.status AS job "
            "FROM document_versions v JOIN ingestion_jobs j USING (version_id)",
        )
        pairs = {(row["document"], row["job"]) for row in found}
        seen.update(pairs)
        return pairs == {("FAILED", "FAILED")}

    async with running_worker(pool, process, name="w1"), running_worker(pool, process, name="w2"):
        await until(all_settled, 60)
    from services.ingest.lifecycle import LEGAL_PAIRS

    assert seen <= {(str(document), str(job)) for document, job in LEGAL_PAIRS}
    for item in submitted:
        assert (await rows.job(pool, item.job_id))["attempts"] == 3
