"""Watching over real gRPC and a real PostgreSQL: no change is missed, whenever it commits."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from readymark.ingest.v1 import ingest_service_pb2 as pb

from services.ingest import change_feed
from services.ingest.lifecycle import DocumentStatus
from services.ingest.repository import jobs
from shared import postgres
from shared.errors import (
    DependencyUnavailableError,
    InvalidArgumentError,
    OverloadedError,
    ReadymarkError,
    ResourceNotFoundError,
)
from tests.ingest.conftest import Api, StartApi
from tests.support.documents import advance, claim, fail, publish, upload

Events = AsyncIterator[pb.WatchDocumentsResponse]


class Watcher:
    """Follows a watch and waits for what is expected of it; heartbeats are left out."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.token = ""
        self.all: list[pb.WatchDocumentsResponse] = []

    async def next(self) -> pb.WatchDocumentsResponse:
        async with asyncio.timeout(20):
            while True:
                event = await anext(self._events)
                self.token = event.resume_token
                self.all.append(event)
                if event.WhichOneof("event") != "heartbeat":
                    return event

    async def until(
        self, is_enough: Callable[[pb.WatchDocumentsResponse], bool]
    ) -> pb.WatchDocumentsResponse:
        while not is_enough(event := await self.next()):
            pass
        return event

    async def rest(self) -> list[pb.WatchDocumentsResponse]:
        async with asyncio.timeout(20):
            return [event async for event in self._events if event.WhichOneof("event") != "heartbeat"]


@contextlib.asynccontextmanager
async def watching(api: Api, **fields: object) -> AsyncIterator[Watcher]:
    events = api.stub.WatchDocuments(pb.WatchDocumentsRequest(**fields))
    try:
        yield Watcher(events)
    finally:
        await events.aclose()  # type: ignore[attr-defined]


async def test_states_come_first_then_changes_then_the_deletion(api: Api) -> None:
    name = (await upload(api.stub)).document.name
    async with watching(api, names=[name]) as watcher:
        assert (await watcher.next()).snapshot.status == pb.DOCUMENT_STATUS_PENDING
        lease = await claim(api.pool)
        for stage in (DocumentStatus.PARSING, DocumentStatus.CHUNKING):
            await jobs.begin_stage(api.pool, lease, stage, trace_id=None)
            wanted = pb.DocumentStatus.Value(f"DOCUMENT_STATUS_{stage}")
            await watcher.until(lambda event, wanted=wanted: event.changed.status == wanted)
        await fail(api.pool, lease)
        failed = await watcher.until(lambda event: event.changed.status == pb.DOCUMENT_STATUS_FAILED)
        assert failed.changed.failure.reason == "NO_TEXT"
        await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=name))
        assert (await watcher.next()).deleted_name == name


async def test_a_collection_is_watched_with_what_is_added_later(api: Api) -> None:
    first = (await upload(api.stub)).document.name
    await upload(api.stub, parent="collections/other")
    async with watching(api, parent="collections/tests") as watcher:
        assert (await watcher.next()).snapshot.name == first
        await upload(api.stub, b"elsewhere", parent="collections/other")
        second = (await upload(api.stub, b"2")).document.name
        assert (await watcher.next()).changed.name == second
        await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=second))
        assert (await watcher.next()).deleted_name == second


async def test_a_watch_until_settled_ends_when_every_document_is(api: Api) -> None:
    names = [(await upload(api.stub, b"%d" % number)).document.name for number in range(4)]
    await publish(api.pool, api.blobs, await claim(api.pool))
    async with watching(api, names=names, until_settled=True) as watcher:
        for _ in names:
            await watcher.next()
        await fail(api.pool, await claim(api.pool))
        await api.stub.CancelDocument(pb.CancelDocumentRequest(name=names[2]))
        await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=names[3]))
        last = {}
        for event in await watcher.rest():
            last[event.changed.name or event.deleted_name] = event.changed.status
    assert last == {
        names[1]: pb.DOCUMENT_STATUS_FAILED,
        names[2]: pb.DOCUMENT_STATUS_FAILED,
        names[3]: pb.DOCUMENT_STATUS_UNSPECIFIED,
    }
    async with watching(api, names=names, until_settled=True) as watcher:
        assert len(await watcher.rest()) == 4, "all are settled: told once, then over"


async def test_a_document_that_never_was_counts_as_deleted(api: Api) -> None:
    name = "collections/tests/documents/00000000-0000-0000-0000-000000000007"
    async with watching(api, names=[name], until_settled=True) as watcher:
        assert [event.deleted_name for event in await watcher.rest()] == [name]


