"""Applies the migrations, each once, in order, in one transaction each, under an advisory lock.

Needs a connection of the migrator role straight to the primary: through a pooler in
transaction mode a session lock is not held. Forward only; there is no way back here.
"""

from __future__ import annotations

import logging
from pathlib import Path

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import DictRow

from shared import postgres
from shared.postgres import require_supported_server
from shared.telemetry import log_event

_FOLDER = Path(__file__).parent.parent / "migrations"
_LOCK = 7_264_013
# A dump restored into a new server brings transaction ids that this server has not reached; a
# watcher would take those rows for changes for ever.
_PULL_BACK_CHANGES = (
    "UPDATE readymark.document_versions SET changed_xid = pg_current_xact_id() "
    "WHERE changed_xid > pg_current_xact_id()"
)
_logger = logging.getLogger(__name__)


class MigrationError(Exception):
    """The database could not be brought up to date; the text says what is missing."""


class SchemaTooOldError(Exception):
    """The database misses migrations this release needs; run `python -m services.ingest migrate`."""


def migration_files() -> list[Path]:
    return sorted(_FOLDER.glob("[0-9][0-9][0-9][0-9]_*.sql"))


async def migrate(url: str) -> list[str]:
    """Brings the database at `url` up to date; returns the names of what was applied.

    Raises UnsupportedServerError when PostgreSQL or pgvector is too old, DependencyUnavailableError
    when nobody answers, MigrationError when the role may not do it.
    """
    try:
        return await _migrate(url)
    except psycopg.errors.InsufficientPrivilege as error:
        raise MigrationError(
            f"The role that migrates lacks a right: {error.diag.message_primary}. It needs CREATE on the "
            "database, CREATEROLE (or the roles readymark_ingest and readymark_searcher made beforehand, "
            "with ADMIN on both), and the extension vector, which a superuser may have to create first."
        ) from error
    except psycopg.OperationalError as error:
        raise MigrationError(f"The database cannot be reached: {str(error).splitlines()[0]}") from error


async def _migrate(url: str) -> list[str]:
    connection = await postgres.dedicated(url, application_name="readymark-migrate")
    async with connection:
        await require_supported_server(connection)
        await connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
        await connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        # The type's first use loads the library; before that hnsw.* are not known as settings.
        await connection.execute("SELECT '[1]'::vector")
        for statement in (_FOLDER / "roles.sql").read_text(encoding="utf-8").split("--;\n"):
            await connection.execute(sql.SQL(statement))
        return await _apply(connection)


async def _apply(connection: AsyncConnection[DictRow]) -> list[str]:
    await connection.execute(
        "CREATE TABLE IF NOT EXISTS public.readymark_migrations "
        "(number integer PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
    )
    await connection.execute("GRANT SELECT ON public.readymark_migrations TO readymark_ingest")
    done = await applied_numbers(connection)
    applied = []
    for path in migration_files():
        number = int(path.name[:4])
        if number in done:
            continue
        async with connection.transaction():
            await connection.execute(path.read_bytes())
            await connection.execute(
                "INSERT INTO public.readymark_migrations (number, name) VALUES (%s, %s)", (number, path.stem)
            )
        log_event(_logger, "migration applied", name=path.stem)
        applied.append(path.stem)
    await connection.execute(_PULL_BACK_CHANGES)
    return applied


async def applied_numbers(connection: AsyncConnection[DictRow]) -> set[int]:
    cursor = await connection.execute("SELECT number FROM public.readymark_migrations")
    return {int(row["number"]) for row in await cursor.fetchall()}


async def require_current_schema(connection: AsyncConnection[DictRow]) -> None:
    """Raises SchemaTooOldError when a migration of this release is missing."""
    cursor = await connection.execute(
        "SELECT to_regclass('public.readymark_migrations') IS NOT NULL AS there"
    )
    row = await cursor.fetchone()
    done = await applied_numbers(connection) if row and row["there"] else set()
    missing = [path.stem for path in migration_files() if int(path.name[:4]) not in done]
    if missing:
        raise SchemaTooOldError(
            f"The database misses {', '.join(missing)}; run `python -m services.ingest migrate` first."
        )
