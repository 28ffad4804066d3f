-- Everything a worker does to a job, each in one statement and so in one transaction.
-- Of all statements here: the clock is the database's; predicates use now() (an index bound),
-- stamps use clock_timestamp(); a worker's write names its lease epoch; locks are taken in
-- the order job, version, document; statuses come from lifecycle.py.
-- A move runs by itself, without BEGIN and COMMIT around it: a worker that is stopped or cut off
-- in between must not keep rows locked. Its last line fails, and so undoes, a move that would
-- change one status without the other (rule J11).

-- name: converge_expired
-- Rules J12 and J13. The predicates are checked again in the UPDATE: between the look and
-- the lock somebody may have finished or renewed the job.
WITH expired AS MATERIALIZED (
  SELECT j.job_id
  FROM ingestion_jobs j JOIN document_versions v USING (version_id)
  WHERE j.status IN {{CONVERGE_FAILED.job_from}}
    AND j.locked_at <= now() - make_interval(secs => j.lease_seconds)
    AND (j.attempts >= j.max_attempts OR v.status IN {{CONVERGE_READY.document_from}})
  ORDER BY j.job_id
  LIMIT %(max_jobs)s
  FOR UPDATE OF j SKIP LOCKED
), finished AS (
  UPDATE ingestion_jobs j
  SET status = CASE WHEN v.status IN {{CONVERGE_READY.document_from}}
                    THEN {{CONVERGE_READY.job_to}} ELSE {{CONVERGE_FAILED.job_to}} END,
      finished_at = clock_timestamp(), locked_at = NULL, locked_by = NULL
  FROM expired, document_versions v
  WHERE j.job_id = expired.job_id AND v.version_id = j.version_id
    AND j.status IN {{CONVERGE_FAILED.job_from}}
    AND j.locked_at <= now() - make_interval(secs => j.lease_seconds)
    AND (j.attempts >= j.max_attempts OR v.status IN {{CONVERGE_READY.document_from}})
  RETURNING j.job_id, j.version_id, j.lease_epoch, j.attempts, j.max_attempts,
            v.status AS stage, v.status IN {{CONVERGE_READY.document_from}} AS is_ready
), explained AS (
  SELECT finished.*, jsonb_build_object(
    'code', %(code)s::text, 'reason', %(reason)s::text, 'parameters', '{}'::jsonb, 'stage', stage,
    'attempt', attempts, 'max_attempts', max_attempts, 'retryable', false,
    'occurred_at', to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'),
    'next_attempt_at', NULL) AS failure
  FROM finished
), failed AS (
  UPDATE document_versions v
  SET status = {{CONVERGE_FAILED.document_to}}, error_message = %(error_message)s, failure = e.failure,
      updated_at = clock_timestamp(), revision = revision + 1, changed_xid = pg_current_xact_id()
  FROM explained e
  WHERE v.version_id = e.version_id AND NOT e.is_ready AND v.status IN {{CONVERGE_FAILED.document_from}}
), closed AS (
  UPDATE ingestion_attempts a
  SET outcome = CASE WHEN e.is_ready THEN {{Outcome.SUCCEEDED}} ELSE {{Outcome.LEASE_EXPIRED}} END,
      failure = CASE WHEN e.is_ready THEN NULL ELSE e.failure END, ended_at = clock_timestamp()
  FROM explained e
  WHERE a.job_id = e.job_id AND a.lease_epoch = e.lease_epoch AND a.outcome = {{Outcome.RUNNING}}
)
SELECT job_id, version_id, is_ready FROM finished

