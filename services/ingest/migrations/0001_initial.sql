-- Everything lives in schema readymark. Run by the migrator role, which owns all of it.
-- Three roles: the migrator (owner), readymark_ingest (reads and writes rows), and
-- readymark_searcher (may SELECT the search views and nothing else).
CREATE EXTENSION IF NOT EXISTS vector;
CREATE SCHEMA readymark;
SET LOCAL search_path = readymark, public;

CREATE TABLE tenants (
  tenant_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text NOT NULL UNIQUE,
  created_at timestamptz NOT NULL DEFAULT now()
);
INSERT INTO tenants (name) VALUES ('default');

-- One row and one chunk table per model fingerprint; made by create_vector_space() below.
CREATE TABLE vector_spaces (
  vector_space_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  fingerprint text NOT NULL UNIQUE,
  model_id text NOT NULL,
  dimension integer NOT NULL CHECK (dimension BETWEEN 1 AND 3500),
  chunk_table name NOT NULL UNIQUE,
  search_view name NOT NULL UNIQUE,
  created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE collections (
  collection_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  tenant_id bigint NOT NULL REFERENCES tenants,
  name text NOT NULL,
  -- Set by the first publication or the first embedding, whichever comes first; never changed here.
  vector_space_id bigint REFERENCES vector_spaces,
  -- Version of shared/terms.py that made the terms of this collection.
  tokenizer_version integer NOT NULL DEFAULT 1,
  ready_chunks bigint NOT NULL DEFAULT 0 CHECK (ready_chunks >= 0),
  created_at timestamptz NOT NULL DEFAULT now(),
  UNIQUE (tenant_id, name)
) WITH (fillfactor = 70);

-- Bytes by content. The file itself lies in the blob store under a key made of the hash.
CREATE TABLE blobs (
  sha256 text PRIMARY KEY CHECK (sha256 ~ '^[0-9a-f]{64}$'),
  size_bytes bigint NOT NULL CHECK (size_bytes > 0),
  created_at timestamptz NOT NULL DEFAULT now(),
  -- Last time a submission or a worker stored it again; the sweep leaves young ones alone.
  touched_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE documents (
  document_id uuid PRIMARY KEY,
  tenant_id bigint NOT NULL REFERENCES tenants,
  collection_id bigint NOT NULL REFERENCES collections,
  source_key text,
  display_name text NOT NULL,
  metadata jsonb NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(metadata) = 'object'),
  newest_version_id bigint,
  served_version_id bigint,
  -- Only a READY version can be served: the foreign key below compares this with its status.
  served_status text GENERATED ALWAYS AS (CASE WHEN served_version_id IS NULL THEN NULL ELSE 'READY' END) STORED,
  created_at timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX documents_source_key ON documents (collection_id, source_key) WHERE source_key IS NOT NULL;
CREATE INDEX documents_listing ON documents (collection_id, created_at DESC, document_id DESC);
CREATE INDEX documents_listing_all ON documents (created_at DESC, document_id DESC);

CREATE TABLE document_versions (
  version_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  document_id uuid NOT NULL REFERENCES documents ON DELETE CASCADE,
  collection_id bigint NOT NULL REFERENCES collections,
  number integer NOT NULL CHECK (number > 0),
  status text NOT NULL
    CHECK (status IN ('PENDING', 'PARSING', 'CHUNKING', 'EMBEDDING', 'INDEXING', 'READY', 'FAILED')),
  blob_sha256 text NOT NULL REFERENCES blobs,
  size_bytes bigint NOT NULL,
  declared_media_type text,
  media_type text,
  title text,
  parser_fingerprint text,
  chunker_fingerprint text,
  model_fingerprint text,
  chunk_count integer NOT NULL DEFAULT 0,
  token_count bigint NOT NULL DEFAULT 0,
  warnings jsonb NOT NULL DEFAULT '[]',
  progress_done bigint NOT NULL DEFAULT 0,
  progress_total bigint NOT NULL DEFAULT 0,
  progress_unit text NOT NULL DEFAULT '',
  -- English, for people who read the table; `failure` holds code, reason and facts for all languages.
  error_message text,
  failure jsonb,
  trace_id text,
  created_at timestamptz NOT NULL DEFAULT now(),
  updated_at timestamptz NOT NULL DEFAULT now(),
  ready_at timestamptz,
  -- Grows with every change; part of the etag.
  revision bigint NOT NULL DEFAULT 1,
  -- Transaction of the last change; a watcher reads all rows from the oldest transaction
  -- that was still running when it looked last, so that no commit slips through.
  changed_xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
  UNIQUE (document_id, number),
  -- What a chunk refers to; see create_vector_space().
  UNIQUE (version_id, collection_id, status),
  CONSTRAINT failure_is_whole CHECK ((error_message IS NULL) = (failure IS NULL)),
  -- Rule D5: a stage that runs and a READY document never show an outdated reason.
  CONSTRAINT no_stale_error CHECK (error_message IS NULL OR status IN ('PENDING', 'FAILED')),
  -- Rule D4: FAILED says why.
  CONSTRAINT failed_says_why CHECK (status <> 'FAILED' OR error_message IS NOT NULL),
  CONSTRAINT ready_is_whole CHECK ((status = 'READY') = (ready_at IS NOT NULL) AND (status <> 'READY' OR chunk_count > 0))
) WITH (fillfactor = 70);
CREATE INDEX document_versions_changes ON document_versions (changed_xid);
CREATE INDEX document_versions_blob ON document_versions (blob_sha256);
CREATE INDEX document_versions_collection ON document_versions (collection_id, status);

ALTER TABLE documents
  ADD CONSTRAINT newest_version FOREIGN KEY (newest_version_id) REFERENCES document_versions (version_id)
    DEFERRABLE INITIALLY DEFERRED,
  ADD CONSTRAINT serves_only_ready FOREIGN KEY (served_version_id, collection_id, served_status)
    REFERENCES document_versions (version_id, collection_id, status) DEFERRABLE INITIALLY DEFERRED;
CREATE INDEX documents_newest_version ON documents (newest_version_id);
CREATE INDEX documents_served_version ON documents (served_version_id);

CREATE TABLE ingestion_jobs (
  job_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  version_id bigint NOT NULL REFERENCES document_versions ON DELETE CASCADE,
  tenant_id bigint NOT NULL,
  status text NOT NULL CHECK (status IN ('PENDING', 'RUNNING', 'SUCCEEDED', 'FAILED')),
  attempts integer NOT NULL DEFAULT 0,
  max_attempts integer NOT NULL CHECK (max_attempts > 0),
  retry_delay_seconds double precision NOT NULL CHECK (retry_delay_seconds >= 0),
  available_at timestamptz NOT NULL DEFAULT now(),
  locked_at timestamptz,
  lease_seconds double precision NOT NULL CHECK (lease_seconds > 0),
  locked_by text,
  -- Fencing number: grows with every claim, never goes back (rule J14).
  lease_epoch bigint NOT NULL DEFAULT 0,
  priority smallint NOT NULL DEFAULT 1,
  turn bigint NOT NULL DEFAULT 0,
  traceparent text,
  tracestate text,
  created_at timestamptz NOT NULL DEFAULT now(),
  finished_at timestamptz,
  CONSTRAINT attempts_within_limit CHECK (attempts BETWEEN 0 AND max_attempts),
  CONSTRAINT running_holds_a_lease CHECK ((status = 'RUNNING') = (locked_at IS NOT NULL AND locked_by IS NOT NULL)),
  CONSTRAINT finished_is_stamped CHECK ((status IN ('SUCCEEDED', 'FAILED')) = (finished_at IS NOT NULL))
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0);
-- At most one live job a version, running ones included.
CREATE UNIQUE INDEX ingestion_jobs_one_live ON ingestion_jobs (version_id) WHERE status IN ('PENDING', 'RUNNING');
CREATE INDEX ingestion_jobs_due ON ingestion_jobs (priority, available_at, job_id) WHERE status = 'PENDING';
-- Not on locked_at: that would end HOT updates of heartbeats. The running set is small.
CREATE INDEX ingestion_jobs_running ON ingestion_jobs (job_id) WHERE status = 'RUNNING';
CREATE INDEX ingestion_jobs_version ON ingestion_jobs (version_id, job_id DESC);
CREATE INDEX ingestion_jobs_finished ON ingestion_jobs (finished_at) WHERE finished_at IS NOT NULL;

-- One row a claim (rule J16). `number` is the attempt as users count it: a hand-back gives it back.
CREATE TABLE ingestion_attempts (
  job_id bigint NOT NULL REFERENCES ingestion_jobs ON DELETE CASCADE,
  lease_epoch bigint NOT NULL,
  version_id bigint NOT NULL,
  number integer NOT NULL,
  worker text NOT NULL,
  started_at timestamptz NOT NULL,
  ended_at timestamptz,
  last_stage text NOT NULL DEFAULT 'PENDING',
  outcome text NOT NULL CHECK (outcome IN
    ('RUNNING', 'SUCCEEDED', 'RETRY_LATER', 'FAILED', 'LEASE_EXPIRED', 'HANDED_BACK', 'CANCELLED')),
  stages jsonb NOT NULL DEFAULT '[]',
  failure jsonb,
  trace_id text,
  PRIMARY KEY (job_id, lease_epoch),
  CONSTRAINT ended_is_stamped CHECK ((outcome = 'RUNNING') = (ended_at IS NULL))
);
CREATE INDEX ingestion_attempts_version ON ingestion_attempts (version_id);

CREATE TABLE assets (
  version_id bigint NOT NULL REFERENCES document_versions ON DELETE CASCADE,
  sha256 text NOT NULL REFERENCES blobs,
  asset_id uuid NOT NULL,
  media_type text NOT NULL,
  size_bytes bigint NOT NULL,
  page integer,
  caption text,
  width integer,
  height integer,
  PRIMARY KEY (version_id, sha256)
);
CREATE INDEX assets_blob ON assets (sha256);

-- Where the chunk file of a version lies; the file has all chunks and no vectors.
CREATE TABLE snapshots (
  version_id bigint PRIMARY KEY REFERENCES document_versions ON DELETE CASCADE,
  file_key text NOT NULL UNIQUE,
  file_sha256 text NOT NULL,
  size_bytes bigint NOT NULL,
  source_sha256 text NOT NULL,
  parser_fingerprint text NOT NULL,
  chunker_fingerprint text NOT NULL,
  chunk_count integer NOT NULL CHECK (chunk_count > 0),
  token_count bigint NOT NULL,
  lease_epoch bigint NOT NULL,
  written_at timestamptz NOT NULL DEFAULT now()
);

-- Vectors as they come, before anything is searchable: the checkpoint a retry goes on from.
-- A row is good for a chunk when text and model are the same, whoever wrote it.
CREATE TABLE chunk_staging (
  version_id bigint NOT NULL REFERENCES document_versions ON DELETE CASCADE,
  ordinal integer NOT NULL,
  text_sha256 bytea NOT NULL,
  model_fingerprint text NOT NULL,
  embedding halfvec NOT NULL,
  PRIMARY KEY (version_id, ordinal)
);

CREATE TABLE request_ids (
  tenant_id bigint NOT NULL REFERENCES tenants,
  request_id uuid NOT NULL,
  digest text NOT NULL,
  document_id uuid NOT NULL,
  version_number integer NOT NULL,
  created boolean NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (tenant_id, request_id)
);
CREATE INDEX request_ids_age ON request_ids (created_at);

-- What was deleted, so that a watcher hears of it. Swept after a day.
CREATE TABLE deleted_documents (
  document_id uuid PRIMARY KEY,
  collection_id bigint NOT NULL,
  deleted_at timestamptz NOT NULL DEFAULT now(),
  changed_xid xid8 NOT NULL DEFAULT pg_current_xact_id()
);
CREATE INDEX deleted_documents_changes ON deleted_documents (changed_xid);
CREATE INDEX deleted_documents_age ON deleted_documents (deleted_at);

-- What search may know of documents. Plain views: a security barrier would lose the indexes.
CREATE VIEW search_collections AS
  SELECT c.collection_id, c.tenant_id, c.name, c.tokenizer_version, c.ready_chunks,
         s.vector_space_id, s.fingerprint, s.model_id, s.dimension, s.search_view
  FROM collections c LEFT JOIN vector_spaces s USING (vector_space_id);
CREATE VIEW search_documents AS
  SELECT d.document_id, d.collection_id, d.tenant_id, d.display_name, d.source_key, d.metadata, d.created_at,
         v.version_id, v.number AS version_number, v.chunk_count, v.title
  FROM documents d JOIN document_versions v ON v.version_id = d.served_version_id;

-- Makes the chunk table of a vector space and its search view; a second call finds them made.
-- SECURITY DEFINER: workers meet new models at run time but may not create tables.
CREATE FUNCTION create_vector_space(model_fingerprint text, model_name text, vector_dimension integer)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = readymark, public, pg_temp AS $$
DECLARE
  space bigint;
  chunk_table text;
  search_view text;
BEGIN
  SELECT vector_space_id INTO space FROM vector_spaces WHERE fingerprint = model_fingerprint;
  IF FOUND THEN RETURN space; END IF;
  PERFORM pg_advisory_xact_lock(hashtextextended('readymark.create_vector_space', 0));
  SELECT vector_space_id INTO space FROM vector_spaces WHERE fingerprint = model_fingerprint;
  IF FOUND THEN RETURN space; END IF;
  SELECT coalesce(max(vector_space_id), 0) + 1 INTO space FROM vector_spaces;
  chunk_table := format('chunks_%s', space);
  search_view := format('search_chunks_%s', space);
  -- A row can exist only for a READY version: it carries that status, and the foreign key
  -- compares it with the version's. The database refuses a chunk of an unfinished version,
  -- and refuses to take a version out of READY while it has chunks.
  EXECUTE format($table$
    CREATE TABLE %1$I (
      collection_id bigint NOT NULL,
      document_id uuid NOT NULL,
      version_id bigint NOT NULL,
      ordinal integer NOT NULL,
      version_status text NOT NULL DEFAULT 'READY' CHECK (version_status = 'READY'),
      chunk_id uuid NOT NULL,
      text_sha256 bytea NOT NULL,
      kind text NOT NULL,
      content text NOT NULL,
      prefix text NOT NULL,
      locator jsonb NOT NULL,
      token_count integer NOT NULL,
      terms integer[] NOT NULL,
      lexical sparsevec(1000000000) NOT NULL,
      embedding halfvec(%2$s) NOT NULL CHECK (l2_norm(embedding) BETWEEN 0.99 AND 1.01),
      PRIMARY KEY (collection_id, version_id, ordinal),
      CONSTRAINT only_of_ready_versions FOREIGN KEY (version_id, collection_id, version_status)
        REFERENCES document_versions (version_id, collection_id, status)
        ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED
    ) WITH (autovacuum_vacuum_scale_factor = 0.05)$table$, chunk_table, vector_dimension);
  -- PLAIN keeps the vector in the row: scanning vectors out of line costs six times as much.
  EXECUTE format('ALTER TABLE %I ALTER COLUMN embedding SET STORAGE PLAIN', chunk_table);
  EXECUTE format('CREATE INDEX ON %I (version_id)', chunk_table);
  EXECUTE format('CREATE INDEX ON %I (collection_id, document_id)', chunk_table);
  EXECUTE format('CREATE INDEX ON %I (chunk_id)', chunk_table);
  EXECUTE format('CREATE INDEX ON %I USING gin (terms)', chunk_table);
  EXECUTE format($view$
    CREATE VIEW %I AS SELECT collection_id, document_id, version_id, ordinal, chunk_id, kind, content, prefix,
      locator, token_count, terms, lexical, embedding FROM %I$view$, search_view, chunk_table);
  EXECUTE format('GRANT SELECT, INSERT, DELETE ON %I TO readymark_ingest', chunk_table);
  EXECUTE format('GRANT SELECT ON %I TO readymark_searcher', search_view);
  INSERT INTO vector_spaces (vector_space_id, fingerprint, model_id, dimension, chunk_table, search_view)
    OVERRIDING SYSTEM VALUE VALUES (space, model_fingerprint, model_name, vector_dimension, chunk_table, search_view);
  RETURN space;
END $$;

REVOKE ALL ON FUNCTION create_vector_space(text, text, integer) FROM PUBLIC;
GRANT USAGE ON SCHEMA readymark TO readymark_ingest, readymark_searcher;
GRANT EXECUTE ON FUNCTION create_vector_space(text, text, integer) TO readymark_ingest;
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA readymark TO readymark_ingest;
REVOKE ALL ON vector_spaces FROM readymark_ingest;
GRANT SELECT ON vector_spaces TO readymark_ingest;
GRANT SELECT ON search_collections, search_documents TO readymark_searcher;
