"""The RPCs of the ingest service: translate in, call one use case, translate out.

Holds no rule about documents; errors of the use cases become statuses in shared/rpc.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from readymark.ingest.v1 import ingest_service_pb2 as pb
from readymark.ingest.v1 import ingest_service_pb2_grpc as pb_grpc

from services.ingest import wire
from services.ingest.catalog import CatalogService
from services.ingest.submission import SubmissionService
from services.ingest.watching import WatchService
from shared.rpc.language import current_language

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["IngestService"].full_name
Context = grpc.aio.ServicerContext


class IngestServicer(pb_grpc.IngestServiceServicer):
    def __init__(
        self, submission: SubmissionService, catalog: CatalogService, watching: WatchService
    ) -> None:
        self._submission = submission
        self._catalog = catalog
        self._watching = watching

    async def UploadDocument(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.UploadDocumentRequest], context: Context[Any, Any]
    ) -> pb.UploadDocumentResponse:
        submitted = await self._submission.upload(wire.upload_frames(request_iterator))
        document = wire.document(submitted.state, current_language())
        return pb.UploadDocumentResponse(document=document, created=submitted.created)

    async def CreateDocument(  # noqa: N802
        self, request: pb.CreateDocumentRequest, context: Context[Any, Any]
    ) -> pb.CreateDocumentResponse:
        header = wire.document_header(request.header)
        submitted = await self._submission.create(header, wire.inline_content(request))
        document = wire.document(submitted.state, current_language())
        return pb.CreateDocumentResponse(document=document, created=submitted.created)

    async def GetDocument(  # noqa: N802
        self, request: pb.GetDocumentRequest, context: Context[Any, Any]
    ) -> pb.GetDocumentResponse:
        state = await self._catalog.get(request.name)
        return pb.GetDocumentResponse(document=wire.document(state, current_language()))

    async def ListDocuments(  # noqa: N802
        self, request: pb.ListDocumentsRequest, context: Context[Any, Any]
    ) -> pb.ListDocumentsResponse:
        page = await self._catalog.list_documents(
            request.parent,
            page_size=request.page_size,
            page_token=request.page_token,
            status=wire.document_status(request.status),
        )
        documents = [wire.document(state, current_language()) for state in page.states]
        return pb.ListDocumentsResponse(documents=documents, next_page_token=page.next_page_token)

    async def WatchDocuments(  # noqa: N802
        self, request: pb.WatchDocumentsRequest, context: Context[Any, Any]
    ) -> AsyncIterator[pb.WatchDocumentsResponse]:
        events = self._watching.watch(
            request.parent,
            request.names,
            resume_token=request.resume_token,
            until_settled=request.until_settled,
        )
        async with contextlib.aclosing(events):
            async for told in events:
                yield wire.watch_event(told, current_language())

    async def RetryDocument(  # noqa: N802
        self, request: pb.RetryDocumentRequest, context: Context[Any, Any]
    ) -> pb.RetryDocumentResponse:
        state = await self._catalog.retry(request.name)
        return pb.RetryDocumentResponse(document=wire.document(state, current_language()))

    async def CancelDocument(  # noqa: N802
        self, request: pb.CancelDocumentRequest, context: Context[Any, Any]
    ) -> pb.CancelDocumentResponse:
        state = await self._catalog.cancel(request.name)
        return pb.CancelDocumentResponse(document=wire.document(state, current_language()))

    async def DeleteDocument(  # noqa: N802
        self, request: pb.DeleteDocumentRequest, context: Context[Any, Any]
    ) -> pb.DeleteDocumentResponse:
        await self._catalog.delete(request.name, etag=request.etag, allow_missing=request.allow_missing)
        return pb.DeleteDocumentResponse()

    async def ListAttempts(  # noqa: N802
        self, request: pb.ListAttemptsRequest, context: Context[Any, Any]
    ) -> pb.ListAttemptsResponse:
        page = await self._catalog.list_attempts(
            request.name, page_size=request.page_size, page_token=request.page_token
        )
        return wire.attempt_page(page, current_language())

    async def ListChunks(  # noqa: N802
        self, request: pb.ListChunksRequest, context: Context[Any, Any]
    ) -> pb.ListChunksResponse:
        page = await self._catalog.list_chunks(
            request.name,
            version_number=request.version,
            page_size=request.page_size,
            page_token=request.page_token,
        )
        return wire.chunk_page(page)

    async def DownloadBlob(  # noqa: N802
        self, request: pb.DownloadBlobRequest, context: Context[Any, Any]
    ) -> AsyncIterator[pb.DownloadBlobResponse]:
        download = await self._catalog.download(request.name, request.asset_id)
        async for response in wire.download_pieces(download):
            yield response

    async def GetQueueStats(  # noqa: N802
        self, request: pb.GetQueueStatsRequest, context: Context[Any, Any]
    ) -> pb.GetQueueStatsResponse:
        return wire.queue_stats(await self._catalog.measure_queue(request.parent))
