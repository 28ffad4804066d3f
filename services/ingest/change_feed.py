"""One poller a process that reads what changed, once for all watchers.

Each watcher has a bounded set of documents that it has not been told of yet, so that a slow
one holds up nobody and quick changes of a document are told as one. What is told, and in
which order, is watching.py's.

Why nothing is missed: rows carry the transaction that changed them last, and each look reads
all rows from the oldest transaction on that was still running at the look before. A change
that commits late is found by a later look, however long its transaction took.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection

from services.ingest.model import CollectionId, DocumentId
from services.ingest.repository import states
from services.ingest.repository.states import Change, DocumentState
from shared import postgres
from shared.errors import (
    DependencyUnavailableError,
    InternalError,
    OverloadedError,
    ReadymarkError,
)
from shared.postgres import Connection, Pool
from shared.telemetry import log_event

_logger = logging.getLogger(__name__)

# Documents that one watcher may lag behind before it is sent away; it can resume.
MAX_PENDING = 10_000
_PAGE = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Scope:
    """Which documents: the named ones, or else those of a collection, or else all."""

    collection_id: CollectionId | None = None
    document_ids: frozenset[DocumentId] | None = None

    def covers(self, change: Change) -> bool:
        if self.document_ids is not None:
            return change.document_id in self.document_ids
        return self.collection_id in (None, change.collection_id)


class Subscription:
    """What one watcher has not been told of yet."""

    def __init__(self, scope: Scope, position: int) -> None:
        self.scope = scope
        self.pending: OrderedDict[DocumentId, DocumentState | None] = OrderedDict()
        # Everything before it has been put into `pending`.
        self.position = position
        self.error: ReadymarkError | None = None
        self.woken = asyncio.Event()

    def put(self, document_id: DocumentId, state: DocumentState | None) -> None:
        self.pending[document_id] = state
        if len(self.pending) > MAX_PENDING:
            self.end(OverloadedError("OVERLOADED", retry_after_seconds=1.0))
        self.woken.set()

    def end(self, error: ReadymarkError) -> None:
        self.error = error
        self.woken.set()


class ChangeFeed:
    """The poller. Asks the database only while somebody watches."""

    def __init__(self, pool: Pool, *, poll_seconds: float) -> None:
        self._pool = pool
        self._poll_seconds = poll_seconds
        self._subscriptions: set[Subscription] = set()
        self._position = 0
        # Changes since `_position` that were passed on already, since the next look sees them again.
        self._seen: set[Change] = set()
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def subscribe(self, scope: Scope) -> AsyncIterator[Subscription]:
        """Lends a subscription to all changes that commit from now on."""
        async with self._starting:
            if self._is_closed:
                raise DependencyUnavailableError("SHUTTING_DOWN")
            if self._task is None:
                async with postgres.connect(self._pool) as connection:
                    self._position = await states.get_position(connection)
                self._seen.clear()
                self._task = asyncio.create_task(self._poll_for_ever(), name="change-feed")
                self._task.add_done_callback(self._report_end)
            subscription = Subscription(scope, self._position)
            self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
            if not self._subscriptions:
                self._stop()

    async def close(self) -> None:
        """Ends all watches with SHUTTING_DOWN; new ones are refused."""
        self._is_closed = True
        for subscription in self._subscriptions:
            subscription.end(DependencyUnavailableError("SHUTTING_DOWN"))
        task = self._task
        self._stop()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _report_end(self, task: asyncio.Task[None]) -> None:
        """A poller that dies of a bug must not look like a quiet day."""
        if task.cancelled():
            return
        log_event(_logger, "change feed died", logging.ERROR, error=repr(task.exception()))
        self._task = None
        for subscription in self._subscriptions:
            subscription.end(InternalError("INTERNAL", trace_id="-"))

    async def _poll_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._poll_seconds)
            try:
                await self._look()
            except ReadymarkError as error:
                # The position has not moved, so nothing is lost; watchers see it as a pause.
                log_event(_logger, "looking for changes failed", logging.WARNING, reason=error.reason)

    async def _look(self) -> None:
        async with postgres.connect(self._pool) as connection:
            position, changes = await states.list_changes(connection, self._position)
            fresh = [change for change in changes if change not in self._seen]
            wanted = [change for change in fresh if self._is_wanted(change)]
            loaded = await load_all(connection, {change.document_id for change in wanted})
        for subscription in self._subscriptions:
            for change in wanted:
                if subscription.scope.covers(change):
                    subscription.put(change.document_id, loaded.get(change.document_id))
            subscription.position = position
        self._seen = set(changes)
        self._position = position

    def _is_wanted(self, change: Change) -> bool:
        return any(subscription.scope.covers(change) for subscription in self._subscriptions)


async def load_all(
    connection: Connection, document_ids: Collection[DocumentId]
) -> dict[DocumentId, DocumentState]:
    """Returns the documents that exist, by id, however many there are."""
    loaded: dict[DocumentId, DocumentState] = {}
    ids = sorted(document_ids)
    for start in range(0, len(ids), _PAGE):
        loaded |= await states.load_states(connection, ids[start : start + _PAGE])
    return loaded
