"""The embedder as a process: start, signals, exit status."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from readymark.embedder.v1 import embedder_service_pb2 as pb
from readymark.embedder.v1 import embedder_service_pb2_grpc as pb_grpc

from services.embedder import encoder
from services.embedder.__main__ import EMBEDDER_SERVICE, serve
from services.embedder.model_files import ModelFiles
from services.embedder.settings import EmbedderSettings
from shared.errors import DependencyUnavailableError
from shared.rpc.channel import create_channel

REPOSITORY = Path(__file__).parents[2]


@asynccontextmanager
async def process(**environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    path = [REPOSITORY, REPOSITORY / "client", REPOSITORY / "protos/generated"]
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.embedder",
        cwd=REPOSITORY,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "READYMARK_EMBEDDER_LISTEN": "127.0.0.1:0",
            **environment,
        },
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


async def next_event(started: asyncio.subprocess.Process) -> dict[str, Any]:
    assert started.stderr is not None
    line = await asyncio.wait_for(started.stderr.readline(), 60)
    event: dict[str, Any] = json.loads(line)
    return event


async def test_sigterm_lets_the_running_call_finish_and_ends_with_status_0(minilm_files: ModelFiles) -> None:
    async with process(READYMARK_EMBEDDER_MODEL=str(minilm_files.folder)) as embedder:
        event = await next_event(embedder)
        assert (event["event"], event["model_id"]) == ("serving", "all-MiniLM-L6-v2")
        channel = create_channel(event["address"])
        stub: Any = pb_grpc.EmbedderServiceStub(channel)
        health: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", EMBEDDER_SERVICE):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        texts = [f"text {number} " + "of some length " * 40 for number in range(64)]
        request = pb.EmbedRequest(inputs=texts, input_type=pb.INPUT_TYPE_DOCUMENT)
        call = asyncio.ensure_future(stub.Embed(request, timeout=60))
        # A query goes before the rest of the bulk, so its answer says that the bulk is in.
        query = pb.EmbedRequest(inputs=["query"], input_type=pb.INPUT_TYPE_QUERY)
        await stub.Embed(query, timeout=60)
        assert not call.done()
        embedder.send_signal(signal.SIGTERM)
        assert len((await call).token_counts) == 64
        assert await asyncio.wait_for(embedder.wait(), 30) == 0
        assert embedder.stderr is not None
        assert json.loads((await embedder.stderr.read()).splitlines()[-1])["event"] == "stopped"
        await channel.close()


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("READYMARK_EMBEDDER_MODEL", "no-such-model", "services.embedder.model_build"),
        ("READYMARK_EMBEDDER_WORKRES", "2", "READYMARK_EMBEDDER_WORKRES is not a setting"),
        ("READYMARK_EMBEDDER_PROVIDER", "tpu", "READYMARK_EMBEDDER_PROVIDER"),
    ],
)
async def test_what_cannot_start_says_why_and_ends_with_status_2(
    variable: str, value: str, named: str
) -> None:
    async with process(**{variable: value}) as embedder:
        event = await next_event(embedder)
        assert event["event"] == "not started"
        assert named in event["cause"]
        assert await asyncio.wait_for(embedder.wait(), 30) == 2


async def test_a_model_that_stops_computing_ends_the_process_with_status_1(
    minilm_files: ModelFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = EmbedderSettings(listen="127.0.0.1:0", model=str(minilm_files.folder), stop_grace_seconds=1)
    status = asyncio.ensure_future(serve(settings))
    while not (found := [record for record in caplog.records if record.getMessage() == "serving"]):
        await asyncio.sleep(0.05)
        assert not status.done()
    channel = create_channel(found[0].__dict__["fields"]["address"])
    stub: Any = pb_grpc.EmbedderServiceStub(channel)

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(encoder, "pool", broken)
    request = pb.EmbedRequest(inputs=["a text"], input_type=pb.INPUT_TYPE_DOCUMENT)
    with pytest.raises(DependencyUnavailableError):
        await stub.Embed(request, timeout=10)
    assert await asyncio.wait_for(status, 20) == 1
    await channel.close()