async def test_a_change_in_a_transaction_that_commits_late_is_told(api: Api) -> None:
    """The trap of every watch by sequence or time: A begins before B and commits after it was told."""
    late = (await upload(api.stub)).document.name
    early = (await upload(api.stub, b"2")).document.name
    async with watching(api, parent="collections/tests") as watcher:
        await watcher.next()
        await watcher.next()
        async with postgres.transaction(api.pool) as connection:
            await connection.execute(
                "UPDATE document_versions SET title = 'late', revision = revision + 1, "
                "changed_xid = pg_current_xact_id() WHERE document_id = %s",
                (late.rsplit("/", 1)[1],),
            )
            for turn in range(3):
                await touch(api, early, f"early {turn}")
                title = f"early {turn}"
                await watcher.until(lambda event, title=title: event.changed.title == title)
            # Resumed from here, the late change must not be lost either.
            token = watcher.token
        assert (await watcher.next()).changed.title == "late"
    async with watching(api, parent="collections/tests", resume_token=token) as watcher:
        await watcher.until(lambda event: event.changed.title == "late")


async def touch(api: Api, name: str, title: str) -> None:
    async with postgres.transaction(api.pool) as connection:
        await connection.execute(
            "UPDATE document_versions SET title = %s, revision = revision + 1, "
            "changed_xid = pg_current_xact_id() WHERE document_id = %s",
            (title, name.rsplit("/", 1)[1]),
        )


@pytest.mark.parametrize("seed", range(3))
async def test_no_change_is_missed_under_concurrent_writers_of_any_length(api: Api, seed: int) -> None:
    """Writers hold their transactions open for random times; watchers break off and resume at random.

    They break off after the first states at the earliest: until then a watch begins anew.
    """
    dice = random.Random(seed)
    names = [(await upload(api.stub, b"%d" % number)).document.name for number in range(8)]
    final = {name: f"{name} is done" for name in names}

    async def writer(mine: list[str]) -> None:
        for turn in range(10):
            name = dice.choice(mine)
            async with postgres.transaction(api.pool) as connection:
                await connection.execute(
                    "UPDATE document_versions SET title = %s, revision = revision + 1, "
                    "changed_xid = pg_current_xact_id() WHERE document_id = %s",
                    (f"turn {turn}", name.rsplit("/", 1)[1]),
                )
                await asyncio.sleep(dice.random() * 0.15)
        for name in mine:
            await touch(api, name, final[name])

    async def watcher(is_restless: bool) -> None:
        seen: dict[str, str] = {}
        token = ""
        while seen != final:
            async with watching(api, parent="collections/tests", resume_token=token) as watch:
                for _ in range(dice.randint(9, 14) if is_restless else 10_000):
                    event = await watch.next()
                    state = event.changed if event.HasField("changed") else event.snapshot
                    seen[state.name] = state.title
                    # What a client would store: only what came with an event that it has dealt with.
                    token = watch.token
                    if seen == final:
                        return

    writers = [writer(names[start::4]) for start in range(4)]
    await asyncio.wait_for(asyncio.gather(*writers, watcher(True), watcher(False), watcher(True)), 60)


async def test_a_resumed_watch_tells_only_what_changed_since(api: Api) -> None:
    unchanged = (await upload(api.stub)).document.name
    changed = (await upload(api.stub, b"2")).document.name
    deleted = (await upload(api.stub, b"3")).document.name
    async with watching(api, parent="collections/tests") as watcher:
        for _ in range(3):
            await watcher.next()
        await touch(api, changed, "before")
        await watcher.next()
        token = watcher.token
    await touch(api, changed, "after")
    await api.stub.DeleteDocument(pb.DeleteDocumentRequest(name=deleted))
    async with watching(api, parent="collections/tests", resume_token=token) as watcher:
        told = [await watcher.next(), await watcher.next()]
        await touch(api, unchanged, "now it is")
        told.append(await watcher.next())
    titles = {event.changed.name or event.deleted_name: event.changed.title for event in told}
    assert titles == {changed: "after", deleted: "", unchanged: "now it is"}


async def test_a_resumed_watch_until_settled_knows_what_is_settled_already(api: Api) -> None:
    names = [(await upload(api.stub, b"%d" % number)).document.name for number in range(2)]
    await fail(api.pool, await claim(api.pool))
    async with watching(api, names=names) as watcher:
        await watcher.next()
        await watcher.next()
        await touch(api, names[1], "x")
        await watcher.next()
        token = watcher.token
    await fail(api.pool, await claim(api.pool))
    async with watching(api, names=names, until_settled=True, resume_token=token) as watcher:
        told = await watcher.rest()
    assert [event.changed.name for event in told] == [names[1]]


async def test_quiet_watches_give_a_sign_of_life_with_a_token(start_api: StartApi) -> None:
    api = await start_api(watch_heartbeat_seconds=0.1)
    await upload(api.stub)
    events = api.stub.WatchDocuments(pb.WatchDocumentsRequest(parent="collections/tests"))
    kinds = []
    async with asyncio.timeout(10):
        async for event in events:
            kinds.append(event.WhichOneof("event"))
            assert event.resume_token
            if len(kinds) == 4:
                break
    assert kinds == ["snapshot", "heartbeat", "heartbeat", "heartbeat"]


