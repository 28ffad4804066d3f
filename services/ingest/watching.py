"""Watches documents: their state first, then every change, without a gap; resumable.

Owns what a watcher is told and the tokens to go on from. Where changes come from is
change_feed.py's.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import hashlib
import sys
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

from services.ingest.change_feed import ChangeFeed, Scope, Subscription, load_all
from services.ingest.lifecycle import SETTLED
from services.ingest.model import DocumentId
from services.ingest.names import DocumentName, parse_collection_or_any, parse_document
from services.ingest.repository import states
from services.ingest.repository.states import DocumentState
from shared import postgres
from shared.errors import InvalidArgumentError, ResourceNotFoundError
from shared.postgres import Pool

MAX_NAMES = 1000
# What a watch remembers to have told. A forgotten entry costs a repeated event, never a lost one.
MAX_REMEMBERED = 10_000
_PAGE = 500
_GONE = (sys.maxsize, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    state: DocumentState


@dataclasses.dataclass(frozen=True, slots=True)
class Changed:
    state: DocumentState


@dataclasses.dataclass(frozen=True, slots=True)
class Deleted:
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class SignOfLife:
    """The first states are all told, or nothing has changed for a while."""


Event = Snapshot | Changed | Deleted | SignOfLife


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """An event, and the token that goes on right after it, at the latest."""

    event: Event
    resume_token: str


class WatchService:
    """The use case WatchDocuments."""

    def __init__(self, pool: Pool, feed: ChangeFeed, *, heartbeat_seconds: float) -> None:
        self._pool = pool
        self._feed = feed
        self._heartbeat_seconds = heartbeat_seconds

    async def watch(
        self, parent: str, names: Sequence[str], *, resume_token: str, until_settled: bool
    ) -> AsyncGenerator[Told, None]:
        """Yields the state of each document, or what changed since the token; then every change.

        Follows `names`, or without any the documents of `parent`. Ends when `until_settled` and
        each named document is READY, FAILED or deleted.
        """
        if until_settled and not names:
            raise InvalidArgumentError("FIELD_INVALID", field="until_settled", problem="NEEDS_NAMES")
        watch = await self._open(parent, names, until_settled=until_settled)
        resumed_at = watch.decode_token(resume_token)
        # Subscribed before the first look: what commits in between is told by one or by both.
        async with self._feed.subscribe(watch.scope) as subscription:
            async for told in self._begin(watch, resumed_at):
                yield told
            while not watch.is_done:
                async for told in self._follow(watch, subscription):
                    yield told

    async def _open(self, parent: str, names: Sequence[str], *, until_settled: bool) -> _Watch:
        if len(names) > MAX_NAMES:
            raise InvalidArgumentError(
                "FIELD_INVALID", field="names", problem="TOO_MANY_ENTRIES", actual=len(names), limit=MAX_NAMES
            )
        if names:
            parsed = [parse_document(name, field="names") for name in names]
            by_id = {name.document_id: name for name in parsed}
            return _Watch(Scope(document_ids=frozenset(by_id)), by_id, None, until_settled=until_settled)
        collection = parse_collection_or_any(parent)
        if collection is None:
            return _Watch(Scope(), {}, None, until_settled=False)
        async with postgres.connect(self._pool) as connection:
            found = await states.find_collection(connection, collection)
        if found is None:
            raise ResourceNotFoundError("COLLECTION_NOT_FOUND", collection=collection)
        return _Watch(Scope(found.collection_id), {}, collection, until_settled=False)

    async def _begin(self, watch: _Watch, resumed_at: int | None) -> AsyncIterator[Told]:
        async with postgres.connect(self._pool) as connection:
            if resumed_at is None:
                position = await states.get_position(connection)
                changed = None
            else:
                position, changes = await states.list_changes(connection, resumed_at)
                changed = [change.document_id for change in changes if watch.scope.covers(change)]
        # Until all of the first states are told, a resumed watch has to begin where this one did.
        token = watch.encode_token(resumed_at or 0)
        async for page in self._first_pages(watch, changed):
            for document_id, state in page.items():
                event = watch.note(document_id, state, is_first=resumed_at is None)
                if event is not None:
                    yield Told(event, token)
        if changed is not None:
            # What did not change since the token may be settled already.
            async with postgres.connect(self._pool) as connection:
                ids = watch.scope.document_ids or frozenset()
                loaded = await load_all(connection, ids)
            watch.settle({document_id: loaded.get(document_id) for document_id in ids})
        watch.told_up_to = position
        if not watch.is_done:
            yield Told(SignOfLife(), watch.encode_token(position))

    async def _first_pages(
        self, watch: _Watch, changed: Sequence[DocumentId] | None
    ) -> AsyncIterator[Mapping[DocumentId, DocumentState | None]]:
        """Yields the states to begin with; None for a document that is not there (any more)."""
        ids = changed if changed is not None else watch.scope.document_ids
        if ids is not None:
            ordered = sorted(set(ids))
            for start in range(0, len(ordered), _PAGE):
                some = ordered[start : start + _PAGE]
                async with postgres.connect(self._pool) as connection:
                    loaded = await states.load_states(connection, some)
                yield {document_id: loaded.get(document_id) for document_id in some}
            return
        before = None
        while True:
            async with postgres.connect(self._pool) as connection:
                keys = await states.list_document_ids(
                    connection,
                    collection_id=watch.scope.collection_id,
                    status=None,
                    before=before,
                    max_documents=_PAGE,
                )
                page = await states.load_states(connection, [document_id for _, document_id in keys])
            yield page
            if len(keys) < _PAGE:
                return
            before = keys[-1]

    async def _follow(self, watch: _Watch, subscription: Subscription) -> AsyncIterator[Told]:
        """Yields what is pending, or a sign of life when there is nothing for a while."""
        if not subscription.pending:
            watch.told_up_to = max(watch.told_up_to, subscription.position)
            if subscription.error is None and not await self._is_woken(subscription):
                yield Told(SignOfLife(), watch.encode_token(subscription.position))
                return
        token = watch.encode_token(watch.told_up_to)
        while subscription.pending and not watch.is_done:
            document_id, state = subscription.pending.popitem(last=False)
            if not subscription.pending:
                watch.told_up_to = max(watch.told_up_to, subscription.position)
                token = watch.encode_token(watch.told_up_to)
            event = watch.note(document_id, state, is_first=False)
            if event is not None:
                yield Told(event, token)
        if subscription.error is not None and not watch.is_done:
            raise subscription.error

    async def _is_woken(self, subscription: Subscription) -> bool:
        subscription.woken.clear()
        try:
            async with asyncio.timeout(self._heartbeat_seconds):
                await subscription.woken.wait()
        except TimeoutError:
            return False
        return True


class _Watch:
    """What one watch follows and has told so far."""

    def __init__(
        self,
        scope: Scope,
        names: Mapping[DocumentId, DocumentName],
        collection: str | None,
        *,
        until_settled: bool,
    ) -> None:
        self.scope = scope
        # Every change of an older transaction is told.
        self.told_up_to = 0
        self._names = names
        self._collection = collection
        self._unsettled = set(names) if until_settled else None
        self._told: OrderedDict[DocumentId, tuple[int, int]] = OrderedDict()

    @property
    def is_done(self) -> bool:
        return self._unsettled is not None and not self._unsettled

    def note(self, document_id: DocumentId, state: DocumentState | None, *, is_first: bool) -> Event | None:
        """Returns the event to send; None when this or something newer was sent before."""
        name = self._names.get(document_id, DocumentName(self._collection, document_id))
        if state is not None and name.collection not in (None, state.collection):
            # The id exists, but not under this name.
            state = None
        self.settle({document_id: state})
        revision = _GONE if state is None else (state.version_id, state.revision)
        if self._told.get(document_id, (0, 0)) >= revision:
            return None
        self._told[document_id] = revision
        self._told.move_to_end(document_id)
        if len(self._told) > MAX_REMEMBERED:
            self._told.popitem(last=False)
        if state is None:
            return Deleted(str(name))
        return Snapshot(state) if is_first else Changed(state)

    def settle(self, loaded: Mapping[DocumentId, DocumentState | None]) -> None:
        if self._unsettled is not None:
            self._unsettled -= {
                document_id
                for document_id, state in loaded.items()
                if state is None or state.status in SETTLED
            }

    def encode_token(self, position: int) -> str:
        """Returns an opaque token for everything that changed at or after `position`; 0 begins anew."""
        text = f"{position}:{self._digest()}"
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    def decode_token(self, token: str) -> int | None:
        """Returns the position, None to begin anew; a token of another watch is an InvalidArgumentError."""
        if not token:
            return None
        try:
            text = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
            position, _, digest = text.partition(":")
            if digest != self._digest() or not position.isascii() or int(position) >= 1 << 63:
                raise ValueError(token)
        except (ValueError, binascii.Error):
            raise InvalidArgumentError("RESUME_TOKEN_INVALID", field="resume_token") from None
        return int(position) or None

    def _digest(self) -> str:
        scope = self.scope
        parts = [str(scope.collection_id)] if scope.document_ids is None else sorted(scope.document_ids)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
