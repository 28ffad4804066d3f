"""Waits until the database can be searched. Reads the catalogue only, on a connection of its own."""

from __future__ import annotations

import asyncio
import logging

from shared import postgres, sql
from shared.errors import DependencyUnavailableError
from shared.telemetry import log_event

statements = sql.load(__file__)
_logger = logging.getLogger(__name__)

FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 5.0


async def wait_for_database(url: str, *, application_name: str) -> None:
    """Returns once the database answers and is migrated.

    The pool is opened only then: a connection looks up pgvector's types when it is made, and
    before the migration there are none. Raises UnsupportedServerError when it is too old.
    """
    wait_seconds = FIRST_WAIT_SECONDS
    while True:
        problem = await _find_problem(url, application_name)
        if problem is None:
            return
        log_event(_logger, "waiting for database", problem=problem, wait_seconds=wait_seconds)
        await asyncio.sleep(wait_seconds)
        wait_seconds = min(LONGEST_WAIT_SECONDS, wait_seconds * 2)


async def _find_problem(url: str, application_name: str) -> str | None:
    connection = None
    try:
        connection = await postgres.dedicated(url, application_name=application_name)
        await postgres.require_supported_server(connection)
        cursor = await connection.execute(statements.has_search_views)
        row = await cursor.fetchone()
        return None if row and row["is_migrated"] else "it is not migrated yet"
    except DependencyUnavailableError as error:
        return error.message()
    except postgres.CONNECTION_ERRORS:
        return "the connection was lost"
    finally:
        await postgres.discard(connection)
