"""Connections to a real PostgreSQL: every failure comes out as an error of ours."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest

from deploy.local.embedded_postgres import EmbeddedPostgres
from shared import postgres
from shared.errors import DeadlineExceededError, DependencyUnavailableError, OverloadedError
from shared.postgres import Pool, UnsupportedServerError, require_supported_server

DATABASE = "plain"


@pytest.fixture(scope="module")
def url(bare_postgres: EmbeddedPostgres) -> str:
    bare_postgres.create_database(DATABASE)
    return bare_postgres.uri("postgres", DATABASE)


@contextlib.asynccontextmanager
async def opened(url: str, **options: object) -> AsyncIterator[Pool]:
    pool = postgres.create_pool(url, application_name="test", **options)
    await pool.open(wait=True)
    try:
        yield pool
    finally:
        await pool.close()


async def test_a_supported_server_is_accepted(url):
    connection = await postgres.dedicated(url, application_name="test")
    await require_supported_server(connection)
    await connection.close()


async def test_a_server_that_is_too_old_is_refused_with_what_is_needed(url, monkeypatch):
    monkeypatch.setattr(postgres, "MIN_SERVER_VERSION", 990000)
    connection = await postgres.dedicated(url, application_name="test")
    with pytest.raises(UnsupportedServerError, match="PostgreSQL 18 is too old; Readymark needs PostgreSQL"):
        await require_supported_server(connection)
    await connection.close()


async def test_a_pgvector_that_is_too_old_is_refused_with_the_way_to_upgrade(url, monkeypatch):
    monkeypatch.setattr(postgres, "MIN_PGVECTOR", (99, 0, 1))
    connection = await postgres.dedicated(url, application_name="test")
    with pytest.raises(
        UnsupportedServerError, match=r"needs 99\.0\.1 or newer.*ALTER EXTENSION vector UPDATE"
    ):
        await require_supported_server(connection)
    await connection.close()


async def test_a_server_without_pgvector_is_refused(url):
    connection = await postgres.dedicated(url, application_name="test")
    async with connection.transaction(force_rollback=True):
        # Seen first by an unqualified name, as on a server that lacks the package.
        await connection.execute("CREATE SCHEMA hidden")
        await connection.execute(
            "CREATE VIEW hidden.pg_available_extensions AS "
            "SELECT * FROM pg_catalog.pg_available_extensions WHERE name <> 'vector'"
        )
        await connection.execute("SET LOCAL search_path = hidden, pg_catalog")
        with pytest.raises(UnsupportedServerError, match="pgvector is not available"):
            await require_supported_server(connection)
    await connection.close()


async def test_rows_are_dicts_and_vectors_are_known(url):
    async with opened(url) as pool, postgres.connect(pool) as connection:
        row = await (await connection.execute("SELECT 1 AS one, '[1,2]'::vector AS v")).fetchone()
    assert row["one"] == 1
    assert not isinstance(row["v"], str)


async def test_a_transaction_that_is_left_by_an_error_leaves_nothing(url):
    async with opened(url) as pool:
        async with postgres.transaction(pool) as connection:
            await connection.execute("CREATE TABLE IF NOT EXISTS things (id int)")
        with pytest.raises(ZeroDivisionError):
            async with postgres.transaction(pool) as connection:
                await connection.execute("INSERT INTO things VALUES (1)")
                raise ZeroDivisionError
        async with postgres.transaction(pool) as connection:
            await connection.execute("INSERT INTO things VALUES (2)")
        async with postgres.connect(pool) as connection:
            rows = await (await connection.execute("SELECT id FROM things")).fetchall()
    assert rows == [{"id": 2}]


async def test_an_exhausted_pool_is_overload_that_says_when_to_come_back(url):
    async with opened(url, max_size=1, timeout_seconds=0.2) as pool:
        async with postgres.connect(pool):
            began = time.monotonic()
            with pytest.raises(OverloadedError) as caught:
                async with postgres.connect(pool):
                    raise AssertionError("lent twice")
            assert time.monotonic() - began < 2
        assert caught.value.retry_after_seconds == 1.0
        async with postgres.connect(pool) as connection:
            await connection.execute("SELECT 1")


async def test_a_backend_that_is_killed_is_unavailability_and_the_pool_recovers(url):
    async with opened(url) as pool:
        with pytest.raises(DependencyUnavailableError) as caught:
            async with postgres.connect(pool) as connection:
                with psycopg.connect(url, autocommit=True) as admin:
                    admin.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
                await connection.execute("SELECT 1")
        assert caught.value.reason == "DATABASE_UNAVAILABLE"
        async with postgres.connect(pool) as connection:
            await connection.execute("SELECT 1")


async def test_a_backend_killed_in_a_transaction_is_unavailability_too(url):
    async with opened(url) as pool:
        with pytest.raises(DependencyUnavailableError):
            async with postgres.transaction(pool) as connection:
                with psycopg.connect(url, autocommit=True) as admin:
                    admin.execute("SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
                await connection.execute("SELECT 1")


async def test_a_statement_that_runs_too_long_is_a_deadline(url):
    async with opened(url) as pool:
        with pytest.raises(DeadlineExceededError):
            async with postgres.transaction(pool) as connection:
                await connection.execute("SET LOCAL statement_timeout = 50")
                await connection.execute("SELECT pg_sleep(10)")


async def test_a_bug_in_a_statement_is_not_called_unavailability(url):
    async with opened(url) as pool:
        with pytest.raises(psycopg.errors.UndefinedTable):
            async with postgres.connect(pool) as connection:
                await connection.execute("SELECT * FROM no_such_table")


async def test_a_pool_that_is_closed_says_that_the_service_stops(url):
    async with opened(url) as pool:
        pass
    with pytest.raises(DependencyUnavailableError) as caught:
        async with postgres.connect(pool):
            raise AssertionError("lent after the end")
    assert caught.value.reason == "SHUTTING_DOWN"


async def test_cancelling_a_waiting_task_gives_its_place_back(url):
    async with opened(url, max_size=1) as pool:
        async with postgres.connect(pool):

            async def wait() -> None:
                async with postgres.connect(pool):
                    raise AssertionError("lent twice")

            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        async with postgres.connect(pool) as connection:
            await connection.execute("SELECT 1")


async def test_notifications_arrive_on_a_connection_of_its_own(url):
    listener = await postgres.dedicated(url, application_name="test-listener")
    await postgres.listen(listener, "odd channel")
    with psycopg.connect(url, autocommit=True) as sender:
        sender.execute("SELECT pg_notify('odd channel', 'hello')")
    async for notification in listener.notifies(timeout=5, stop_after=1):
        assert notification.payload == "hello"
        break
    else:
        pytest.fail("no notification came")
    await postgres.discard(listener)
    await postgres.discard(listener)
    await postgres.discard(None)


@pytest.fixture
def own_server() -> Iterator[EmbeddedPostgres]:
    folder = Path(tempfile.mkdtemp(prefix="readymark-pg-"))
    folder.chmod(0o755)
    server = EmbeddedPostgres(folder / "data", settings={"fsync": "off"})
    server.start()
    yield server
    shutil.rmtree(folder, ignore_errors=True)


async def test_a_server_that_is_gone_is_unavailability_and_no_wait_without_end(own_server):
    url = own_server.uri("postgres", "postgres")
    async with opened(url, timeout_seconds=0.5) as pool:
        own_server.stop("immediate")
        began = time.monotonic()
        with pytest.raises((DependencyUnavailableError, OverloadedError)):
            async with postgres.connect(pool) as connection:
                await connection.execute("SELECT 1")
        with pytest.raises((DependencyUnavailableError, OverloadedError)):
            async with postgres.connect(pool) as connection:
                await connection.execute("SELECT 1")
        with pytest.raises(DependencyUnavailableError):
            await postgres.dedicated(url, application_name="test")
        assert time.monotonic() - began < 5
