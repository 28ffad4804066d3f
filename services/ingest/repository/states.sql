-- What users see of documents. Nothing here writes.

-- name: load_states
-- The newest version and its newest job are read by one snapshot, so their pair is one of J11.
SELECT d.document_id, d.collection_id, c.name AS collection, d.source_key, d.display_name, d.metadata, d.created_at,
       v.version_id, v.number AS version_number, v.status, v.blob_sha256, v.size_bytes,
       coalesce(v.media_type, v.declared_media_type, '') AS media_type, coalesce(v.title, '') AS title,
       coalesce(v.parser_fingerprint, '') AS parser_fingerprint,
       coalesce(v.chunker_fingerprint, '') AS chunker_fingerprint,
       coalesce(v.model_fingerprint, '') AS model_fingerprint,
       v.chunk_count, v.token_count, v.warnings, v.progress_done, v.progress_total, v.progress_unit,
       v.failure, coalesce(v.trace_id, '') AS trace_id, v.updated_at, v.ready_at, v.revision,
       coalesce(s.number, 0) AS served_version_number,
       j.status AS job_status, j.attempts, j.max_attempts, j.available_at
FROM documents d
JOIN collections c ON c.collection_id = d.collection_id
JOIN document_versions v ON v.version_id = d.newest_version_id
LEFT JOIN document_versions s ON s.version_id = d.served_version_id
JOIN LATERAL (
  SELECT status, attempts, max_attempts, available_at FROM ingestion_jobs
  WHERE version_id = v.version_id ORDER BY job_id DESC LIMIT 1
) j ON true
WHERE d.document_id = ANY(%(document_ids)s::uuid[])

-- name: find_collection
SELECT c.collection_id, s.fingerprint
FROM collections c
JOIN tenants t USING (tenant_id)
LEFT JOIN vector_spaces s USING (vector_space_id)
WHERE t.name = %(tenant)s AND c.name = %(collection)s

-- name: list_document_ids
-- Keyset: rows that come or go while somebody pages shift nothing.
SELECT d.document_id, d.created_at
FROM documents d
WHERE (%(collection_id)s::bigint IS NULL OR d.collection_id = %(collection_id)s)
  AND (%(before_created_at)s::timestamptz IS NULL
    OR (d.created_at, d.document_id) < (%(before_created_at)s::timestamptz, %(before_document_id)s::uuid))
  AND (%(status)s::text IS NULL OR EXISTS (
    SELECT FROM document_versions v WHERE v.version_id = d.newest_version_id AND v.status = %(status)s))
ORDER BY d.created_at DESC, d.document_id DESC
LIMIT %(max_documents)s

-- name: list_attempts
SELECT a.job_id, a.lease_epoch, a.number, v.number AS version_number, a.worker, a.started_at, a.ended_at,
       a.last_stage, a.outcome, a.stages, a.failure, coalesce(a.trace_id, '') AS trace_id
FROM ingestion_attempts a JOIN document_versions v USING (version_id)
WHERE v.document_id = %(document_id)s
  AND (%(before_job_id)s::bigint IS NULL
    OR (a.job_id, a.lease_epoch) < (%(before_job_id)s::bigint, %(before_lease_epoch)s::bigint))
ORDER BY a.job_id DESC, a.lease_epoch DESC
LIMIT %(max_attempts)s

-- name: find_snapshot
SELECT v.number AS version_number, s.file_key, s.file_sha256
FROM snapshots s JOIN document_versions v USING (version_id)
WHERE v.document_id = %(document_id)s AND (%(version_number)s::bigint = 0 OR v.number = %(version_number)s)
ORDER BY v.number DESC
LIMIT 1

-- name: find_asset
-- Of the newest version that has it.
SELECT a.sha256, a.media_type, a.size_bytes
FROM assets a JOIN document_versions v USING (version_id)
WHERE v.document_id = %(document_id)s AND a.asset_id = %(asset_id)s
ORDER BY v.number DESC
LIMIT 1

-- name: count_documents
SELECT v.status, count(*) AS count
FROM documents d JOIN document_versions v ON v.version_id = d.newest_version_id
WHERE %(collection_id)s::bigint IS NULL OR d.collection_id = %(collection_id)s
GROUP BY v.status

-- name: count_jobs
SELECT j.status, count(*) AS count
FROM ingestion_jobs j JOIN document_versions v USING (version_id)
WHERE %(collection_id)s::bigint IS NULL OR v.collection_id = %(collection_id)s
GROUP BY j.status

-- name: measure_queue
SELECT
  (SELECT extract(epoch FROM now() - min(j.available_at))::double precision
   FROM ingestion_jobs j JOIN document_versions v USING (version_id)
   WHERE j.status = 'PENDING' AND j.available_at <= now()
     AND (%(collection_id)s::bigint IS NULL OR v.collection_id = %(collection_id)s)) AS oldest_pending_seconds,
  (SELECT count(*) FROM ingestion_jobs j JOIN document_versions v USING (version_id)
   WHERE j.status = 'SUCCEEDED' AND j.finished_at > now() - interval '1 minute'
     AND (%(collection_id)s::bigint IS NULL OR v.collection_id = %(collection_id)s)) AS ready_last_minute,
  (SELECT count(DISTINCT j.locked_by) FROM ingestion_jobs j
   WHERE j.status = 'RUNNING' AND j.locked_at > now() - make_interval(secs => j.lease_seconds)) AS live_workers,
  (SELECT coalesce(sum(c.ready_chunks), 0)::bigint FROM collections c
   WHERE %(collection_id)s::bigint IS NULL OR c.collection_id = %(collection_id)s) AS served_chunks

-- name: get_position
SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS position

-- name: list_changes
-- All that changed in or after the oldest transaction that was still running at the last look.
-- Position and rows come from one snapshot: a transaction that this look cannot see yet is not
-- older than the position, so the next look finds it. Rows are seen again while an old
-- transaction runs; the reader knows them by version and revision.
SELECT p.position, c.document_id, c.collection_id, c.version_id, c.revision
FROM (SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS position) p
LEFT JOIN (
  SELECT document_id, collection_id, version_id, revision
  FROM document_versions WHERE changed_xid >= %(position)s::text::xid8
  UNION ALL
  SELECT document_id, collection_id, NULL, NULL
  FROM deleted_documents WHERE changed_xid >= %(position)s::text::xid8
) c ON true
