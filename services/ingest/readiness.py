"""Waits for a database that a process of this release can work with."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from services.ingest.repository import migrating
from shared import postgres
from shared.errors import DependencyUnavailableError, OverloadedError
from shared.postgres import Pool
from shared.telemetry import log_event

_logger = logging.getLogger(__name__)
RETRY_SECONDS = 1.0


async def wait_for_database(pool: Pool, stopping: asyncio.Event) -> bool:
    """Opens `pool` and returns True once the database answers; False when asked to stop before.

    Raises SchemaTooOldError and UnsupportedServerError: waiting does not cure those.
    """
    await pool.open(wait=False)
    while not stopping.is_set():
        try:
            async with postgres.connect(pool) as connection:
                await postgres.require_supported_server(connection)
                await migrating.require_current_schema(connection)
                return True
        except (DependencyUnavailableError, OverloadedError) as error:
            log_event(_logger, "database not reachable yet", logging.WARNING, reason=error.reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), RETRY_SECONDS)
    return False
