"""A flood of small documents: none lost, none twice, counts exact."""

from __future__ import annotations

import asyncio

import pytest
from readymark_client import AsyncReadymark

from tests.support import rows
from tests.support.observer import observing
from tests.support.processes import Cluster
from tests.support.workers import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

DOCUMENTS = 500
CLIENTS = 20


async def test_j2_j11_500_documents_of_20_clients_all_become_ready_each_claimed_once(
    cluster: Cluster,
) -> None:
    """Case D7: a burst is neither lost nor processed twice."""
    cluster.settings["READYMARK_INGEST_LEASE_SECONDS"] = "30"
    cluster.settings["READYMARK_INGEST_SLOTS"] = "8"
    cluster.embedder()
    cluster.ingest()
    cluster.search()
    for _ in range(2):
        cluster.worker()
    addresses = cluster.addresses
    clients = [AsyncReadymark(addresses["ingest"], addresses["search"]) for _ in range(CLIENTS)]

    async def submit_share(number: int) -> list[str]:
        made = []
        for index in range(number, DOCUMENTS, CLIENTS):
            text = f"Document number {index} is about the word entry{index}x and nothing else."
            document = await clients[number].submit(text, display_name=f"{index}.txt")
            made.append(document.document_id)
        return made

    async with observing(cluster, clients[0]) as observer:
        shares = await asyncio.gather(*(submit_share(number) for number in range(CLIENTS)))
        submitted = [document_id for share in shares for document_id in share]
        observer.words = {submitted[0]: "entry0x"}
        assert len(set(submitted)) == DOCUMENTS

        async def all_ready() -> bool:
            pairs = await observer.pairs()
            return len(pairs) == DOCUMENTS and set(pairs.values()) == {("READY", "SUCCEEDED")}

        await until(all_ready, 300)
        stats = await clients[0].stats()
        assert stats.documents_by_status == {"READY": DOCUMENTS}
        (counted,) = await rows.execute(
            observer.pool,
            "SELECT (SELECT sum(chunk_count) FROM document_versions) AS versions, "
            "(SELECT count(*) FROM chunks_1) AS chunks, (SELECT sum(ready_chunks) FROM collections) AS counter, "
            "(SELECT count(*) FROM ingestion_attempts) AS attempts, (SELECT count(*) FROM chunk_staging) AS staged, "
            "(SELECT count(*) FROM ingestion_jobs WHERE attempts <> 1) AS tried_again",
        )
        assert counted == {
            "versions": DOCUMENTS,
            "chunks": DOCUMENTS,
            "counter": DOCUMENTS,
            "attempts": DOCUMENTS,
            "staged": 0,
            "tried_again": 0,
        }
        assert observer.illegal == set()
        for index in (0, 250, 499):
            result = await clients[0].search(f"entry{index}x", mode="keyword")
            assert [hit.display_name for hit in result.hits] == [f"{index}.txt"]
            assert result.exhausted
        result = await clients[0].search("document", mode="keyword", top_k=200)
        assert (len(result.hits), result.candidate_count, result.exhausted) == (200, DOCUMENTS, False)
    for client in clients:
        await client.close()
