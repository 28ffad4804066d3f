-- From snapshot to searchable: snapshot and assets, vectors as they come, and the publish
-- transaction. {chunk_table} is the chunk table of one vector space, put in as an identifier.
-- Every statement here runs in a transaction that checks the lease epoch: through
-- jobs.fenced() at its beginning, or, in the publish transaction, at its end.

-- name: find_snapshot
SELECT s.file_key, s.file_sha256, s.source_sha256, s.parser_fingerprint, s.chunker_fingerprint
FROM snapshots s WHERE s.version_id = %(version_id)s

-- name: save_snapshot
WITH before AS (
  SELECT file_key FROM snapshots WHERE version_id = %(version_id)s
), saved AS (
  INSERT INTO snapshots (version_id, file_key, file_sha256, size_bytes, source_sha256, parser_fingerprint,
                         chunker_fingerprint, chunk_count, token_count, lease_epoch)
  VALUES (%(version_id)s, %(file_key)s, %(file_sha256)s, %(size_bytes)s, %(source_sha256)s,
          %(parser_fingerprint)s, %(chunker_fingerprint)s, %(chunk_count)s, %(token_count)s, %(lease_epoch)s)
  ON CONFLICT (version_id) DO UPDATE
  SET file_key = excluded.file_key, file_sha256 = excluded.file_sha256, size_bytes = excluded.size_bytes,
      source_sha256 = excluded.source_sha256, parser_fingerprint = excluded.parser_fingerprint,
      chunker_fingerprint = excluded.chunker_fingerprint, chunk_count = excluded.chunk_count,
      token_count = excluded.token_count, lease_epoch = excluded.lease_epoch, written_at = clock_timestamp()
), described AS (
  UPDATE document_versions
  SET media_type = %(media_type)s, title = %(title)s, parser_fingerprint = %(parser_fingerprint)s,
      chunker_fingerprint = %(chunker_fingerprint)s, chunk_count = %(chunk_count)s,
      token_count = %(token_count)s, warnings = %(warnings)s,
      updated_at = clock_timestamp(), revision = revision + 1, changed_xid = pg_current_xact_id()
  WHERE version_id = %(version_id)s
)
SELECT file_key FROM before WHERE file_key <> %(file_key)s

-- name: save_blob
INSERT INTO blobs (sha256, size_bytes) VALUES (%(sha256)s, %(size_bytes)s)
ON CONFLICT (sha256) DO UPDATE SET touched_at = clock_timestamp()

-- name: save_asset
INSERT INTO assets (version_id, sha256, asset_id, media_type, size_bytes, page, caption, width, height)
VALUES (%(version_id)s, %(sha256)s, %(asset_id)s, %(media_type)s, %(size_bytes)s, %(page)s, %(caption)s,
        %(width)s, %(height)s)
ON CONFLICT (version_id, sha256) DO UPDATE
SET media_type = excluded.media_type, page = excluded.page, caption = excluded.caption

-- name: drop_other_assets
DELETE FROM assets WHERE version_id = %(version_id)s AND NOT (sha256 = ANY(%(sha256s)s))

-- name: create_vector_space
SELECT create_vector_space(%(fingerprint)s, %(model_id)s, %(dimension)s) AS vector_space_id

-- name: bind_collection
-- The first model that embeds for a collection becomes the collection's.
UPDATE collections SET vector_space_id = %(vector_space_id)s
WHERE collection_id = %(collection_id)s AND vector_space_id IS NULL

-- name: get_vector_space
SELECT s.vector_space_id, s.fingerprint, s.dimension, s.chunk_table
FROM collections c JOIN vector_spaces s USING (vector_space_id)
WHERE c.collection_id = %(collection_id)s

