"""The job table under its rules, on a real PostgreSQL. Each test names the rule it would catch broken."""

from __future__ import annotations

import asyncio
import datetime
import inspect
import re
from pathlib import Path

import psycopg
import pytest

from services.ingest import lifecycle
from services.ingest.lifecycle import STAGES, UNFINISHED, DocumentStatus
from services.ingest.repository import documents, jobs, publication, sweeping
from services.ingest.repository.jobs import Lease
from shared.errors import LeaseLostError
from shared.postgres import Pool
from tests.support import rows

FAILURE = {
    "code": "INTERNAL",
    "reason": "INTERNAL",
    "parameters": {},
    "attempt": 1,
    "max_attempts": 3,
    "retryable": True,
}


async def begin(pool: Pool, lease: Lease, upto: DocumentStatus) -> None:
    for stage in STAGES[: STAGES.index(upto) + 1]:
        await jobs.begin_stage(pool, lease, stage, trace_id=None)


async def claim_all(pool: Pool, max_jobs: int = 100) -> jobs.ClaimResult:
    return await jobs.claim_ingestion_jobs(pool, worker="other", lease_seconds=60, max_jobs=max_jobs)


async def test_j3_a_claim_sets_running_counts_the_attempt_and_leaves_the_document_pending(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool, worker="w1", lease_seconds=7)
    row = await rows.job(pool, submitted.job_id)
    assert (row["status"], row["attempts"], row["locked_by"], row["lease_epoch"]) == ("RUNNING", 1, "w1", 1)
    assert row["lease_seconds"] == 7
    assert await rows.pair(pool, submitted) == ("PENDING", "RUNNING")
    assert (lease.attempt, lease.lease_epoch, lease.version_id) == (1, 1, submitted.version_id)


async def test_j2_a_job_is_not_claimed_before_it_is_available(pool: Pool) -> None:
    submitted = await rows.submit(pool, available_in_seconds=3600)
    assert (await claim_all(pool)).leases == ()
    await rows.execute(
        pool, "UPDATE ingestion_jobs SET available_at = now() WHERE job_id = %s", submitted.job_id
    )
    assert len((await claim_all(pool)).leases) == 1


async def test_j2_a_running_job_is_not_claimed_while_its_lease_lasts(pool: Pool) -> None:
    await rows.submit(pool)
    await rows.claim(pool)
    assert await claim_all(pool) == jobs.ClaimResult(0, ())


async def test_j2_a_job_without_attempts_left_is_not_claimed(pool: Pool) -> None:
    submitted = await rows.submit(pool, max_attempts=1)
    await rows.execute(pool, "UPDATE ingestion_jobs SET attempts = 1 WHERE job_id = %s", submitted.job_id)
    assert (await claim_all(pool)).leases == ()


@pytest.mark.parametrize("stage", UNFINISHED)
async def test_j5_j3_an_expired_lease_is_claimed_again_from_every_stage(
    pool: Pool, stage: DocumentStatus
) -> None:
    submitted = await rows.submit(pool)
    await rows.claim(pool)
    await rows.set_status(pool, submitted, stage, "RUNNING")
    await rows.expire_lease(pool, submitted.job_id)
    lease = await rows.claim(pool, worker="w2")
    assert (lease.attempt, lease.lease_epoch) == (2, 2)
    assert await claim_all(pool) == jobs.ClaimResult(0, ()), "the new lease begins now"
    assert await rows.pair(pool, submitted) == ("PENDING", "RUNNING")
    first, second = await rows.attempts(pool, submitted.job_id)
    assert (first["outcome"], second["outcome"]) == ("LEASE_EXPIRED", "RUNNING")