async def test_watches_end_with_shutting_down_when_the_server_stops(api: Api) -> None:
    await upload(api.stub)
    async with watching(api, parent="collections/tests") as watcher:
        await watcher.next()
        stopping = asyncio.create_task(api.server.stop())
        with pytest.raises(DependencyUnavailableError) as caught:
            await watcher.next()
        assert caught.value.reason == "SHUTTING_DOWN"
        await asyncio.wait_for(stopping, 10)


async def test_a_watcher_that_lags_too_far_behind_is_sent_away(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feed, "MAX_PENDING", 2)
    for number in range(5):
        await upload(api.stub, b"%d" % number)
    async with watching(api, parent="collections/tests") as watcher:
        for _ in range(5):
            await watcher.next()
        async with postgres.transaction(api.pool) as connection:
            await connection.execute(
                "UPDATE document_versions SET revision = revision + 1, changed_xid = pg_current_xact_id()"
            )
        with pytest.raises(OverloadedError):
            await watcher.rest()


async def test_nobody_asks_the_database_while_nobody_watches(api: Api) -> None:
    await upload(api.stub)
    async with watching(api, parent="collections/tests") as watcher:
        await watcher.next()
        assert api.server._feed._task is not None
    async with asyncio.timeout(10):
        while api.server._feed._task is not None:
            await asyncio.sleep(0.01)


async def test_a_database_that_is_away_for_a_moment_costs_no_change(api: Api) -> None:
    name = (await upload(api.stub)).document.name
    async with watching(api, names=[name]) as watcher:
        await watcher.next()
        async with postgres.connect(api.pool) as connection:
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'test' AND pid <> pg_backend_pid() AND datname = current_database()"
            )
        await retried(lambda: touch(api, name, "after the fault"))
        await watcher.until(lambda event: event.changed.title == "after the fault")


async def retried(call: Callable[[], Awaitable[None]]) -> None:
    for _ in range(20):
        try:
            return await call()
        except DependencyUnavailableError:
            await asyncio.sleep(0.05)
    raise AssertionError("the database did not come back")


@pytest.mark.parametrize(
    ("fields", "error", "reason"),
    [
        ({}, InvalidArgumentError, "FIELD_REQUIRED"),
        ({"parent": "collections/none"}, ResourceNotFoundError, "COLLECTION_NOT_FOUND"),
        ({"names": ["x"]}, InvalidArgumentError, "FIELD_INVALID"),
        ({"parent": "collections/-", "until_settled": True}, InvalidArgumentError, "FIELD_INVALID"),
        ({"parent": "collections/-", "resume_token": "文"}, InvalidArgumentError, "RESUME_TOKEN_INVALID"),
        ({"parent": "collections/-", "resume_token": "MTIz"}, InvalidArgumentError, "RESUME_TOKEN_INVALID"),
    ],
)
async def test_a_watch_that_cannot_be_is_refused(
    api: Api, fields: dict[str, object], error: type[ReadymarkError], reason: str
) -> None:
    async with watching(api, **fields) as watcher:
        with pytest.raises(error) as caught:
            await watcher.next()
    assert caught.value.reason == reason


async def test_a_token_of_another_watch_is_refused(api: Api) -> None:
    name = (await upload(api.stub)).document.name
    async with watching(api, names=[name]) as watcher:
        await watcher.next()
        token = watcher.token
    async with watching(api, parent="collections/tests", resume_token=token) as watcher:
        with pytest.raises(InvalidArgumentError):
            await watcher.next()


async def test_more_than_a_thousand_names_are_refused(api: Api) -> None:
    names = [f"collections/-/documents/00000000-0000-0000-0000-{number:012d}" for number in range(1001)]
    async with watching(api, names=names) as watcher:
        with pytest.raises(InvalidArgumentError):
            await watcher.next()
    async with watching(api, names=names[:1000], until_settled=True) as watcher:
        assert len(await watcher.rest()) == 1000


async def test_the_feed_reads_once_for_many_watchers(api: Api) -> None:
    names = [(await upload(api.stub, b"%d" % number)).document.name for number in range(3)]
    await advance(api.pool, await claim(api.pool), DocumentStatus.PARSING)
    async with contextlib.AsyncExitStack() as stack:
        watchers = [await stack.enter_async_context(watching(api, names=names)) for _ in range(20)]
        for watcher in watchers:
            for _ in names:
                await watcher.next()
        assert api.server._feed._task is not None
        await touch(api, names[2], "x")
        told = await asyncio.gather(*(watcher.next() for watcher in watchers))
    assert {event.changed.title for event in told} == {"x"}
