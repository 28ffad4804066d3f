"""The SDK for asyncio: one method a thing that a client can ask for.

Owns the public signatures. Frames, watches and errors are in `upload.py`, `watching.py`
and `errors.py`; `synchronous.py` offers the same without asyncio.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from readymark.embedder.v1 import embedder_service_pb2 as embedder_pb2
from readymark.embedder.v1.embedder_service_pb2_grpc import EmbedderServiceStub
from readymark.ingest.v1 import ingest_service_pb2 as ingest_pb2
from readymark.ingest.v1.ingest_service_pb2_grpc import IngestServiceStub
from readymark.search.v1 import search_service_pb2 as search_pb2
from readymark.search.v1.search_service_pb2_grpc import SearchServiceStub

from readymark_client import upload, values, watching, wire
from readymark_client.connection import DEFAULT_TIMEOUT_SECONDS, Connection
from readymark_client.errors import InvalidArgument, local_error

DEFAULT_INGEST = "127.0.0.1:7401"
DEFAULT_EMBEDDER = "127.0.0.1:7402"
DEFAULT_SEARCH = "127.0.0.1:7403"
DEFAULT_COLLECTION = "default"
PAGE_SIZE = 100


class AsyncReadymark:
    """A client of the three services; make it, and use it, on one event loop.

    Every method raises an error of `readymark_client.errors`: ServiceUnreachable when
    nobody answers, DeadlineExceeded after `timeout_seconds` (30 unless told), and what the
    service says otherwise. Reads and `submit` are repeated inside their deadline while a
    service is away; `retry`, `cancel` and `delete` are not.
    """

    def __init__(
        self,
        ingest: str = DEFAULT_INGEST,
        search: str = DEFAULT_SEARCH,
        embedder: str = DEFAULT_EMBEDDER,
        *,
        language: str = "en",
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        def connect(service: str, address: str, stub: Any) -> Connection:
            return Connection(
                service,
                address,
                stub,
                language=language,
                timeout_seconds=timeout_seconds,
                credentials=credentials,
            )

        self.language = language
        self._ingest = connect("ingest", ingest, IngestServiceStub)
        self._embedder = connect("embedder", embedder, EmbedderServiceStub)
        self._search = connect("search", search, SearchServiceStub)

    async def submit(
        self,
        source: os.PathLike[str] | bytes | str,
        collection: str = DEFAULT_COLLECTION,
        *,
        source_key: str = "",
        display_name: str | None = None,
        media_type: str = "",
        metadata: Mapping[str, Any] | None = None,
        on_duplicate: values.DuplicatePolicy | str = values.DuplicatePolicy.DEFAULT,
        request_id: str | None = None,
        timeout_seconds: float | None = None,
        on_sent: upload.OnSent | None = None,
    ) -> values.Document:
        """Returns the accepted document, PENDING unless it existed already.

        `source` is a path object, bytes, or a str that is the text itself. A file is
        streamed in constant memory. `request_id` (a UUID, made when left out) makes
        repetition safe: pass your own to repeat a call after a crash. `on_sent` is told
        (sent bytes, total bytes), on a thread of its own. Raises InvalidDocument for what is refused at once,
        AlreadyExists under policy "reject", InvalidArgument for an unreadable path.
        """
        open_source, size_bytes = upload.inspect_source(source, self.language)
        if display_name is None:
            display_name = "" if isinstance(source, bytes | str) else Path(source).name
        header = ingest_pb2.DocumentHeader(
            parent=wire.collection_name(collection),
            source_key=source_key,
            display_name=display_name,
            media_type=media_type,
            metadata=wire.struct(metadata),
            duplicate_policy=wire.DUPLICATE_POLICIES[values.DuplicatePolicy(on_duplicate)],
            request_id=request_id or str(uuid.uuid4()),
            size_bytes=size_bytes,
        )
        if isinstance(source, bytes | str) and size_bytes <= upload.MAX_INLINE_BYTES:
            answer = await upload.send_inline(self._ingest, header, source, timeout_seconds=timeout_seconds)
        else:
            answer = await upload.send_stream(
                self._ingest, header, open_source, timeout_seconds=timeout_seconds, on_sent=on_sent
            )
        return wire.document(answer.document, already_existed=not answer.created)

    async def get(self, document_id: str) -> values.Document:
        """Returns one document by id or name; raises NotFound."""
        request = ingest_pb2.GetDocumentRequest(name=wire.document_name(document_id))
        return wire.document((await self._ingest.call("GetDocument", request)).document)

    async def list(
        self,
        collection: str | None = None,
        *,
        status: values.DocumentStatus | str | None = None,
        page_size: int = PAGE_SIZE,
    ) -> AsyncIterator[values.Document]:
        """Yields documents, newest first, page by page; all collections when none is named."""
        request = ingest_pb2.ListDocumentsRequest(
            parent=wire.collection_name(collection), status=wire.status_value(status), page_size=page_size
        )
        while True:
            page = await self._ingest.call("ListDocuments", request)
            for message in page.documents:
                yield wire.document(message)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def watch(
        self,
        document_ids: Sequence[str] | str = (),
        *,
        collection: str = DEFAULT_COLLECTION,
        until_settled: bool = False,
        resume_token: str = "",
        timeout_seconds: float | None = None,
    ) -> AsyncIterator[values.Change]:
        """Yields the state of each document (at most 1000; none: of the collection), then every change.

        A broken stream is resumed. `until_settled` ends it once every named document is
        READY, FAILED or deleted; without `timeout_seconds` it has no other end.
        """
        request = ingest_pb2.WatchDocumentsRequest(
            parent=wire.collection_name(collection),
            names=[wire.document_name(document_id) for document_id in _several(document_ids)],
            until_settled=until_settled,
            resume_token=resume_token,
        )
        return watching.watch_changes(self._ingest, request, timeout_seconds=timeout_seconds)

    async def wait(
        self, document_ids: Sequence[str] | str, timeout_seconds: float = 600.0
    ) -> tuple[values.Document, ...]:
        """Returns the documents, in the order asked, once each is READY or FAILED.

        Raises DeadlineExceeded (reason NOT_SETTLED), and NotFound when one is deleted meanwhile.
        """
        document_ids = _several(document_ids)
        found: dict[str, values.Document] = {}
        unique = tuple(dict.fromkeys(document_ids))
        async for document in watching.wait_until_settled(
            self._ingest, unique, timeout_seconds=timeout_seconds
        ):
            found[document.document_id] = document
        return tuple(found[document_id.rsplit("/", 1)[-1]] for document_id in document_ids)

    async def retry(self, document_id: str) -> values.Document:
        """Starts a FAILED document again; raises Conflict when it is not FAILED."""
        request = ingest_pb2.RetryDocumentRequest(name=wire.document_name(document_id))
        answer = await self._ingest.call("RetryDocument", request, idempotent=False)
        return wire.document(answer.document)

    async def cancel(self, document_id: str) -> values.Document:
        """Ends a waiting or running document as FAILED; raises Conflict when it is settled."""
        request = ingest_pb2.CancelDocumentRequest(name=wire.document_name(document_id))
        answer = await self._ingest.call("CancelDocument", request, idempotent=False)
        return wire.document(answer.document)

    async def delete(self, document_id: str, *, etag: str = "", allow_missing: bool = False) -> None:
        """Deletes a document; it is in no search result once this returns.

        Raises NotFound unless `allow_missing`, Conflict when it changed since `etag`.
        """
        request = ingest_pb2.DeleteDocumentRequest(
            name=wire.document_name(document_id), etag=etag, allow_missing=allow_missing
        )
        await self._ingest.call("DeleteDocument", request, idempotent=allow_missing)

    async def attempts(self, document_id: str) -> AsyncIterator[values.Attempt]:
        """Yields the attempts of a document, newest first; raises NotFound."""
        request = ingest_pb2.ListAttemptsRequest(name=wire.document_name(document_id), page_size=PAGE_SIZE)
        while True:
            page = await self._ingest.call("ListAttempts", request)
            for message in page.attempts:
                yield wire.attempt(message)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def chunks(self, document_id: str, *, version: int = 0) -> AsyncIterator[values.Chunk]:
        """Yields the chunks of a version in order; 0 is the newest that has chunks. Raises NotFound."""
        request = ingest_pb2.ListChunksRequest(
            name=wire.document_name(document_id), version=version, page_size=PAGE_SIZE
        )
        while True:
            page = await self._ingest.call("ListChunks", request)
            for message in page.chunks:
                yield wire.chunk(message, page.version)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def download(
        self, document_id: str, target: Path, *, asset_id: str = "", timeout_seconds: float = 600.0
    ) -> values.Download:
        """Writes the original file, or one asset, to `target`, whole or not at all; raises NotFound."""
        request = ingest_pb2.DownloadBlobRequest(name=wire.document_name(document_id), asset_id=asset_id)
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
        media_type = ""
        size_bytes = 0
        try:
            with partial.open("wb") as file:
                async for message in self._ingest.stream(
                    "DownloadBlob", request, timeout_seconds=timeout_seconds
                ):
                    media_type = media_type or message.media_type
                    size_bytes += len(message.data)
                    await asyncio.to_thread(file.write, message.data)
            partial.replace(target)
        except OSError as error:
            problem = (error.strerror or str(error)).lower()
            raise local_error(
                InvalidArgument, "FILE_NOT_READABLE", self.language, path=target, problem=problem
            ) from error
        finally:
            partial.unlink(missing_ok=True)
        return values.Download(media_type=media_type, size_bytes=size_bytes)

    async def stats(self, collection: str | None = None) -> values.QueueStats:
        """Returns queue depth, oldest age, throughput and live workers, of one collection or all."""
        request = ingest_pb2.GetQueueStatsRequest(parent=wire.collection_name(collection))
        return wire.queue_stats(await self._ingest.call("GetQueueStats", request))

    async def search(
        self,
        query: str,
        collection: str = DEFAULT_COLLECTION,
        *,
        top_k: int = 10,
        mode: values.SearchMode | str = values.SearchMode.HYBRID,
        documents: Sequence[str] = (),
        explain: bool = False,
        timeout_seconds: float | None = None,
    ) -> values.SearchResult:
        """Returns ranked chunks of READY documents, best first, at most `top_k` (1 to 200).

        `documents` limits the search to ids or names. When a channel is down the answer
        still comes and `degraded_reasons` says which.
        """
        request = search_pb2.SearchRequest(
            parent=wire.collection_name(collection),
            query=query,
            mode=wire.SEARCH_MODES[values.SearchMode(mode)],
            top_k=top_k,
            documents=[wire.document_name(document_id) for document_id in documents],
            explain=explain,
        )
        return wire.search_result(await self._search.call("Search", request, timeout_seconds=timeout_seconds))

    async def model(self) -> values.EmbeddingModel:
        """Returns identity and limits of the model that the embedder runs."""
        answer = await self._embedder.call("GetModel", embedder_pb2.GetModelRequest())
        return wire.embedding_model(answer.model)

    async def health(self, service: str, *, timeout_seconds: float = 5.0) -> str:
        """Returns SERVING, NOT_SERVING ... of "ingest", "embedder" or "search"; raises ServiceUnreachable."""
        return await self.connections[service].health(timeout_seconds=timeout_seconds)

    @property
    def connections(self) -> Mapping[str, Connection]:
        return {"ingest": self._ingest, "embedder": self._embedder, "search": self._search}

    async def close(self) -> None:
        """Ends calls that are under way and closes the channels."""
        for connection in self.connections.values():
            await connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _several(document_ids: Sequence[str] | str) -> Sequence[str]:
    # A single id is a sequence too, of its letters; nobody ever means that.
    return (document_ids,) if isinstance(document_ids, str) else document_ids