-- name: claim_ingestion_jobs
-- Rules J2 and J3. MATERIALIZED: a merged sub-select may lock and update more than LIMIT.
-- Expired leases first: their documents have waited longest. A READY document is never
-- processed again (J13); converge_expired settles it.
WITH expired AS MATERIALIZED (
  SELECT j.job_id
  FROM ingestion_jobs j JOIN document_versions v USING (version_id)
  WHERE j.status = 'RUNNING' AND j.locked_at <= now() - make_interval(secs => j.lease_seconds)
    AND j.attempts < j.max_attempts AND v.status IN {{CLAIM.document_from}}
  ORDER BY j.job_id
  LIMIT %(max_jobs)s
  FOR UPDATE OF j SKIP LOCKED
), due AS MATERIALIZED (
  SELECT j.job_id
  FROM ingestion_jobs j
  WHERE j.status = 'PENDING' AND j.available_at <= now() AND j.attempts < j.max_attempts
  ORDER BY j.priority, j.available_at, j.job_id
  LIMIT greatest(%(max_jobs)s - (SELECT count(*) FROM expired), 0)
  FOR UPDATE OF j SKIP LOCKED
), claimed AS (
  UPDATE ingestion_jobs j
  SET status = {{CLAIM.job_to}}, attempts = attempts + 1, lease_epoch = lease_epoch + 1,
      locked_at = clock_timestamp(), locked_by = %(worker)s, lease_seconds = %(lease_seconds)s
  FROM (SELECT job_id FROM expired UNION ALL SELECT job_id FROM due) picked
  WHERE j.job_id = picked.job_id AND j.attempts < j.max_attempts
    AND ((j.status = 'PENDING' AND j.available_at <= now())
      OR (j.status = 'RUNNING' AND j.locked_at <= now() - make_interval(secs => j.lease_seconds)))
  RETURNING j.*
), lost AS (
  UPDATE ingestion_attempts a
  SET outcome = {{Outcome.LEASE_EXPIRED}}, ended_at = clock_timestamp()
  FROM claimed c
  WHERE a.job_id = c.job_id AND a.lease_epoch < c.lease_epoch AND a.outcome = {{Outcome.RUNNING}}
), started AS (
  INSERT INTO ingestion_attempts (job_id, lease_epoch, version_id, number, worker, started_at, outcome)
  SELECT job_id, lease_epoch, version_id, attempts, %(worker)s, clock_timestamp(), {{Outcome.RUNNING}}
  FROM claimed
), restarted AS (
  UPDATE document_versions v
  SET status = {{CLAIM.document_to}}, progress_done = 0, progress_total = 0, progress_unit = '',
      updated_at = clock_timestamp(), revision = revision + 1, changed_xid = pg_current_xact_id()
  FROM claimed c
  WHERE v.version_id = c.version_id AND v.status IN {{CLAIM.document_from}}
  RETURNING v.*
)
SELECT c.job_id, c.lease_epoch, c.attempts, c.max_attempts, c.lease_seconds, c.retry_delay_seconds,
       c.traceparent, c.tracestate, v.version_id, v.number, v.document_id, v.collection_id, v.blob_sha256,
       v.size_bytes, v.declared_media_type, d.display_name
FROM claimed c JOIN restarted v USING (version_id) JOIN documents d USING (document_id)
ORDER BY c.job_id

-- name: renew_leases
-- SKIP LOCKED: a row that its own worker is writing at this moment must not stall the others.
-- Such a row is `held` but not renewed; the write that locks it renews it.
WITH wanted AS (
  SELECT * FROM unnest(%(job_ids)s::bigint[], %(lease_epochs)s::bigint[]) AS w (job_id, lease_epoch)
), held AS MATERIALIZED (
  SELECT j.job_id
  FROM ingestion_jobs j JOIN wanted w USING (job_id, lease_epoch)
  WHERE j.status = 'RUNNING'
  FOR NO KEY UPDATE OF j SKIP LOCKED
), renewed AS (
  UPDATE ingestion_jobs j SET locked_at = clock_timestamp()
  FROM held WHERE j.job_id = held.job_id
  RETURNING j.job_id
)
SELECT w.job_id, w.lease_epoch, r.job_id IS NOT NULL AS is_renewed,
       EXISTS (SELECT FROM ingestion_jobs j WHERE j.job_id = w.job_id AND j.lease_epoch = w.lease_epoch
               AND j.status = 'RUNNING') AS is_held
FROM wanted w LEFT JOIN renewed r USING (job_id)

