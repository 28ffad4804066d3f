"""Watches a running system from outside and keeps what must never have been seen.

Reads documents and jobs every 20 ms, over SQL in one statement and over the API, and
searches for every document it was told of. Only collects; the test asserts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import psycopg
from readymark_client import AsyncReadymark, ReadymarkClientError

from services.ingest.lifecycle import LEGAL_PAIRS
from shared import postgres
from tests.support import rows
from tests.support.processes import Cluster

PERIOD_SECONDS = 0.02
LEGAL = {(str(document), str(job)) for document, job in LEGAL_PAIRS} - {("READY", "RUNNING")}
PAIRS = (
    "SELECT v.document_id::text AS document_id, v.status AS document, j.status AS job FROM document_versions v "
    "JOIN LATERAL (SELECT status FROM ingestion_jobs j WHERE j.version_id = v.version_id "
    "ORDER BY job_id DESC LIMIT 1) j ON true"
)


class Observer:
    """`words` maps a document id to a word that only this document holds, in every chunk."""

    def __init__(self, cluster: Cluster, client: AsyncReadymark) -> None:
        self._client = client
        self._pool = postgres.create_pool(cluster.ingest_url, application_name="observer", max_size=4)
        self.words: dict[str, str] = {}
        self.illegal: set[tuple[str, str, str]] = set()
        self.chunks_seen: dict[str, set[int]] = {}
        self.found_while_not_ready: set[str] = set()
        self.rounds = {"sql": 0, "api": 0, "search": 0}

    @property
    def pool(self) -> postgres.Pool:
        return self._pool

    async def pairs(self) -> dict[str, tuple[str, str]]:
        try:
            found = await rows.execute(self._pool, PAIRS)
        except psycopg.OperationalError:
            # PostgreSQL was restarted by the test: old connections are of no use.
            await self._pool.check()
            found = await rows.execute(self._pool, PAIRS)
        return {row["document_id"]: (row["document"], row["job"]) for row in found}

    async def _watch_sql(self) -> None:
        while True:
            with contextlib.suppress(Exception):
                for document_id, pair in (await self.pairs()).items():
                    if pair not in LEGAL:
                        self.illegal.add((document_id, *pair))
                self.rounds["sql"] += 1
            await asyncio.sleep(PERIOD_SECONDS)

    async def _watch_api(self) -> None:
        while True:
            for document_id in list(self.words):
                with contextlib.suppress(ReadymarkClientError):
                    document = await self._client.get(document_id)
                    pair = (str(document.status), str(document.job_status))
                    if pair not in LEGAL:
                        self.illegal.add((document_id, *pair))
                    if document.failure is not None and pair[0] not in ("PENDING", "FAILED"):
                        self.illegal.add((document_id, pair[0], "shows an outdated failure"))
                    self.rounds["api"] += 1
                await asyncio.sleep(PERIOD_SECONDS)
            await asyncio.sleep(PERIOD_SECONDS)

    async def _watch_search(self) -> None:
        while True:
            for document_id, word in list(self.words.items()):
                with contextlib.suppress(ReadymarkClientError):
                    await self._search_once(document_id, word)
                await asyncio.sleep(PERIOD_SECONDS)
            await asyncio.sleep(PERIOD_SECONDS)

    async def _search_once(self, document_id: str, word: str) -> None:
        result = await self._client.search(word, collection="default", mode="keyword", top_k=200)
        self.rounds["search"] += 1
        for found in {hit.document_id for hit in result.hits}:
            count = sum(1 for hit in result.hits if hit.document_id == found)
            if found == document_id:
                self.chunks_seen.setdefault(found, set()).add(count)
            # Looked at after the search: nothing leaves READY, so it must be READY now.
            if (await self.pairs()).get(found, ("READY", ""))[0] != "READY":
                self.found_while_not_ready.add(found)


@contextlib.asynccontextmanager
async def observing(cluster: Cluster, client: AsyncReadymark) -> AsyncIterator[Observer]:
    observer = Observer(cluster, client)
    await observer.pool.open(wait=True)
    tasks = [
        asyncio.create_task(watch())
        for watch in (observer._watch_sql, observer._watch_api, observer._watch_search)
    ]
    try:
        yield observer
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await observer.pool.close()
