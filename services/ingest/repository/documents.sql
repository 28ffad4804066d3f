-- What users do to documents: submit, replace, cancel, retry, delete. Statuses come from
-- lifecycle.py. Locks are taken in the order request id, source key, blob, document (advisory),
-- then, as workers do, job, version, document row.

-- name: remember_request
-- Of several calls with one id the others wait here until the first has committed. An id
-- that is older than a day is forgotten.
INSERT INTO request_ids (tenant_id, request_id, digest, document_id, version_number, created)
SELECT t.tenant_id, %(request_id)s, %(digest)s, %(document_id)s, 0, false FROM tenants t WHERE t.name = %(tenant)s
ON CONFLICT (tenant_id, request_id) DO UPDATE
SET digest = excluded.digest, created_at = now()
WHERE request_ids.created_at < now() - interval '24 hours'
RETURNING request_id

-- name: find_request
SELECT r.digest, r.document_id, r.created
FROM request_ids r JOIN tenants t USING (tenant_id)
WHERE t.name = %(tenant)s AND r.request_id = %(request_id)s

-- name: settle_request
UPDATE request_ids r
SET document_id = %(document_id)s, created = %(created)s,
    version_number = (SELECT v.number FROM documents d JOIN document_versions v ON v.version_id = d.newest_version_id
                      WHERE d.document_id = %(document_id)s)
FROM tenants t
WHERE t.tenant_id = r.tenant_id AND t.name = %(tenant)s AND r.request_id = %(request_id)s

-- name: insert_collection
INSERT INTO collections (tenant_id, name)
SELECT t.tenant_id, %(collection)s FROM tenants t WHERE t.name = %(tenant)s
ON CONFLICT (tenant_id, name) DO NOTHING

-- name: hold_source_key
-- Submissions under one key come one after another, whether or not its document exists yet.
SELECT pg_advisory_xact_lock(hashtextextended(%(source_key)s, %(collection_id)s))

-- name: hold_blob
-- The row stays locked until commit: submissions of the same bytes come one after another, so
-- that each sees what the one before made of them, and nobody removes the file meanwhile.
INSERT INTO blobs (sha256, size_bytes) VALUES (%(sha256)s, %(size_bytes)s)
ON CONFLICT (sha256) DO UPDATE SET touched_at = clock_timestamp()

-- name: drop_blob
DELETE FROM blobs b
WHERE b.sha256 = %(sha256)s
  AND NOT EXISTS (SELECT FROM document_versions v WHERE v.blob_sha256 = b.sha256)
  AND NOT EXISTS (SELECT FROM assets a WHERE a.sha256 = b.sha256)
RETURNING b.sha256

-- name: find_by_source_key
SELECT document_id FROM documents
WHERE collection_id = %(collection_id)s AND source_key = %(source_key)s

-- name: find_by_bytes
-- The oldest, so that everybody who asks is given the same one.
SELECT d.document_id
FROM document_versions v JOIN documents d ON d.newest_version_id = v.version_id
WHERE v.collection_id = %(collection_id)s AND v.blob_sha256 = %(sha256)s
ORDER BY d.created_at, d.document_id
LIMIT 1

-- name: hold_document
-- Transitions by users come one after another, so that only workers are met on the row locks.
SELECT pg_advisory_xact_lock(hashtextextended(%(document_id)s, -1))

-- name: find_newest
SELECT d.newest_version_id AS version_id,
       (SELECT max(j.job_id) FROM ingestion_jobs j WHERE j.version_id = d.newest_version_id) AS job_id
FROM documents d WHERE d.document_id = %(document_id)s

-- name: lock_job
SELECT status AS job_status FROM ingestion_jobs WHERE job_id = %(job_id)s FOR UPDATE

-- name: lock_version
SELECT number AS version_number, status, revision, blob_sha256, declared_media_type
FROM document_versions WHERE version_id = %(version_id)s FOR NO KEY UPDATE

-- name: lock_document
SELECT document_id, collection_id, display_name, metadata
FROM documents WHERE document_id = %(document_id)s FOR NO KEY UPDATE

-- name: create_document
-- Rule J1: document, version and job in one statement.
WITH version AS (
  INSERT INTO document_versions (document_id, collection_id, number, status, blob_sha256, size_bytes,
                                 declared_media_type, trace_id)
  VALUES (%(document_id)s, %(collection_id)s, 1, {{SUBMIT.document_to}}, %(sha256)s, %(size_bytes)s,
          %(declared_media_type)s, %(trace_id)s)
  RETURNING version_id, collection_id
), document AS (
  INSERT INTO documents (document_id, tenant_id, collection_id, source_key, display_name, metadata, newest_version_id)
  SELECT %(document_id)s, c.tenant_id, c.collection_id, %(source_key)s, %(display_name)s, %(metadata)s, v.version_id
  FROM version v JOIN collections c USING (collection_id)
  RETURNING newest_version_id, tenant_id
), job AS (
  INSERT INTO ingestion_jobs (version_id, tenant_id, status, max_attempts, retry_delay_seconds, lease_seconds,
                              traceparent, tracestate)
  SELECT newest_version_id, tenant_id, {{SUBMIT.job_to}}, %(max_attempts)s, %(retry_delay_seconds)s,
         %(lease_seconds)s, %(traceparent)s, %(tracestate)s
  FROM document
  RETURNING job_id
)
SELECT job_id, pg_notify(%(channel)s, '')::text AS woken FROM job