-- name: hold_lease
-- The first statement of every transaction in which a worker writes (rule J14): it checks the
-- epoch, keeps the row locked until commit, so that nobody can claim in between, and renews.
-- A worker whose machine vanishes inside the transaction holds that lock for one lease at most.
UPDATE ingestion_jobs SET locked_at = clock_timestamp()
WHERE job_id = %(job_id)s AND lease_epoch = %(lease_epoch)s AND status = 'RUNNING'
RETURNING version_id,
          set_config('idle_in_transaction_session_timeout', ceil(lease_seconds * 1000)::text, true)

-- name: is_held
-- Asked after a move that hit nothing: a lost lease, or a document that does not stand where it must?
SELECT 1 AS held FROM ingestion_jobs
WHERE job_id = %(job_id)s AND lease_epoch = %(lease_epoch)s AND status = 'RUNNING'

-- name: begin_stage
-- Rules D2 and D5: the status is committed before the stage's work starts, and clears the error.
WITH held AS (
  UPDATE ingestion_jobs j SET locked_at = clock_timestamp()
  FROM document_versions v
  WHERE j.job_id = %(job_id)s AND j.lease_epoch = %(lease_epoch)s AND j.status = ANY(%(job_from)s)
    AND v.version_id = j.version_id AND v.status = ANY(%(document_from)s)
  RETURNING j.job_id, j.lease_epoch, j.version_id
), moved AS (
  UPDATE document_versions v
  SET status = %(document_to)s, error_message = NULL, failure = NULL,
      progress_done = 0, progress_total = 0, progress_unit = '',
      updated_at = clock_timestamp(), revision = revision + 1, changed_xid = pg_current_xact_id()
  FROM held WHERE v.version_id = held.version_id AND v.status = ANY(%(document_from)s)
  RETURNING held.job_id, held.lease_epoch
), noted AS (
  UPDATE ingestion_attempts a
  SET last_stage = %(document_to)s, trace_id = coalesce(%(trace_id)s, a.trace_id),
      stages = a.stages || jsonb_build_array(jsonb_build_object('stage', %(document_to)s::text, 'started_at',
        to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')))
  FROM moved WHERE a.job_id = moved.job_id AND a.lease_epoch = moved.lease_epoch
)
SELECT held.n AS moved, clock_timestamp() AS written_at, 1 / (held.n = moved.n)::integer AS is_whole
FROM (SELECT count(*) AS n FROM held) held, (SELECT count(*) AS n FROM moved) moved

-- name: report_progress
WITH held AS (
  UPDATE ingestion_jobs SET locked_at = clock_timestamp()
  WHERE job_id = %(job_id)s AND lease_epoch = %(lease_epoch)s AND status = 'RUNNING'
  RETURNING version_id
)
UPDATE document_versions v
SET progress_done = %(done)s, progress_total = %(total)s, progress_unit = %(unit)s,
    updated_at = clock_timestamp(), revision = revision + 1, changed_xid = pg_current_xact_id()
FROM held WHERE v.version_id = held.version_id
RETURNING v.version_id

-- name: retry_later
-- Rules J8 and J9.
WITH released AS (
  UPDATE ingestion_jobs j
  SET status = {{RETRY_LATER.job_to}}, locked_at = NULL, locked_by = NULL,
      available_at = now() + make_interval(secs => %(delay_seconds)s)
  FROM document_versions v
  WHERE j.job_id = %(job_id)s AND j.lease_epoch = %(lease_epoch)s AND j.status IN {{RETRY_LATER.job_from}}
    AND j.attempts < j.max_attempts
    AND v.version_id = j.version_id AND v.status IN {{RETRY_LATER.document_from}}
  RETURNING j.job_id, j.version_id, j.lease_epoch, j.available_at
), waiting AS (
  UPDATE document_versions v
  SET status = {{RETRY_LATER.document_to}}, error_message = %(error_message)s,
      failure = %(failure)s::jsonb || jsonb_build_object(
        'stage', v.status,
        'occurred_at', to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'),
        'next_attempt_at',
        to_char(r.available_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')),
      updated_at = clock_timestamp(), revision = revision + 1, changed_xid = pg_current_xact_id()
  FROM released r WHERE v.version_id = r.version_id AND v.status IN {{RETRY_LATER.document_from}}
  RETURNING r.job_id, r.lease_epoch, v.failure
), closed AS (
  UPDATE ingestion_attempts a
  SET outcome = {{Outcome.RETRY_LATER}}, ended_at = clock_timestamp(), failure = w.failure
  FROM waiting w WHERE a.job_id = w.job_id AND a.lease_epoch = w.lease_epoch
)
SELECT released.n AS moved, 1 / (released.n = waiting.n)::integer AS is_whole
FROM (SELECT count(*) AS n FROM released) released, (SELECT count(*) AS n FROM waiting) waiting

-- name: give_up
-- Rule J10.
WITH ended AS (
  UPDATE ingestion_jobs j
  SET status = {{GIVE_UP.job_to}}, locked_at = NULL, locked_by = NULL, finished_at = clock_timestamp()
  FROM document_versions v
  WHERE j.job_id = %(job_id)s AND j.lease_epoch = %(lease_epoch)s AND j.status IN {{GIVE_UP.job_from}}
    AND v.version_id = j.version_id AND v.status IN {{GIVE_UP.document_from}}
  RETURNING j.job_id, j.version_id, j.lease_epoch
), failed AS (
  UPDATE document_versions v
  SET status = {{GIVE_UP.document_to}}, error_message = %(error_message)s,
      failure = %(failure)s::jsonb || jsonb_build_object(
        'stage', v.status,
        'occurred_at', to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')),
      updated_at = clock_timestamp(), revision = revision + 1, changed_xid = pg_current_xact_id()
  FROM ended e WHERE v.version_id = e.version_id AND v.status IN {{GIVE_UP.document_from}}
  RETURNING e.job_id, e.lease_epoch, v.failure
), closed AS (
  UPDATE ingestion_attempts a
  SET outcome = {{Outcome.FAILED}}, ended_at = clock_timestamp(), failure = f.failure
  FROM failed f WHERE a.job_id = f.job_id AND a.lease_epoch = f.lease_epoch
)
SELECT ended.n AS moved, 1 / (ended.n = failed.n)::integer AS is_whole
FROM (SELECT count(*) AS n FROM ended) ended, (SELECT count(*) AS n FROM failed) failed

-- name: hand_back
-- Rule J15: free of charge, due now. The epoch stays: the next claim raises it.
WITH released AS (
  UPDATE ingestion_jobs j
  SET status = {{HAND_BACK.job_to}}, locked_at = NULL, locked_by = NULL, available_at = now(),
      attempts = attempts - 1
  FROM document_versions v
  WHERE j.job_id = %(job_id)s AND j.lease_epoch = %(lease_epoch)s AND j.status IN {{HAND_BACK.job_from}}
    AND v.version_id = j.version_id AND v.status IN {{HAND_BACK.document_from}}
  RETURNING j.job_id, j.version_id, j.lease_epoch
), waiting AS (
  UPDATE document_versions v
  SET status = {{HAND_BACK.document_to}}, progress_done = 0, progress_total = 0, progress_unit = '',
      updated_at = clock_timestamp(), revision = revision + 1, changed_xid = pg_current_xact_id()
  FROM released r WHERE v.version_id = r.version_id AND v.status IN {{HAND_BACK.document_from}}
  RETURNING r.job_id, r.lease_epoch
), closed AS (
  UPDATE ingestion_attempts a
  SET outcome = {{Outcome.HANDED_BACK}}, ended_at = clock_timestamp()
  FROM waiting w WHERE a.job_id = w.job_id AND a.lease_epoch = w.lease_epoch
), woken AS (
  SELECT pg_notify('readymark_jobs', '') FROM waiting
)
SELECT released.n AS moved, 1 / (released.n = waiting.n)::integer AS is_whole,
       (SELECT count(*) FROM woken) AS woken
FROM (SELECT count(*) AS n FROM released) released, (SELECT count(*) AS n FROM waiting) waiting
