"""How close ingestion comes to the speed of the model: documents to READY against bare embedding.

    python -m tests.benchmarks.ingest_bulk [--json]

Submits documents to the running system (API, one worker, embedder, PostgreSQL, all real) and
takes tokens a second from the first submission to the last READY. Then the same chunk texts go
straight to the same embedder, as fast as it takes them. The last line is one JSON object;
`ratio` is the first over the second, `limit` the least it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from readymark_client import AsyncReadymark

from shared.embedder_client import EmbedderClient
from tests.support.processes import REPOSITORY, Cluster, start_cluster

DOCUMENTS = 60
PARAGRAPHS = 24
LIMIT = 0.85
SENTENCE = (
    "Section {n} of manual {d} tells how pump {n} is taken apart, which of its seals wear out first, how they "
    "are ordered, and who has to sign before the line is started again after the repair."
)


def text_of(document: int) -> str:
    return "\n\n".join(SENTENCE.format(d=document, n=number) for number in range(PARAGRAPHS))


async def ingest(client: AsyncReadymark) -> tuple[float, list[str]]:
    """Returns the seconds from the first submission to the last READY, and the document ids."""
    began = time.perf_counter()
    documents = await asyncio.gather(
        *(client.submit(text_of(number), display_name=f"{number}.txt") for number in range(DOCUMENTS))
    )
    ids = [document.document_id for document in documents]
    settled = await client.wait(ids, timeout_seconds=600)
    seconds = time.perf_counter() - began
    assert all(document.status == "READY" for document in settled)
    return seconds, ids


async def embed_bare(client: AsyncReadymark, address: str, ids: list[str]) -> tuple[float, int]:
    """Returns the seconds that the same texts take straight at the embedder, and their tokens."""
    texts: list[str] = []
    counts: list[int] = []
    for document_id in ids:
        async for chunk in client.chunks(document_id):
            texts.append(chunk.prefix + chunk.content)
            counts.append(chunk.token_count)
    embedder = EmbedderClient(address)
    model = await embedder.model()

    async def forget(start: int, vectors: object) -> None:
        return

    began = time.perf_counter()
    await embedder.embed_documents(texts, counts, expected_fingerprint=model.fingerprint, on_batch=forget)
    seconds = time.perf_counter() - began
    await embedder.close()
    return seconds, sum(counts)


async def measure(cluster: Cluster) -> dict[str, object]:
    cluster.embedder()
    cluster.ingest()
    cluster.worker()
    addresses = cluster.addresses
    async with AsyncReadymark(addresses["ingest"], embedder=addresses["embedder"]) as client:
        warm_up = await client.submit("One short document first, so that everything is warm.")
        await client.wait([warm_up.document_id])
        ingest_seconds, ids = await ingest(client)
        bare_seconds, tokens = await embed_bare(client, addresses["embedder"], ids)
    return {
        "name": "ingest_bulk",
        "ratio": round(bare_seconds / ingest_seconds, 3),
        "limit": LIMIT,
        "value": round(tokens / ingest_seconds, 1),
        "unit": "tokens/s from submission to READY",
        "against": f"the same {tokens} tokens straight to the embedder: {tokens / bare_seconds:.1f} tokens/s",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    parser.parse_args()
    models = Path(os.environ.get("READYMARK_MODELS") or REPOSITORY / ".readymark" / "models").resolve()
    build = [sys.executable, "-m", "services.embedder.model_build", str(models)]
    subprocess.run(build, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    cluster = start_cluster(models, {"READYMARK_INGEST_SLOTS": "4"})
    try:
        print(json.dumps(asyncio.run(measure(cluster))))
    finally:
        cluster.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