async def test_j2_many_workers_claim_each_job_once_and_without_waiting(pool: Pool) -> None:
    for _ in range(60):
        await rows.submit(pool)

    async def claim_until_empty(worker: int) -> list[int]:
        taken: list[int] = []
        while True:
            result = await jobs.claim_ingestion_jobs(pool, worker=f"w{worker}", lease_seconds=60, max_jobs=3)
            if not result.leases:
                return taken
            assert len(result.leases) <= 3
            taken += [lease.job_id for lease in result.leases]

    taken = await asyncio.gather(*(claim_until_empty(worker) for worker in range(12)))
    everything = [job for part in taken for job in part]
    assert len(everything) == len(set(everything)) == 60


async def test_j2_a_claim_does_not_wait_for_a_row_that_somebody_locks(pool: Pool) -> None:
    locked = await rows.submit(pool)
    free = await rows.submit(pool)
    async with pool.connection() as connection, connection.transaction():
        await connection.execute("SELECT FROM ingestion_jobs WHERE job_id = %s FOR UPDATE", (locked.job_id,))
        async with asyncio.timeout(5):
            result = await claim_all(pool)
    assert [lease.job_id for lease in result.leases] == [free.job_id]


async def test_j4_a_heartbeat_renews_the_lease(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool)
    await rows.execute(pool, "UPDATE ingestion_jobs SET locked_at = now() - interval '50 s'")
    async with pool.connection() as connection:
        (renewal,) = await jobs.renew_leases(connection, [(lease.job_id, lease.lease_epoch)])
    assert (renewal.is_renewed, renewal.is_held) == (True, True)
    (row,) = await rows.execute(
        pool, "SELECT now() - locked_at AS age FROM ingestion_jobs WHERE job_id = %s", submitted.job_id
    )
    assert row["age"] < datetime.timedelta(seconds=5)


async def test_j4_heartbeats_are_hot_updates(pool: Pool) -> None:
    # Only a fraction of a page is free at first: enough beats show whether an index forbids HOT.
    await rows.submit(pool)
    lease = await rows.claim(pool)
    async with pool.connection() as connection:
        before = await _update_counts(connection)
        for _ in range(200):
            await jobs.renew_leases(connection, [(lease.job_id, lease.lease_epoch)])
        after = await _update_counts(connection)
    updates, hot = after[0] - before[0], after[1] - before[1]
    assert updates == 200
    assert hot >= 0.9 * updates


async def _update_counts(connection: object) -> tuple[int, int]:
    await connection.execute("SELECT pg_stat_force_next_flush()")  # type: ignore[attr-defined]
    cursor = await connection.execute(  # type: ignore[attr-defined]
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'ingestion_jobs'"
    )
    row = await cursor.fetchone()
    return row["n_tup_upd"], row["n_tup_hot_upd"]


async def test_j14_a_late_heartbeat_does_not_steal_the_lease_back(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    old = await rows.claim(pool)
    await rows.expire_lease(pool, submitted.job_id)
    new = await rows.claim(pool, worker="w2")
    before = await rows.job(pool, submitted.job_id)
    async with pool.connection() as connection:
        (late,) = await jobs.renew_leases(connection, [(old.job_id, old.lease_epoch)])
        assert (late.is_renewed, late.is_held) == (False, False)
        assert await rows.job(pool, submitted.job_id) == before
        (good,) = await jobs.renew_leases(connection, [(new.job_id, new.lease_epoch)])
    assert good.is_renewed


async def test_j4_a_row_that_its_own_write_locks_does_not_stall_the_other_heartbeats(pool: Pool) -> None:
    busy, other = await rows.submit(pool), await rows.submit(pool)
    result = await claim_all(pool)
    leases = {lease.job_id: lease for lease in result.leases}
    async with jobs.fenced(pool, leases[busy.job_id]), pool.connection() as beating, asyncio.timeout(5):
        renewals = await jobs.renew_leases(
            beating, [(lease.job_id, lease.lease_epoch) for lease in result.leases]
        )
    shown = {renewal.job_id: (renewal.is_renewed, renewal.is_held) for renewal in renewals}
    assert shown == {busy.job_id: (False, True), other.job_id: (True, True)}


@pytest.mark.parametrize("stage", STAGES)
async def test_d2_j11_a_stage_is_committed_and_changes_only_the_document(
    pool: Pool, stage: DocumentStatus
) -> None:
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool)
    await begin(pool, lease, stage)
    assert await rows.pair(pool, submitted) == (stage, "RUNNING")
    (attempt,) = await rows.attempts(pool, submitted.job_id)
    assert attempt["last_stage"] == stage
    assert [entry["stage"] for entry in attempt["stages"]] == list(STAGES[: STAGES.index(stage) + 1])


