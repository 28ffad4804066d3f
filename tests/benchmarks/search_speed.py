"""How much a search costs above what the database itself spends on it.

    python -m tests.benchmarks.search_speed [--json] [--chunks 12000] [--queries 150]

It is compared with PostgreSQL's own time, planning and execution by EXPLAIN ANALYZE, for the very
statements that a search sends. `value` is what a client waits over gRPC: its own process,
the search process, the embedder process (without a model, so that no model time hides the
rest), all on this machine. Both are medians of the same queries, taken in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from psycopg.rows import DictRow
from readymark.search.v1 import search_service_pb2 as messages
from readymark.search.v1 import search_service_pb2_grpc as contract

from deploy.local.embedded_postgres import INGEST, MIGRATOR, SEARCHER, EmbeddedPostgres
from services.ingest.repository import migrating
from services.search.query import SearchQuery
from services.search.repository.searchable_chunks import Collection, SearchableChunks, Sent, Snapshot
from services.search.retrieval import Searcher
from shared import postgres
from shared.embedder_client import EmbedderClient
from shared.rpc.channel import create_channel
from tests.support.corpus import Corpus, Space, create_partial_index
from tests.support.fake_embedder import Behaviour, fake_vector

LIMIT_RATIO = 1.5
DIMENSION = 384
WORDS = [f"word{number}" for number in range(20_000)]
DOCUMENT_CHUNKS = 200
WARM_UP = 20


class ExplainedSnapshot(Snapshot):
    """Runs each statement under EXPLAIN ANALYZE as well, and adds up the server's time."""

    milliseconds = 0.0

    async def _send(self, statement: bytes, read: Callable[[list[DictRow]], Any], **values: Any) -> Sent[Any]:
        explain = b"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) " + statement
        explained = await (await super()._send(explain, list, **values)).result()
        (plan,) = explained[0]["QUERY PLAN"]
        ExplainedSnapshot.milliseconds += plan["Planning Time"] + plan["Execution Time"]
        return await super()._send(statement, read, **values)


class ExplainedChunks(SearchableChunks):
    @contextlib.asynccontextmanager
    async def snapshot(
        self, collection: Collection, *, timeout_seconds: float, depth: int
    ) -> AsyncIterator[Snapshot]:
        async with super().snapshot(collection, timeout_seconds=timeout_seconds, depth=depth) as plain:
            yield ExplainedSnapshot(plain._connection, collection)


def make_texts(count: int, seed: int) -> list[str]:
    """Texts of about 120 words, common words much more often than rare ones."""
    random = np.random.default_rng(seed)
    shares = 1 / np.arange(1, len(WORDS) + 1)
    picked = random.choice(len(WORDS), size=(count, 120), p=shares / shares.sum())
    return [" ".join(WORDS[number] for number in row) for row in picked]


def make_queries(texts: Sequence[str], count: int) -> list[str]:
    """Six words of a random text each: what a person remembers of it."""
    random = np.random.default_rng(1)
    chosen = random.choice(len(texts), size=count, replace=False)
    return [" ".join(random.choice(texts[number].split(), size=6, replace=False)) for number in chosen]


def fill(corpus: Corpus, texts: Sequence[str]) -> Space:
    model = Behaviour(dimension=DIMENSION)
    space = corpus.create_collection("c", fingerprint=model.model_fingerprint, dimension=DIMENSION)
    known = {word: fake_vector(word, DIMENSION) for word in WORDS}
    for start in range(0, len(texts), DOCUMENT_CHUNKS):
        part = texts[start : start + DOCUMENT_CHUNKS]
        vectors = np.stack([np.sum([known[word] for word in text.split()], axis=0) for text in part])
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        corpus.add_document(space, part, vectors.astype(np.float32), document_id=uuid.uuid4())
    return space