-- name: add_version
-- The version that is served stays so until this one is published.
WITH version AS (
  INSERT INTO document_versions (document_id, collection_id, number, status, blob_sha256, size_bytes,
                                 declared_media_type, trace_id)
  VALUES (%(document_id)s, %(collection_id)s, %(version_number)s, {{SUBMIT.document_to}}, %(sha256)s, %(size_bytes)s,
          %(declared_media_type)s, %(trace_id)s)
  RETURNING version_id
), document AS (
  UPDATE documents d
  SET newest_version_id = v.version_id, display_name = %(display_name)s, metadata = %(metadata)s
  FROM version v WHERE d.document_id = %(document_id)s
  RETURNING d.newest_version_id, d.tenant_id
), job AS (
  INSERT INTO ingestion_jobs (version_id, tenant_id, status, max_attempts, retry_delay_seconds, lease_seconds,
                              traceparent, tracestate)
  SELECT newest_version_id, tenant_id, {{SUBMIT.job_to}}, %(max_attempts)s, %(retry_delay_seconds)s,
         %(lease_seconds)s, %(traceparent)s, %(tracestate)s
  FROM document
  RETURNING job_id
)
SELECT job_id, pg_notify(%(channel)s, '')::text AS woken FROM job

-- name: end_job
-- The worker, if there is one, finds its epoch useless, since the job is not RUNNING any more.
WITH ended AS (
  UPDATE ingestion_jobs
  SET status = {{CANCEL.job_to}}, locked_at = NULL, locked_by = NULL, finished_at = clock_timestamp()
  WHERE job_id = %(job_id)s AND status IN {{CANCEL.job_from}}
  RETURNING job_id, version_id, attempts, max_attempts
), failed AS (
  UPDATE document_versions v
  SET status = {{CANCEL.document_to}}, error_message = %(error_message)s,
      failure = jsonb_build_object(
        'code', %(code)s::text, 'reason', %(reason)s::text, 'parameters', '{}'::jsonb, 'stage', v.status,
        'attempt', e.attempts, 'max_attempts', e.max_attempts, 'retryable', false,
        'occurred_at', to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'),
        'next_attempt_at', NULL),
      updated_at = clock_timestamp(), revision = revision + 1, changed_xid = pg_current_xact_id()
  FROM ended e WHERE v.version_id = e.version_id AND v.status IN {{CANCEL.document_from}}
  RETURNING e.job_id, v.failure
), closed AS (
  UPDATE ingestion_attempts a
  SET outcome = {{Outcome.CANCELLED}}, ended_at = clock_timestamp(), failure = f.failure
  FROM failed f WHERE a.job_id = f.job_id AND a.outcome = {{Outcome.RUNNING}}
), unstaged AS (
  DELETE FROM chunk_staging s USING ended e WHERE s.version_id = e.version_id
)
SELECT (SELECT count(*) FROM ended) AS ended, (SELECT count(*) FROM failed) AS failed

-- name: reopen_version
-- A new job; the failed one stays as history.
WITH reopened AS (
  UPDATE document_versions
  SET status = {{RETRY_BY_HAND.document_to}}, error_message = NULL, failure = NULL,
      progress_done = 0, progress_total = 0, progress_unit = '',
      updated_at = clock_timestamp(), revision = revision + 1, changed_xid = pg_current_xact_id()
  WHERE version_id = %(version_id)s AND status IN {{RETRY_BY_HAND.document_from}}
  RETURNING version_id, document_id
), job AS (
  INSERT INTO ingestion_jobs (version_id, tenant_id, status, max_attempts, retry_delay_seconds, lease_seconds,
                              traceparent, tracestate)
  SELECT r.version_id, d.tenant_id, {{RETRY_BY_HAND.job_to}}, %(max_attempts)s, %(retry_delay_seconds)s,
         %(lease_seconds)s, %(traceparent)s, %(tracestate)s
  FROM reopened r JOIN documents d USING (document_id)
  RETURNING job_id
)
SELECT job_id, pg_notify(%(channel)s, '')::text AS woken FROM job

-- name: list_files
SELECT 'snapshot' AS kind, s.file_key AS name
FROM snapshots s JOIN document_versions v USING (version_id) WHERE v.document_id = %(document_id)s
UNION
SELECT 'blob', v.blob_sha256 FROM document_versions v WHERE v.document_id = %(document_id)s
UNION
SELECT 'blob', a.sha256 FROM assets a JOIN document_versions v USING (version_id)
WHERE v.document_id = %(document_id)s

-- name: delete_document
-- Versions, jobs, attempts, chunks, vectors, staged vectors, assets and snapshot rows go with it.
WITH served AS (
  SELECT d.document_id, v.chunk_count
  FROM documents d JOIN document_versions v ON v.version_id = d.served_version_id
  WHERE d.document_id = %(document_id)s
), gone AS (
  DELETE FROM documents WHERE document_id = %(document_id)s RETURNING document_id, collection_id
), noted AS (
  INSERT INTO deleted_documents (document_id, collection_id) SELECT document_id, collection_id FROM gone
)
SELECT g.collection_id, coalesce(s.chunk_count, 0) AS served_chunks FROM gone g LEFT JOIN served s USING (document_id)

-- name: count_chunks
-- The one hot row of a collection comes last, so that it is locked for the shortest time.
UPDATE collections SET ready_chunks = ready_chunks - %(removed)s WHERE collection_id = %(collection_id)s
