"""The API as a client meets it: language, errors, health, reflection, and the process itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from readymark.ingest.v1 import ingest_service_pb2 as pb
from readymark.ingest.v1 import ingest_service_pb2_grpc as pb_grpc

from deploy.local.embedded_postgres import INGEST, EmbeddedPostgres
from services.ingest.servicer import SERVICE_NAME, IngestServicer
from shared.errors import AlreadyExistsError, ResourceNotFoundError
from shared.rpc.channel import create_channel
from tests.ingest.conftest import Api
from tests.support.databases import Database
from tests.support.documents import claim, fail, upload, upload_requests

ROOT = Path(__file__).parents[2]
MISSING = "collections/a/documents/00000000-0000-0000-0000-000000000007"


def test_every_rpc_of_the_contract_is_served() -> None:
    for method in pb.DESCRIPTOR.services_by_name["IngestService"].methods:
        assert method.name in IngestServicer.__dict__, f"{method.name} falls back to UNIMPLEMENTED"


@pytest.mark.parametrize(
    ("accept_language", "start"),
    [("zh-CN,zh;q=0.9,en;q=0.8", "文档"), ("en-GB", "There is no document"), (None, "There is no document")],
)
async def test_errors_come_in_the_language_of_the_call(
    api: Api, accept_language: str | None, start: str
) -> None:
    metadata = [] if accept_language is None else [("accept-language", accept_language)]
    async with grpc.aio.insecure_channel(api.address) as channel:
        stub: pb_grpc.IngestServiceAsyncStub = pb_grpc.IngestServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetDocument(pb.GetDocumentRequest(name=MISSING), metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details().startswith(start)
    status = rpc_status.from_call(caught.value)
    info = error_details_pb2.ErrorInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    assert (info.reason, info.metadata["document"]) == ("DOCUMENT_NOT_FOUND", MISSING)


async def test_the_failure_of_a_document_comes_in_the_language_of_each_reader(api: Api) -> None:
    name = (await upload(api.stub)).document.name
    await fail(api.pool, await claim(api.pool), "NO_TEXT")
    for language, start in (("zh", "文件中没有找到文字"), ("en", "No text was found")):
        metadata = [("accept-language", language)]
        got = await api.stub.GetDocument(pb.GetDocumentRequest(name=name), metadata=metadata)
        assert got.document.failure.status.message.startswith(start)
        listed = await api.stub.ListDocuments(
            pb.ListDocumentsRequest(parent="collections/tests"), metadata=metadata
        )
        assert listed.documents[0].failure.status.message.startswith(start)
        watch = api.stub.WatchDocuments(
            pb.WatchDocumentsRequest(names=[name], until_settled=True), metadata=metadata
        )
        messages = [event.snapshot.failure.status.message async for event in watch]
        assert [message.startswith(start) for message in messages] == [True]


async def test_a_rejected_duplicate_names_the_one_that_is_there(api: Api) -> None:
    name = (await upload(api.stub)).document.name
    with pytest.raises(AlreadyExistsError) as caught:
        await upload(api.stub, duplicate_policy=pb.DuplicatePolicy.DUPLICATE_POLICY_REJECT)
    assert caught.value.parameters["document"] == name


async def test_a_bug_is_internal_and_tells_nothing_of_itself(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*args: object) -> None:
        raise RuntimeError("secret at /some/path")

    monkeypatch.setattr("services.ingest.repository.states.load_states", broken)
    async with grpc.aio.insecure_channel(api.address) as channel:
        stub: pb_grpc.IngestServiceAsyncStub = pb_grpc.IngestServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetDocument(pb.GetDocumentRequest(name=MISSING))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in repr(caught.value)


async def test_health_and_reflection_know_the_service(api: Api) -> None:
    async with grpc.aio.insecure_channel(api.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE_NAME):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")

        names = set()
        async for response in reflection.ServerReflectionInfo(ask()):
            names |= {service.name for service in response.list_services_response.service}
    assert SERVICE_NAME in names


# The process.


class Process:
    def __init__(self, database_url: str, blob_folder: Path) -> None:
        self._environment = {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("", "client", "protos/generated")),
            "READYMARK_INGEST_DATABASE_URL": database_url,
            "READYMARK_INGEST_BLOB_URL": str(blob_folder),
            "READYMARK_INGEST_LISTEN": "127.0.0.1:0",
        }
        self.lines: list[str] = []

    async def __aenter__(self) -> Process:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.ingest", "serve"),
            env=self._environment,
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def until_logged(self, event: str) -> dict[str, str]:
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            while line := (await self.process.stderr.readline()).decode():
                self.lines.append(line)
                if line.startswith("{") and json.loads(line)["event"] == event:
                    return dict(json.loads(line))
        raise AssertionError("".join(self.lines))

    async def ended(self) -> int:
        assert self.process.stderr is not None
        async with asyncio.timeout(60):
            self.lines += (await self.process.stderr.read()).decode().splitlines(keepends=True)
            return await self.process.wait()


async def test_sigterm_ends_watches_finishes_calls_and_exits_with_zero(
    database: Database, blob_folder: Path
) -> None:
    async with Process(database.ingest_url, blob_folder) as api:
        address = (await api.until_logged("serving"))["address"]
        async with create_channel(address) as channel:
            stub: pb_grpc.IngestServiceAsyncStub = pb_grpc.IngestServiceStub(channel)
            document = (await upload(stub)).document
            watch = stub.WatchDocuments(pb.WatchDocumentsRequest(names=[document.name]))
            await anext(watch)
            is_half_way, go_on = asyncio.Event(), asyncio.Event()

            async def slowly() -> AsyncIterator[pb.UploadDocumentRequest]:
                async for request in upload_requests([b"x" * (4 << 20), b"the end"]):
                    yield request
                    if len(request.data) > 100:
                        # More than a connection buffers: the server must have taken it.
                        is_half_way.set()
                        await go_on.wait()

            uploading = asyncio.ensure_future(stub.UploadDocument(slowly()))
            await is_half_way.wait()
            api.process.send_signal(signal.SIGTERM)
            with pytest.raises(Exception, match="stopping"):
                while True:
                    await anext(watch)
            go_on.set()
            assert (await uploading).created
        assert await api.ended() == 0, "".join(api.lines)
    assert "Traceback" not in "".join(api.lines)


async def test_a_database_without_the_schema_is_named_and_nothing_is_served(
    postgres_server: EmbeddedPostgres, blob_folder: Path
) -> None:
    name = f"empty_{os.getpid()}"
    postgres_server.create_database(name)
    try:
        async with Process(postgres_server.uri(INGEST, name), blob_folder) as api:
            assert await api.ended() == 1
    finally:
        postgres_server.drop_database(name)
    assert "python -m services.ingest migrate" in "".join(api.lines)
    assert "Traceback" not in "".join(api.lines)


async def test_the_connection_string_is_not_logged(database: Database, blob_folder: Path) -> None:
    async with Process(database.ingest_url, blob_folder) as api:
        await api.until_logged("serving")
        api.process.send_signal(signal.SIGTERM)
        assert await api.ended() == 0
    assert "postgresql://" not in "".join(api.lines)


async def test_a_document_of_nobody_is_not_found_by_any_rpc(api: Api) -> None:
    download = api.stub.DownloadBlob(pb.DownloadBlobRequest(name=MISSING))
    with pytest.raises(ResourceNotFoundError):
        await anext(download)
