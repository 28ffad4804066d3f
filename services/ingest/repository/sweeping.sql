-- What nobody refers to any more. Bounded batches; each statement may run on several workers at once.

-- name: list_unreferenced_blobs
-- Candidates only: documents.drop_blob decides under the row's lock.
SELECT sha256 FROM blobs
WHERE touched_at < now() - make_interval(secs => %(grace_seconds)s)
  AND NOT EXISTS (SELECT FROM document_versions v WHERE v.blob_sha256 = blobs.sha256)
  AND NOT EXISTS (SELECT FROM assets a WHERE a.sha256 = blobs.sha256)
LIMIT %(max_rows)s

-- name: list_known_blobs
SELECT sha256 FROM blobs WHERE sha256 = ANY(%(sha256s)s)

-- name: list_known_snapshots
SELECT file_key FROM snapshots WHERE file_key = ANY(%(file_keys)s)

-- name: drop_old_request_ids
DELETE FROM request_ids WHERE (tenant_id, request_id) IN (
  SELECT tenant_id, request_id FROM request_ids WHERE created_at < now() - interval '24 hours' LIMIT %(max_rows)s)

-- name: drop_old_tombstones
DELETE FROM deleted_documents WHERE document_id IN (
  SELECT document_id FROM deleted_documents WHERE deleted_at < now() - interval '24 hours' LIMIT %(max_rows)s)
