"""Connections to PostgreSQL: pools, server requirements, errors.

Owns how we connect; holds no statement of any service. Rows are dicts; a repository
turns them into its own values.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import psycopg.errors
from pgvector.psycopg import register_vector_async
from psycopg import AsyncConnection, sql
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout, TooManyRequests

from shared.errors import DeadlineExceededError, DependencyUnavailableError, OverloadedError

Connection = AsyncConnection[DictRow]
Pool = AsyncConnectionPool[Connection]

# What a lost or refused connection raises; callers outside a repository catch these.
CONNECTION_ERRORS = (psycopg.OperationalError, psycopg.InterfaceError)

MIN_SERVER_VERSION = 150000
# 0.8.2 to 0.8.4 repaired a buffer overflow in parallel builds and a damage of graphs by vacuum.
MIN_PGVECTOR = (0, 8, 4)


class UnsupportedServerError(Exception):
    """The server is too old; the text says what is needed."""


def create_pool(
    url: str, *, application_name: str, min_size: int = 1, max_size: int = 4, timeout_seconds: float = 10.0
) -> Pool:
    """Returns a pool that is not open yet; `await pool.open()` connects.

    Connections are autocommit: a transaction is always one visible `connection.transaction()`.
    """
    return AsyncConnectionPool(
        url,
        connection_class=AsyncConnection[DictRow],
        kwargs={"autocommit": True, "row_factory": dict_row, "application_name": application_name},
        min_size=min_size,
        max_size=max_size,
        timeout=timeout_seconds,
        max_waiting=max_size * 64,
        configure=_configure,
        open=False,
        name=application_name,
    )


async def _configure(connection: Connection) -> None:
    # The types are looked up once a connection; before the first migration there are none.
    with contextlib.suppress(psycopg.ProgrammingError):
        await register_vector_async(connection)


@contextlib.asynccontextmanager
async def connect(pool: Pool) -> AsyncIterator[Connection]:
    """Lends a connection; its failures come out as errors of shared/errors.py."""
    try:
        async with pool.connection() as connection:
            yield connection
    except PoolClosed as error:
        raise DependencyUnavailableError("SHUTTING_DOWN") from error
    except (PoolTimeout, TooManyRequests) as error:
        raise OverloadedError("OVERLOADED", retry_after_seconds=1.0) from error
    except psycopg.errors.QueryCanceled as error:
        raise DeadlineExceededError("DEADLINE_EXCEEDED") from error
    except psycopg.errors.ProgramLimitExceeded:
        # A subclass of OperationalError, but no retry can help: it is for the caller to prevent.
        raise
    except CONNECTION_ERRORS as error:
        raise DependencyUnavailableError("DATABASE_UNAVAILABLE") from error


@contextlib.asynccontextmanager
async def transaction(pool: Pool) -> AsyncIterator[Connection]:
    """Lends a connection inside one transaction: left normally it commits, by an error it rolls back."""
    async with connect(pool) as connection, connection.transaction():
        yield connection


async def dedicated(url: str, *, application_name: str) -> Connection:
    """Returns a connection of its own, outside any pool: for heartbeats and LISTEN."""
    try:
        return await AsyncConnection[DictRow].connect(
            url, autocommit=True, row_factory=dict_row, application_name=application_name, connect_timeout=5
        )
    except CONNECTION_ERRORS as error:
        raise DependencyUnavailableError("DATABASE_UNAVAILABLE") from error


async def listen(connection: Connection, channel: str) -> None:
    """Begins to receive notifications of `channel`; read them by `connection.notifies()`."""
    await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))


async def discard(connection: Connection | None) -> None:
    """Closes a connection that may be broken already."""
    if connection is not None:
        with contextlib.suppress(*CONNECTION_ERRORS):
            await connection.close()


async def require_supported_server(connection: AsyncConnection[Any]) -> None:
    """Raises UnsupportedServerError unless PostgreSQL >= 15 with pgvector >= 0.8.4 is there."""
    version = connection.info.server_version
    if version < MIN_SERVER_VERSION:
        raise UnsupportedServerError(
            f"PostgreSQL {version // 10000} is too old; Readymark needs PostgreSQL 15 or newer."
        )
    cursor = await connection.execute(
        "SELECT coalesce(installed_version, default_version) FROM pg_available_extensions "
        "WHERE name = 'vector'"
    )
    row = await cursor.fetchone()
    if row is None:
        raise UnsupportedServerError("The extension pgvector is not available on this PostgreSQL server.")
    found = next(iter(row.values())) if isinstance(row, dict) else row[0]
    if tuple(int(part) for part in str(found).split(".")[:3]) < MIN_PGVECTOR:
        needed = ".".join(str(part) for part in MIN_PGVECTOR)
        raise UnsupportedServerError(
            f"pgvector {found} is too old; Readymark needs {needed} or newer, "
            "since older ones can damage indexes. Upgrade it, then run ALTER EXTENSION vector UPDATE."
        )
