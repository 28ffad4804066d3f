"""Applies the migrations, each once, in order, in one transaction each, under an advisory lock.

Needs a connection of the migrator role straight to the primary: through a pooler in
transaction mode a session lock is not held. Forward only; there is no way back here.
"""

from __future__ import annotations

import logging
from pathlib import Path

from psycopg import AsyncConnection, sql
from psycopg.rows import DictRow, dict_row

from shared.postgres import require_supported_server
from shared.telemetry import log_event

_FOLDER = Path(__file__).parent.parent / "migrations"
_LOCK = 7_264_013
_logger = logging.getLogger(__name__)


class SchemaTooOldError(Exception):
    """The database misses migrations this release needs; run `python -m services.ingest migrate`."""


def migration_files() -> list[Path]:
    return sorted(_FOLDER.glob("[0-9][0-9][0-9][0-9]_*.sql"))


async def migrate(url: str) -> list[str]:
    """Brings the database at `url` up to date; returns the names of what was applied.

    Raises UnsupportedServerError when PostgreSQL or pgvector is too old.
    """
    connection = await AsyncConnection[DictRow].connect(
        url, autocommit=True, row_factory=dict_row, application_name="readymark-migrate"
    )
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