async def test_d2_a_stage_cannot_be_skipped(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool)
    for stage in (DocumentStatus.CHUNKING, DocumentStatus.INDEXING):
        with pytest.raises(AssertionError):
            await jobs.begin_stage(pool, lease, stage, trace_id=None)
    assert await rows.pair(pool, submitted) == ("PENDING", "RUNNING")


async def test_j17_embedding_may_follow_pending_directly(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool)
    await jobs.begin_stage(pool, lease, DocumentStatus.EMBEDDING, trace_id=None)
    assert await rows.pair(pool, submitted) == ("EMBEDDING", "RUNNING")


async def test_d5_a_new_stage_clears_the_error_of_the_last_attempt(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool)
    await begin(pool, lease, DocumentStatus.PARSING)
    await jobs.retry_later(pool, lease, delay_seconds=0, error_message="Attempt 1 failed", failure=FAILURE)
    row = await rows.version(pool, submitted.version_id)
    assert row["error_message"] == "Attempt 1 failed"
    assert row["failure"]["stage"] == "PARSING"
    second = await rows.claim(pool)
    await begin(pool, second, DocumentStatus.PARSING)
    row = await rows.version(pool, submitted.version_id)
    assert (row["error_message"], row["failure"]) == (None, None)


@pytest.mark.parametrize("status", [*STAGES, DocumentStatus.READY])
async def test_d5_the_database_refuses_an_error_beside_a_running_stage(
    pool: Pool, status: DocumentStatus
) -> None:
    submitted = await rows.submit(pool)
    await rows.set_status(pool, submitted, status, "SUCCEEDED" if status == "READY" else "RUNNING")
    with pytest.raises(psycopg.errors.CheckViolation, match="no_stale_error"):
        await rows.execute(pool, "UPDATE document_versions SET error_message = 'old', failure = '{}'")


async def test_d4_the_database_refuses_failed_without_a_reason(pool: Pool) -> None:
    await rows.submit(pool)
    with pytest.raises(psycopg.errors.CheckViolation, match="failed_says_why"):
        await rows.execute(pool, "UPDATE document_versions SET status = 'FAILED'")


@pytest.mark.parametrize("stage", UNFINISHED)
async def test_j8_j11_j16_a_temporary_failure_makes_both_pending_after_the_delay(
    pool: Pool, stage: DocumentStatus
) -> None:
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool)
    await rows.set_status(pool, submitted, stage, "RUNNING")
    await jobs.retry_later(pool, lease, delay_seconds=40, error_message="later", failure=FAILURE)
    assert await rows.pair(pool, submitted) == ("PENDING", "PENDING")
    row = await rows.job(pool, submitted.job_id)
    assert (row["locked_at"], row["attempts"]) == (None, 1)
    (wait,) = await rows.execute(pool, "SELECT available_at - now() AS wait FROM ingestion_jobs")
    assert datetime.timedelta(seconds=35) < wait["wait"] <= datetime.timedelta(seconds=40)
    assert (await claim_all(pool)).leases == ()
    (attempt,) = await rows.attempts(pool, submitted.job_id)
    assert (attempt["outcome"], attempt["failure"]["stage"]) == ("RETRY_LATER", stage)
    assert attempt["failure"]["next_attempt_at"] is not None


