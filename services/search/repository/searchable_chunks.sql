-- Read side only: the search views, as the role readymark_searcher sees them. {search_view} is the view
-- of the collection's vector space, by its catalogue row.

-- name: find_collection
SELECT collection_id, name, fingerprint, dimension, search_view
FROM search_collections
WHERE tenant_id = %(tenant_id)s AND name = %(name)s

-- name: open_snapshot
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ

-- name: limit_statements
-- No sequential scan: the chunk table holds all collections, a search reads one of them.
SELECT set_config('statement_timeout', %(timeout_milliseconds)s, true),
       set_config('hnsw.ef_search', %(ef_search)s, true),
       set_config('enable_seqscan', 'off', true)

-- name: count_candidates
-- No row: the collection is not any more what was known of it.
SELECT c.ready_chunks,
       CASE WHEN %(document_ids)s::uuid[] IS NULL THEN c.ready_chunks ELSE (
         SELECT coalesce(sum(d.chunk_count), 0)::bigint FROM search_documents d
         WHERE d.document_id = ANY (%(document_ids)s::uuid[]) AND d.collection_id = c.collection_id
       ) END AS candidate_count
FROM search_collections c
WHERE c.collection_id = %(collection_id)s AND c.name = %(name)s AND c.fingerprint = %(fingerprint)s

-- name: nearest_by_index
-- The inner order is the one an HNSW index gives; relaxed iterative scans leave it nearly sorted.
SELECT nearest.version_id, nearest.ordinal, 1 - nearest.distance AS score
FROM (
  SELECT version_id, ordinal, embedding <=> %(embedding)s AS distance
  FROM {search_view}
  WHERE collection_id = %(collection_id)s
    AND (%(document_ids)s::uuid[] IS NULL OR document_id = ANY (%(document_ids)s::uuid[]))
  ORDER BY embedding <=> %(embedding)s
  LIMIT %(limit)s
) nearest
ORDER BY nearest.distance + 0, nearest.version_id, nearest.ordinal

-- name: nearest_exact
-- "+ 0" keeps the planner from the HNSW index: every candidate is compared.
SELECT version_id, ordinal, 1 - (embedding <=> %(embedding)s) AS score
FROM {search_view}
WHERE collection_id = %(collection_id)s
  AND (%(document_ids)s::uuid[] IS NULL OR document_id = ANY (%(document_ids)s::uuid[]))
ORDER BY (embedding <=> %(embedding)s) + 0, version_id, ordinal
LIMIT %(limit)s

-- name: count_term
-- Capped: how far a term is above the cap decides nothing that a sample could not tell.
SELECT count(*) AS chunk_count
FROM (
  SELECT 1 FROM {search_view}
  WHERE terms @> ARRAY[%(term)s::integer] AND (collection_id + 0) = %(collection_id)s
  LIMIT %(cap)s
) counted

-- name: sample_common_terms
-- Twenty places spread over the collection, twenty chunks from each.
WITH bounds AS (
  SELECT min(version_id) AS lowest, max(version_id) AS highest
  FROM {search_view} WHERE collection_id = %(collection_id)s
), sample AS MATERIALIZED (
  SELECT place.terms
  FROM bounds CROSS JOIN generate_series(0, 19) AS step CROSS JOIN LATERAL (
    SELECT terms FROM {search_view}
    WHERE collection_id = %(collection_id)s
      AND version_id >= bounds.lowest + (bounds.highest - bounds.lowest) * step / 20
    ORDER BY version_id, ordinal
    LIMIT 20
  ) place
)
SELECT term, count(*)::float8 / (SELECT count(*) FROM sample) AS share
FROM sample CROSS JOIN LATERAL unnest(sample.terms) AS term
GROUP BY term
HAVING count(*) * 50 >= (SELECT count(*) FROM sample)

-- name: best_by_keywords
-- The index finds the chunks with a gate term, the sparse inner product is their BM25 score.
-- Term ids hold the collection, so the collection is checked on few rows; "+ 0" keeps the
-- planner from reading all of the collection to intersect it.
SELECT best.version_id, best.ordinal, best.score,
       CASE WHEN row_number() OVER (ORDER BY best.score DESC, best.version_id, best.ordinal) = 1
            THEN best.terms END AS terms
FROM (
  SELECT version_id, ordinal, -(lexical <#> %(query)s) AS score, terms
  FROM {search_view}
  WHERE terms && %(gate)s::integer[] AND (collection_id + 0) = %(collection_id)s
  ORDER BY lexical <#> %(query)s, version_id, ordinal
  LIMIT %(limit)s
) best
ORDER BY best.score DESC, best.version_id, best.ordinal

-- name: best_by_keywords_of_documents
SELECT best.version_id, best.ordinal, best.score,
       CASE WHEN row_number() OVER (ORDER BY best.score DESC, best.version_id, best.ordinal) = 1
            THEN best.terms END AS terms
FROM (
  SELECT version_id, ordinal, -(lexical <#> %(query)s) AS score, terms
  FROM {search_view}
  WHERE terms && %(gate)s::integer[] AND collection_id = %(collection_id)s
    AND document_id = ANY (%(document_ids)s::uuid[])
  ORDER BY lexical <#> %(query)s, version_id, ordinal
  LIMIT %(limit)s
) best
ORDER BY best.score DESC, best.version_id, best.ordinal

-- name: load_chunks
SELECT c.version_id, c.ordinal, c.chunk_id, c.content, c.locator, c.document_id,
       d.display_name, d.metadata, d.version_number
FROM unnest(%(version_ids)s::bigint[], %(ordinals)s::integer[]) AS wanted (version_id, ordinal)
JOIN {search_view} c
  ON c.collection_id = %(collection_id)s AND c.version_id = wanted.version_id AND c.ordinal = wanted.ordinal
JOIN search_documents d ON d.document_id = c.document_id
