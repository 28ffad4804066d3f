-- Applied before every migration run, idempotent. Statements are separated by lines of "--;".
-- The login of both roles (password, certificate, peer) is the operator's business.
DO $$ BEGIN
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'readymark_ingest') THEN
    CREATE ROLE readymark_ingest LOGIN;
  END IF;
  IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'readymark_searcher') THEN
    CREATE ROLE readymark_searcher LOGIN;
  END IF;
END $$
--;
-- Settings stand on the role because a pooler in transaction mode loses SET.
ALTER ROLE readymark_ingest SET search_path = readymark, public
--;
ALTER ROLE readymark_ingest SET idle_in_transaction_session_timeout = '60s'
--;
-- The server notices within seconds that a client is gone, even while it waits for a lock:
-- a killed worker must not keep its row locked.
ALTER ROLE readymark_ingest SET client_connection_check_interval = '1s'
--;
ALTER ROLE readymark_searcher SET client_connection_check_interval = '1s'
--;
ALTER ROLE readymark_searcher SET search_path = readymark, public
--;
ALTER ROLE readymark_searcher SET default_transaction_read_only = on
--;
ALTER ROLE readymark_searcher SET statement_timeout = '10s'
--;
ALTER ROLE readymark_searcher SET idle_in_transaction_session_timeout = '30s'
--;
-- A generic plan cannot prove that a partial index applies.
ALTER ROLE readymark_searcher SET plan_cache_mode = 'force_custom_plan'
--;
ALTER ROLE readymark_searcher SET jit = off
--;
ALTER ROLE readymark_searcher SET hnsw.ef_search = 100
--;
-- Without it a filtered index scan returns fewer rows than exist.
ALTER ROLE readymark_searcher SET hnsw.iterative_scan = 'relaxed_order'