async def test_j8_the_last_attempt_cannot_be_put_off(pool: Pool) -> None:
    """Else it would wait PENDING for a claim that takes no job without attempts left."""
    submitted = await rows.submit(pool, max_attempts=1)
    lease = await rows.claim(pool)
    with pytest.raises(AssertionError):
        await jobs.retry_later(pool, lease, delay_seconds=0, error_message="later", failure=FAILURE)
    assert await rows.pair(pool, submitted) == ("PENDING", "RUNNING")


@pytest.mark.parametrize("stage", UNFINISHED)
async def test_j10_j11_j16_giving_up_makes_both_failed_with_the_reason(
    pool: Pool, stage: DocumentStatus
) -> None:
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool)
    await rows.set_status(pool, submitted, stage, "RUNNING")
    await jobs.give_up(pool, lease, error_message="The PDF is damaged", failure=FAILURE)
    assert await rows.pair(pool, submitted) == ("FAILED", "FAILED")
    row = await rows.version(pool, submitted.version_id)
    assert (row["error_message"], row["failure"]["stage"]) == ("The PDF is damaged", stage)
    (attempt,) = await rows.attempts(pool, submitted.job_id)
    assert (attempt["outcome"], attempt["number"], attempt["worker"]) == ("FAILED", 1, "worker-1")
    assert attempt["ended_at"] >= attempt["started_at"]


@pytest.mark.parametrize("stage", UNFINISHED)
async def test_j15_a_hand_back_is_due_at_once_and_free(pool: Pool, stage: DocumentStatus) -> None:
    submitted = await rows.submit(pool, max_attempts=1)
    for round_number in range(1, 6):
        lease = await rows.claim(pool)
        assert (lease.attempt, lease.lease_epoch) == (1, round_number)
        await rows.set_status(pool, submitted, stage, "RUNNING")
        await jobs.hand_back(pool, lease)
        assert await rows.pair(pool, submitted) == ("PENDING", "PENDING")
        assert (await rows.job(pool, submitted.job_id))["attempts"] == 0
    assert {row["outcome"] for row in await rows.attempts(pool, submitted.job_id)} == {"HANDED_BACK"}


@pytest.mark.parametrize("stage", UNFINISHED)
async def test_j12_j16_an_expired_job_without_attempts_left_fails_and_that_call_claims_nothing(
    pool: Pool, stage: DocumentStatus
) -> None:
    submitted = await rows.submit(pool, max_attempts=1)
    waiting = await rows.submit(pool, available_in_seconds=3600)
    await rows.claim(pool)
    await rows.set_status(pool, submitted, stage, "RUNNING")
    await rows.expire_lease(pool, submitted.job_id)
    await rows.execute(
        pool, "UPDATE ingestion_jobs SET available_at = now() WHERE job_id = %s", waiting.job_id
    )
    first = await claim_all(pool)
    assert (first.converged, first.leases) == (1, ())
    assert await rows.pair(pool, submitted) == ("FAILED", "FAILED")
    row = await rows.version(pool, submitted.version_id)
    assert row["error_message"].startswith(
        "The worker's lease expired and the maximum number of attempts was reached"
    )
    assert (row["failure"]["reason"], row["failure"]["stage"]) == ("LEASE_EXPIRED", stage)
    (attempt,) = await rows.attempts(pool, submitted.job_id)
    assert attempt["outcome"] == "LEASE_EXPIRED"
    second = await claim_all(pool)
    assert [lease.job_id for lease in second.leases] == [waiting.job_id]


async def test_j12_one_call_settles_many_so_that_dead_jobs_do_not_delay_live_ones(pool: Pool) -> None:
    for _ in range(30):
        await rows.submit(pool, max_attempts=1)
    await claim_all(pool)
    await rows.execute(pool, "UPDATE ingestion_jobs SET locked_at = now() - interval '1 hour'")
    live = await rows.submit(pool)
    assert (await claim_all(pool)).converged == 30
    assert [lease.job_id for lease in (await claim_all(pool)).leases] == [live.job_id]


