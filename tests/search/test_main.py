"""The search service as a process: it starts without its dependencies, gets ready, and stops cleanly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from readymark.search.v1 import search_service_pb2 as messages
from readymark.search.v1 import search_service_pb2_grpc as contract

from deploy.local.embedded_postgres import MIGRATOR, SEARCHER, EmbeddedPostgres
from services.ingest.repository import migrating
from tests.support.corpus import Corpus, random_units

ROOT = Path(__file__).parents[2]
NAME = "readymark.search.v1.SearchService"


class Process:
    """`python -m services.search` with its JSON log lines."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = os.pathsep.join(str(ROOT / part) for part in (".", "client", "protos/generated"))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.search"],
            env={**os.environ, "PYTHONPATH": path, **environment},
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def wait_for(self, event: str) -> dict[str, Any]:
        """Returns the log line of `event`; fails when the process ends before it."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            entry = json.loads(line)
            if event in entry.values():
                return dict(entry)
        raise AssertionError(f"the process ended before {event!r}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(**environment: str) -> Process:
        defaults = {"READYMARK_SEARCH_LISTEN": "127.0.0.1:0", "READYMARK_EMBEDDER_ADDRESS": "127.0.0.1:9"}
        process = Process(defaults | environment)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.process.poll() is None:
            process.process.kill()
            process.process.wait()


def _status(channel: grpc.Channel) -> int:
    request = health_pb2.HealthCheckRequest(service=NAME)
    return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status)


def test_it_serves_searches_and_ends_with_zero_at_sigterm(
    corpus: Corpus, database_urls: Mapping[str, str], start: Callable[..., Process]
) -> None:
    space = corpus.create_collection("c")
    corpus.add_document(space, ["a word"], random_units(1))
    process = start(READYMARK_SEARCH_DATABASE_URL=database_urls[SEARCHER])
    serving = process.wait_for("serving")
    assert database_urls[SEARCHER] not in json.dumps(serving)
    process.wait_for("database ready")
    with grpc.insecure_channel(_address(serving)) as channel:
        assert _status(channel) == health_pb2.HealthCheckResponse.SERVING
        request = messages.SearchRequest(parent="collections/c", query="word")
        answer = contract.SearchServiceStub(channel).Search(request, timeout=10)
        assert [hit.content for hit in answer.hits] == ["a word"]
        assert list(answer.degraded_reasons) == ["VECTOR_UNAVAILABLE"]
    assert process.stop() == 0


async def test_it_waits_for_a_database_that_is_not_migrated_yet(
    postgres_server: EmbeddedPostgres, start: Callable[..., Process]
) -> None:
    name = f"late_{os.getpid()}"
    process = start(READYMARK_SEARCH_DATABASE_URL=postgres_server.uri(SEARCHER, name))
    serving = process.wait_for("serving")
    process.wait_for("waiting for database")
    with grpc.insecure_channel(_address(serving)) as channel:
        assert _status(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        request = messages.SearchRequest(parent="collections/c", query="word")
        with pytest.raises(grpc.RpcError) as caught:
            contract.SearchServiceStub(channel).Search(request, timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        postgres_server.create_database(name)
        try:
            await migrating.migrate(postgres_server.uri(MIGRATOR, name))
            process.wait_for("database ready")
            assert _status(channel) == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.RpcError) as caught:
                contract.SearchServiceStub(channel).Search(request, timeout=10)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert process.stop() == 0
        finally:
            postgres_server.drop_database(name)


def test_it_stops_while_it_still_waits_for_the_database(start: Callable[..., Process]) -> None:
    process = start(READYMARK_SEARCH_DATABASE_URL="postgresql://nobody@/nothing?host=/nonexistent")
    process.wait_for("waiting for database")
    begun = time.monotonic()
    assert process.stop() == 0
    assert time.monotonic() - begun < 10


def test_a_wrong_setting_ends_it_with_two_and_is_named(start: Callable[..., Process]) -> None:
    process = start(READYMARK_SEARCH_DATABASE_URL="", READYMARK_SEARCH_POOL_SIZE="many")
    entries = [process.wait_for("cannot start"), process.wait_for("cannot start")]
    assert "READYMARK_SEARCH_DATABASE_URL" in json.dumps(entries)
    assert "READYMARK_SEARCH_POOL_SIZE" in json.dumps(entries)
    assert process.process.wait(10) == 2


def _address(entry: dict[str, Any]) -> str:
    return str(entry.get("address") or entry["fields"]["address"])