-- name: adopt_served_vectors
-- A chunk whose text is unchanged since the served version is not embedded again.
INSERT INTO chunk_staging (version_id, ordinal, text_sha256, model_fingerprint, embedding)
SELECT %(version_id)s, wanted.ordinal, wanted.text_sha256, %(fingerprint)s, served.embedding
FROM unnest(%(ordinals)s::integer[], %(text_sha256s)s::bytea[]) AS wanted (ordinal, text_sha256)
JOIN LATERAL (
  SELECT c.embedding FROM {chunk_table} c
  WHERE c.collection_id = %(collection_id)s AND c.document_id = %(document_id)s
    AND c.text_sha256 = wanted.text_sha256
  LIMIT 1
) served ON true
ON CONFLICT (version_id, ordinal) DO UPDATE
SET text_sha256 = excluded.text_sha256, model_fingerprint = excluded.model_fingerprint,
    embedding = excluded.embedding

-- name: list_staged
SELECT ordinal, text_sha256 FROM chunk_staging
WHERE version_id = %(version_id)s AND model_fingerprint = %(fingerprint)s

-- name: stage_vector
INSERT INTO chunk_staging (version_id, ordinal, text_sha256, model_fingerprint, embedding)
VALUES (%(version_id)s, %(ordinal)s, %(text_sha256)s, %(fingerprint)s, %(embedding)s)
ON CONFLICT (version_id, ordinal) DO UPDATE
SET text_sha256 = excluded.text_sha256, model_fingerprint = excluded.model_fingerprint,
    embedding = excluded.embedding

-- name: insert_chunk
-- No vector of this very text and model, no row: publish compares the count.
INSERT INTO {chunk_table} (collection_id, document_id, version_id, ordinal, chunk_id, text_sha256, kind,
                           content, prefix, locator, token_count, terms, lexical, embedding)
SELECT %(collection_id)s, %(document_id)s, %(version_id)s, %(ordinal)s, %(chunk_id)s, s.text_sha256, %(kind)s,
       %(content)s, %(prefix)s, %(locator)s, %(token_count)s, %(terms)s, %(lexical)s, s.embedding
FROM chunk_staging s
WHERE s.version_id = %(version_id)s AND s.ordinal = %(ordinal)s AND s.text_sha256 = %(text_sha256)s
  AND s.model_fingerprint = %(fingerprint)s

-- name: finish_job
UPDATE ingestion_jobs
SET status = {{PUBLISH.job_to}}, locked_at = NULL, locked_by = NULL, finished_at = clock_timestamp()
WHERE job_id = %(job_id)s AND lease_epoch = %(lease_epoch)s AND status IN {{PUBLISH.job_from}}
RETURNING version_id,
          -- From here on the row is locked: for one lease at most, should the worker vanish.
          set_config('idle_in_transaction_session_timeout', ceil(lease_seconds * 1000)::text, true)

-- name: make_ready
UPDATE document_versions
SET status = {{PUBLISH.document_to}}, ready_at = clock_timestamp(), model_fingerprint = %(fingerprint)s,
    updated_at = clock_timestamp(), revision = revision + 1, changed_xid = pg_current_xact_id()
WHERE version_id = %(version_id)s AND status IN {{PUBLISH.document_from}} AND chunk_count = %(chunk_count)s
RETURNING version_id

-- name: serve_version
UPDATE documents SET served_version_id = %(version_id)s
WHERE document_id = %(document_id)s AND newest_version_id = %(version_id)s
RETURNING document_id

-- name: drop_older_versions
-- Their chunks, jobs, attempts, assets and snapshot rows go with them.
DELETE FROM document_versions
WHERE document_id = %(document_id)s AND number < %(version_number)s
RETURNING version_id, CASE WHEN ready_at IS NULL THEN 0 ELSE chunk_count END AS served_chunks

-- name: clear_staging
DELETE FROM chunk_staging WHERE version_id = %(version_id)s

-- name: count_chunks
-- The one hot row of a collection comes last, so that it is locked for the shortest time.
UPDATE collections SET ready_chunks = ready_chunks + %(added)s WHERE collection_id = %(collection_id)s

-- name: close_attempt
UPDATE ingestion_attempts SET outcome = {{Outcome.SUCCEEDED}}, ended_at = clock_timestamp()
WHERE job_id = %(job_id)s AND lease_epoch = %(lease_epoch)s