@pytest.mark.parametrize(("attempts", "max_attempts"), [(1, 1), (1, 3)])
async def test_j12_j13_a_ready_document_with_an_expired_job_becomes_succeeded_and_stays_ready(
    pool: Pool, attempts: int, max_attempts: int
) -> None:
    submitted = await rows.submit(pool, max_attempts=max_attempts)
    await rows.claim(pool)
    await rows.set_status(pool, submitted, "READY", "RUNNING")
    before = await rows.version(pool, submitted.version_id)
    assert await claim_all(pool) == jobs.ClaimResult(0, ())
    await rows.expire_lease(pool, submitted.job_id)
    assert (await claim_all(pool)).converged == 1
    assert await rows.pair(pool, submitted) == ("READY", "SUCCEEDED")
    assert await rows.version(pool, submitted.version_id) == before
    assert await claim_all(pool) == jobs.ClaimResult(0, ())


async def test_j13_the_claim_itself_passes_a_ready_document_by(pool: Pool) -> None:
    """Its lease may expire just after the look that settles: the claim must not count on that look."""
    submitted = await rows.submit(pool)
    await rows.claim(pool)
    await rows.set_status(pool, submitted, "READY", "RUNNING")
    await rows.expire_lease(pool, submitted.job_id)
    before = await rows.job(pool, submitted.job_id)
    async with pool.connection() as connection:
        cursor = await connection.execute(
            jobs.statements.claim_ingestion_jobs, {"worker": "w", "lease_seconds": 60, "max_jobs": 10}
        )
        assert await cursor.fetchall() == []
    assert await rows.job(pool, submitted.job_id) == before


async def test_j12_a_job_that_ends_while_it_is_being_settled_is_left_alone(pool: Pool) -> None:
    """Case Q1: the sweep must check again after it waited for the row."""
    submitted = await rows.submit(pool, max_attempts=1)
    lease = await rows.claim(pool)
    await rows.expire_lease(pool, submitted.job_id)
    async with jobs.fenced(pool, lease):
        # The worker is writing: its row is locked, the sweep goes past it.
        assert await claim_all(pool) == jobs.ClaimResult(0, ())
    # The write renewed the lease.
    assert await claim_all(pool) == jobs.ClaimResult(0, ())
    assert await rows.pair(pool, submitted) == ("PENDING", "RUNNING")


async def zombie(pool: Pool, how: str) -> tuple[rows.Submitted, Lease]:
    """Returns a document and the lease of a worker that has lost it, in one of all the ways."""
    submitted = await rows.submit(pool)
    old = await rows.claim(pool, worker="sleeper")
    await begin(pool, old, DocumentStatus.EMBEDDING)
    if how == "claimed by another":
        await rows.expire_lease(pool, submitted.job_id)
        new = await rows.claim(pool, worker="other")
        await begin(pool, new, DocumentStatus.EMBEDDING)
    elif how == "claimed again under the same worker name":
        await rows.expire_lease(pool, submitted.job_id)
        await rows.claim(pool, worker="sleeper")
    elif how == "handed back and claimed with the same attempt number":
        await jobs.hand_back(pool, old)
        await rows.claim(pool, worker="other")
    elif how == "waiting for a retry":
        await jobs.retry_later(pool, old, delay_seconds=60, error_message="later", failure=FAILURE)
    elif how == "failed":
        await jobs.give_up(pool, old, error_message="failed", failure=FAILURE)
    elif how == "deleted":
        await rows.execute(pool, "DELETE FROM documents")
    return submitted, old


WAYS_TO_LOSE = [
    "claimed by another",
    "claimed again under the same worker name",
    "handed back and claimed with the same attempt number",
    "waiting for a retry",
    "failed",
    "deleted",
]


