-- What nobody refers to any more. Bounded batches; each statement may run on several workers at once.

-- name: drop_unreferenced_blobs
-- Young ones stay: a submission stores the bytes before its transaction names them.
DELETE FROM blobs b
WHERE b.sha256 IN (
  SELECT sha256 FROM blobs
  WHERE touched_at < now() - make_interval(secs => %(grace_seconds)s)
    AND NOT EXISTS (SELECT FROM document_versions v WHERE v.blob_sha256 = blobs.sha256)
    AND NOT EXISTS (SELECT FROM assets a WHERE a.sha256 = blobs.sha256)
  LIMIT %(max_rows)s
  FOR UPDATE SKIP LOCKED)
  AND NOT EXISTS (SELECT FROM document_versions v WHERE v.blob_sha256 = b.sha256)
  AND NOT EXISTS (SELECT FROM assets a WHERE a.sha256 = b.sha256)
RETURNING b.sha256

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