@contextlib.contextmanager
def started_postgres() -> Iterator[EmbeddedPostgres]:
    folder = Path(tempfile.mkdtemp(prefix="readymark-bench-"))
    folder.chmod(0o755)
    settings = {"fsync": "off", "maintenance_work_mem": "256MB", "shared_buffers": "256MB"}
    server = EmbeddedPostgres(folder / "data", settings=settings)
    server.start()
    server.restart()
    try:
        yield server
    finally:
        server.stop("immediate")
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def started(*module: str, **environment: str) -> AsyncIterator[str]:
    """Starts a service as a process of its own; returns its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *module, stdout=PIPE, stderr=STDOUT, env={**os.environ, **environment}
    )
    assert process.stdout is not None
    reading = asyncio.create_task(_read_address(process.stdout))
    try:
        async with asyncio.timeout(20):
            address = await reading
        # What it goes on to write must be read, or it would wait for a reader.
        reading = asyncio.create_task(process.stdout.read())
        yield address
    finally:
        process.terminate()
        await process.wait()
        await reading


async def _read_address(output: asyncio.StreamReader) -> str:
    while line := await output.readline():
        entry = json.loads(line)
        if "address" in entry:
            return str(entry["address"])
    raise RuntimeError("the service ended before it served")


async def measure(server: EmbeddedPostgres, queries: Sequence[str]) -> dict[str, float]:
    """Returns medians in milliseconds: the database's own time, the client's wait, and its stages."""
    url = server.uri(SEARCHER, "readymark")
    pool = postgres.create_pool(url, application_name="benchmark")
    await pool.open(wait=True)
    async with (
        started("tests.support.fake_embedder", "--listen", "127.0.0.1:0") as embedder_address,
        started(
            "services.search",
            READYMARK_SEARCH_DATABASE_URL=url,
            READYMARK_SEARCH_LISTEN="127.0.0.1:0",
            READYMARK_EMBEDDER_ADDRESS=embedder_address,
        ) as address,
        create_channel(address) as channel,
    ):
        client = EmbedderClient(embedder_address)
        explained = Searcher(
            ExplainedChunks(pool), client, exact_max_candidates=10_000, embed_timeout_seconds=5.0
        )
        search = contract.SearchServiceStub(channel)
        times: dict[str, list[float]] = {"database": [], "client": [], "embed": [], "retrieve": []}
        for query in queries:
            ExplainedSnapshot.milliseconds = 0.0
            await explained.search(SearchQuery(collection="c", text=query), 30.0)
            times["database"].append(ExplainedSnapshot.milliseconds)
            for name, waited in (await _wait_for(search, query)).items():
                times[name].append(waited)
        await client.close()
    await pool.close()
    return {name: statistics.median(measured[WARM_UP:]) for name, measured in times.items()}


async def _wait_for(search: contract.SearchServiceAsyncStub, query: str) -> dict[str, float]:
    request = messages.SearchRequest(parent="collections/c", query=query)
    begun = time.perf_counter()
    answer = await search.Search(request, timeout=30.0, wait_for_ready=True)
    waited = (time.perf_counter() - begun) * 1000
    assert len(answer.hits) == 10
    assert not answer.degraded_reasons
    stages = {name: stage.ToNanoseconds() / 1e6 for name, stage in answer.stage_times.items()}
    return {"client": waited} | stages


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.search_speed")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    parser.add_argument("--chunks", type=int, default=12_000)
    parser.add_argument("--queries", type=int, default=150)
    arguments = parser.parse_args()
    texts = make_texts(arguments.chunks, seed=0)
    with started_postgres() as server:
        server.create_database("readymark")
        asyncio.run(migrating.migrate(server.uri(MIGRATOR, "readymark")))
        corpus = Corpus(server.uri(INGEST, "readymark"))
        space = fill(corpus, texts)
        corpus.close()
        create_partial_index(server.uri("postgres", "readymark"), space)
        medians = asyncio.run(measure(server, make_queries(texts, arguments.queries)))
    against, value = medians["database"], medians["client"]
    print(
        f"{arguments.chunks} chunks: the database takes {against:.2f} ms, the client waits {value:.2f} ms, "
        f"of it {medians['embed']:.2f} for the vector and {medians['retrieve']:.2f} for the database"
    )
    if arguments.json:
        print(
            json.dumps(
                {
                    "name": "search_speed",
                    "ratio": round(value / against, 3),
                    "limit": LIMIT_RATIO,
                    "value": round(value, 3),
                    "against": round(against, 3),
                }
            )
        )


if __name__ == "__main__":
    main()