@pytest.mark.parametrize("how", WAYS_TO_LOSE)
async def test_j14_a_worker_that_lost_its_lease_changes_nothing(pool: Pool, how: str) -> None:
    _, old = await zombie(pool, how)

    async def everything() -> list[list[dict[str, object]]]:
        tables = ("ingestion_jobs", "document_versions", "ingestion_attempts", "documents")
        return [await rows.execute(pool, f"SELECT * FROM {table} ORDER BY 1, 2") for table in tables]

    before = await everything()
    for stage in STAGES:
        with pytest.raises(LeaseLostError):
            await jobs.begin_stage(pool, old, stage, trace_id=None)
    with pytest.raises(LeaseLostError):
        await jobs.report_progress(pool, old, done=1, total=2, unit="chunks")
    with pytest.raises(LeaseLostError):
        await jobs.retry_later(pool, old, delay_seconds=0, error_message="x", failure=FAILURE)
    with pytest.raises(LeaseLostError):
        await jobs.give_up(pool, old, error_message="x", failure=FAILURE)
    with pytest.raises(LeaseLostError):
        await jobs.hand_back(pool, old)
    with pytest.raises(LeaseLostError):
        async with jobs.fenced(pool, old):
            pytest.fail("a lost lease opened a transaction")
    assert await everything() == before


async def test_j14_nobody_claims_a_job_while_its_holder_writes(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool)
    await rows.expire_lease(pool, submitted.job_id)
    async with jobs.fenced(pool, lease):
        assert (await claim_all(pool)).leases == ()
    # Holding it renewed it, so it is not expired any more.
    assert (await claim_all(pool)).leases == ()


async def test_j14_the_epoch_never_goes_back(pool: Pool) -> None:
    await rows.submit(pool, max_attempts=50)
    epochs = []
    for ending in (jobs.hand_back, None, jobs.hand_back, None):
        lease = await rows.claim(pool)
        epochs.append(lease.lease_epoch)
        if ending is not None:
            await ending(pool, lease)
        else:
            await jobs.retry_later(pool, lease, delay_seconds=0, error_message="x", failure=FAILURE)
    assert epochs == [1, 2, 3, 4]


def test_j6_a_worker_sends_no_moment_of_its_own() -> None:
    """Durations and identities go to the database, never a point in time; and no clock of the
    machine's is read by what decides (monotonic time, a duration, is allowed)."""
    for name in jobs.statements.names:
        sent = set(re.findall(r"%\((\w+)\)s", getattr(jobs.statements, name).decode()))
        assert sent <= {
            "attempt", "code", "delay_seconds", "document_from", "document_to", "done", "error_message", "failure",
            "job_from", "job_id", "job_ids", "lease_epoch", "lease_epochs", "lease_seconds", "max_jobs", "reason",
            "total", "trace_id", "unit", "worker",
        }  # fmt: skip
    for written in (publication.statements, documents.statements, sweeping.statements):
        for name in written.names:
            sent = re.findall(r"%\((\w+)\)s", getattr(written, name).decode())
            assert not [parameter for parameter in sent if parameter.endswith(("_at", "now"))], name
    folder = Path(inspect.getfile(lifecycle)).parent
    for file in [*folder.glob("*.py"), *folder.glob("repository/*.py")]:
        text = file.read_text(encoding="utf-8")
        if file.name not in {"blobs.py", "wire.py", "watching.py", "servicer.py"}:
            assert not re.search(r"\btime\.time\(|datetime\.now\(|utcnow\(|fromtimestamp\(", text), file.name


async def test_j16_every_attempt_leaves_a_row(pool: Pool) -> None:
    submitted = await rows.submit(pool, max_attempts=3)
    first = await rows.claim(pool, worker="w1")
    await begin(pool, first, DocumentStatus.CHUNKING)
    await jobs.retry_later(pool, first, delay_seconds=0, error_message="x", failure=FAILURE)
    second = await rows.claim(pool, worker="w2")
    await jobs.hand_back(pool, second)
    third = await rows.claim(pool, worker="w3")
    await begin(pool, third, DocumentStatus.PARSING)
    await rows.expire_lease(pool, submitted.job_id)
    last = await rows.claim(pool, worker="w4")
    await jobs.give_up(pool, last, error_message="x", failure=FAILURE)
    told = [
        (row["number"], row["worker"], row["last_stage"], row["outcome"])
        for row in await rows.attempts(pool, submitted.job_id)
    ]
    assert told == [
        (1, "w1", "CHUNKING", "RETRY_LATER"),
        (2, "w2", "PENDING", "HANDED_BACK"),
        (2, "w3", "PARSING", "LEASE_EXPIRED"),
        (3, "w4", "PENDING", "FAILED"),
    ]


