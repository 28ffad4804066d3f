"""Migrations on a real server: each once, in order; what is missing is said in a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from deploy.local.embedded_postgres import MIGRATOR, EmbeddedPostgres
from services.ingest.repository import migrating
from services.ingest.repository.migrating import MigrationError, SchemaTooOldError
from shared import postgres
from shared.errors import DependencyUnavailableError
from shared.postgres import Pool
from tests.support import rows
from tests.support.databases import Database

ROOT = Path(__file__).parents[3]


async def test_a_second_run_applies_nothing(database: Database) -> None:
    assert await migrating.migrate(database.migrator_url) == []


async def test_two_migrations_at_once_apply_each_file_once(postgres_server: EmbeddedPostgres) -> None:
    import asyncio

    postgres_server.drop_database("readymark_twice")
    postgres_server.create_database("readymark_twice")
    url = postgres_server.uri(MIGRATOR, "readymark_twice")
    try:
        applied = await asyncio.gather(migrating.migrate(url), migrating.migrate(url))
        assert sorted(len(names) for names in applied) == [0, len(migrating.migration_files())]
    finally:
        postgres_server.drop_database("readymark_twice")


async def test_a_process_refuses_a_database_that_misses_a_migration(pool: Pool, database: Database) -> None:
    with psycopg.connect(database.superuser_url, autocommit=True) as connection:
        connection.execute("DELETE FROM public.readymark_migrations")
    async with postgres.connect(pool) as connection_:
        with pytest.raises(SchemaTooOldError, match=r"services\.ingest migrate"):
            await migrating.require_current_schema(connection_)


async def test_a_database_that_does_not_answer_is_a_sentence() -> None:
    with pytest.raises(DependencyUnavailableError):
        await migrating.migrate("postgresql://nobody@/nothing?host=/nonexistent")


async def test_a_role_without_rights_is_told_what_it_needs(
    postgres_server: EmbeddedPostgres, database: Database
) -> None:
    with psycopg.connect(database.superuser_url, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS readymark_powerless")
        connection.execute("CREATE ROLE readymark_powerless LOGIN")
    with pytest.raises(MigrationError, match="CREATEROLE"):
        await migrating.migrate(postgres_server.uri("readymark_powerless", database.name))


def test_the_command_says_it_in_one_line_and_exits_with_one() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "services.ingest", "migrate"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([".", "client", "protos/generated"]),
            "READYMARK_INGEST_DATABASE_URL": "postgresql://nobody@/nothing?host=/nonexistent",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    assert "cannot migrate" in run.stderr
    assert "Traceback" not in run.stderr


async def test_changes_of_a_restored_dump_are_pulled_back_behind_the_new_counter(
    pool: Pool, database: Database
) -> None:
    """Otherwise every look of a watcher would take those rows for changes."""
    await rows.submit(pool)
    await rows.execute(pool, "UPDATE document_versions SET changed_xid = '99999999999'::xid8")
    await migrating.migrate(database.migrator_url)
    (row,) = await rows.execute(
        pool, "SELECT bool_and(changed_xid <= pg_current_xact_id()) AS behind FROM document_versions"
    )
    assert row["behind"]
