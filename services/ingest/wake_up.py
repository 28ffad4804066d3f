"""Tells the worker at once that a job became due, by LISTEN; a jittered poll stands behind it.

A pooler may swallow notifications without an error, so nothing ever depends on them: they
only shorten the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random

from services.ingest.repository.jobs import WAKE_UP_CHANNEL
from shared import postgres
from shared.errors import DependencyUnavailableError
from shared.postgres import Connection
from shared.telemetry import log_event

_logger = logging.getLogger(__name__)


class WakeUp:
    """`wait` returns after a notification, a poll interval or `set`, whichever comes first."""

    def __init__(self, database_url: str, *, poll_seconds: float, application_name: str) -> None:
        self._database_url = database_url
        self._poll_seconds = poll_seconds
        self._application_name = application_name
        self._event = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._listen_for_ever(), name="wake-up")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        # Poll +- 10 %: workers that started together must not ask together for ever.
        seconds = self._poll_seconds * random.uniform(0.9, 1.1)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), seconds)
        self._event.clear()

    async def _listen_for_ever(self) -> None:
        while True:
            connection: Connection | None = None
            try:
                connection = await postgres.dedicated(
                    self._database_url, application_name=self._application_name
                )
                await postgres.listen(connection, WAKE_UP_CHANNEL)
                # Whatever came before LISTEN was not heard: look once.
                self._event.set()
                async for _ in connection.notifies():
                    self._event.set()
            except (DependencyUnavailableError, *postgres.CONNECTION_ERRORS) as error:
                log_event(_logger, "wake-up connection lost", logging.WARNING, error=type(error).__name__)
            finally:
                await postgres.discard(connection)
            await asyncio.sleep(self._poll_seconds)