async def test_at_most_one_live_job_a_version(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    with pytest.raises(psycopg.errors.UniqueViolation, match="ingestion_jobs_one_live"):
        await rows.execute(
            pool,
            "INSERT INTO ingestion_jobs (version_id, tenant_id, status, max_attempts, retry_delay_seconds, lease_seconds) "
            "SELECT version_id, tenant_id, 'PENDING', 3, 1, 1 FROM ingestion_jobs WHERE job_id = %s",
            submitted.job_id,
        )


async def test_j11_every_statement_writes_both_statuses_or_none(pool: Pool) -> None:
    """A transition whose document does not stand where it must leaves the job untouched too."""
    submitted = await rows.submit(pool)
    lease = await rows.claim(pool)
    await rows.set_status(pool, submitted, "READY", "RUNNING")
    before = await rows.job(pool, submitted.job_id)
    for write in (
        jobs.hand_back(pool, lease),
        jobs.give_up(pool, lease, error_message="x", failure=FAILURE),
        jobs.retry_later(pool, lease, delay_seconds=1, error_message="x", failure=FAILURE),
    ):
        with pytest.raises(AssertionError):
            await write
    assert await rows.job(pool, submitted.job_id) == before
    assert await rows.pair(pool, submitted) == ("READY", "RUNNING")


async def test_the_claim_uses_its_two_small_indexes_however_many_jobs_are_finished(pool: Pool) -> None:
    submitted = await rows.submit(pool)
    await rows.execute(
        pool,
        "INSERT INTO document_versions (document_id, collection_id, number, status, blob_sha256, size_bytes, ready_at, chunk_count) "
        "SELECT document_id, collection_id, n + 1, 'READY', blob_sha256, 1, now(), 1 "
        "FROM document_versions, generate_series(1, 20000) n WHERE version_id = %s",
        submitted.version_id,
    )
    await rows.execute(
        pool,
        "INSERT INTO ingestion_jobs (version_id, tenant_id, status, max_attempts, retry_delay_seconds, lease_seconds, "
        "finished_at, available_at) SELECT version_id, 1, "
        "CASE WHEN number %% 20 = 0 THEN 'PENDING' ELSE 'SUCCEEDED' END, 3, 1, 60, "
        "CASE WHEN number %% 20 = 0 THEN NULL ELSE now() END, "
        "now() + CASE WHEN number %% 40 = 0 THEN interval '1 day' ELSE interval '-1 s' END "
        "FROM document_versions WHERE number > 1",
    )
    async with pool.connection() as connection:
        await connection.set_autocommit(True)
        await connection.execute("SELECT 1")
        cursor = await connection.execute(
            b"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, BUFFERS OFF, SUMMARY OFF) "
            + jobs.statements.claim_ingestion_jobs,
            {"worker": "w", "lease_seconds": 60, "max_jobs": 10},
        )
        plan = "\n".join(next(iter(row.values())) for row in await cursor.fetchall())
    due = plan[plan.index("CTE due") : plan.index("CTE claimed")]
    assert "ingestion_jobs_due" in due
    assert "Sort" not in due
    assert "Seq Scan on ingestion_jobs" not in plan
    assert "ingestion_jobs_running" in plan


def test_statuses_in_the_statements_come_from_the_table() -> None:
    text = jobs.statements.retry_later.decode()
    for status in lifecycle.RETRY_LATER.document_from:
        assert f"'{status}'" in text
    assert "{{" not in text
