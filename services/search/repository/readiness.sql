-- name: has_search_views
SELECT to_regclass('search_collections') IS NOT NULL AND to_regclass('search_documents') IS NOT NULL AS is_migrated
