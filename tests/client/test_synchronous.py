"""The facade without asyncio behaves like the one with it, and lets go of what it holds."""

from __future__ import annotations

import asyncio
import threading

import pytest
import readymark_client as sdk
from google.rpc import code_pb2
from readymark.ingest.v1 import ingest_service_pb2 as pb


async def test_pages_are_fetched_as_they_are_read(ingest):
    asked = []

    async def list_documents(request, context):
        asked.append(request.page_token)
        number = len(asked)
        documents = [pb.Document(document_id=f"d{number}{letter}") for letter in "ab"]
        return pb.ListDocumentsResponse(
            documents=documents, next_page_token=f"p{number}" if number < 3 else ""
        )

    ingest.handlers["ListDocuments"] = list_documents

    def read():
        with sdk.Readymark(ingest.address) as client:
            found = client.list()
            assert next(found).document_id == "d1a"
            assert asked == [""]
            return [document.document_id for document in found]

    assert await asyncio.to_thread(read) == ["d1b", "d2a", "d2b", "d3a", "d3b"]
    assert asked == ["", "p1", "p2"]


async def test_leaving_a_watch_ends_its_stream_on_the_server(ingest):
    ended = asyncio.Event()

    async def watch(request, context):
        try:
            yield pb.WatchDocumentsResponse(changed=pb.Document(name="collections/c/documents/a"))
            await asyncio.Event().wait()
        finally:
            ended.set()

    ingest.handlers["WatchDocuments"] = watch
    client = sdk.Readymark(ingest.address)

    def read_one():
        changes = client.watch(["a"])
        change = next(changes)
        changes.close()
        return change

    assert (await asyncio.to_thread(read_one)).document_id == "a"
    await asyncio.wait_for(ended.wait(), 5)
    await asyncio.to_thread(client.close)
    client.close()


async def test_errors_come_through_typed(ingest, refuse):
    async def get(request, context):
        await refuse(context, code_pb2.NOT_FOUND, "RESOURCE_NOT_FOUND", "DOCUMENT_NOT_FOUND", document="x")

    ingest.handlers["GetDocument"] = get

    def read():
        with sdk.Readymark(ingest.address) as client, pytest.raises(sdk.NotFound):
            client.get("x")

    await asyncio.to_thread(read)


async def test_closing_ends_the_thread():
    client = sdk.Readymark()
    client.close()
    assert "readymark-client" not in {thread.name for thread in threading.enumerate()}


def test_both_facades_offer_the_same():
    import inspect

    def methods(kind):
        return {
            name: [
                parameter.replace(annotation=None)
                for parameter in inspect.signature(member).parameters.values()
            ]
            for name, member in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert methods(sdk.Readymark) == methods(sdk.AsyncReadymark)
