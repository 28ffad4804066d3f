"""The SDK without asyncio: `Readymark` runs `AsyncReadymark` on a loop in a thread of its own.

Owns the bridge between the two. Never holds a rule of its own, so both behave alike.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from readymark_client import values
from readymark_client.asynchronous import (
    DEFAULT_COLLECTION,
    DEFAULT_EMBEDDER,
    DEFAULT_INGEST,
    DEFAULT_SEARCH,
    PAGE_SIZE,
    AsyncReadymark,
)
from readymark_client.connection import DEFAULT_TIMEOUT_SECONDS
from readymark_client.upload import OnSent

Value = TypeVar("Value")


class Readymark:
    """A client of the three services for code without asyncio; safe to share between threads.

    Methods, units and errors are those of `AsyncReadymark`. Use it as a context manager,
    or call `close`.
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
        self._client = AsyncReadymark(
            ingest,
            search,
            embedder,
            language=language,
            timeout_seconds=timeout_seconds,
            credentials=credentials,
        )
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report_fault)
        self._thread = threading.Thread(target=self._loop.run_forever, name="readymark-client", daemon=True)
        self._thread.start()

    def submit(
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
        on_sent: OnSent | None = None,
    ) -> values.Document:
        """See AsyncReadymark.submit; `on_sent` is called on a thread of its own."""
        return self._run(
            self._client.submit(
                source,
                collection,
                source_key=source_key,
                display_name=display_name,
                media_type=media_type,
                metadata=metadata,
                on_duplicate=on_duplicate,
                request_id=request_id,
                timeout_seconds=timeout_seconds,
                on_sent=on_sent,
            )
        )

    def get(self, document_id: str) -> values.Document:
        """Returns one document by id or name; raises NotFound."""
        return self._run(self._client.get(document_id))

    def list(
        self,
        collection: str | None = None,
        *,
        status: values.DocumentStatus | str | None = None,
        page_size: int = PAGE_SIZE,
    ) -> Iterator[values.Document]:
        """Yields documents, newest first, page by page; all collections when none is named."""
        return self._iterate(self._client.list(collection, status=status, page_size=page_size))

    def watch(
        self,
        document_ids: Sequence[str] | str = (),
        *,
        collection: str = DEFAULT_COLLECTION,
        until_settled: bool = False,
        resume_token: str = "",
        timeout_seconds: float | None = None,
    ) -> Iterator[values.Change]:
        """See AsyncReadymark.watch; closing the iterator ends the stream."""
        return self._iterate(
            self._client.watch(
                document_ids,
                collection=collection,
                until_settled=until_settled,
                resume_token=resume_token,
                timeout_seconds=timeout_seconds,
            )
        )

    def wait(
        self, document_ids: Sequence[str] | str, timeout_seconds: float = 600.0
    ) -> tuple[values.Document, ...]:
        """See AsyncReadymark.wait."""
        return self._run(self._client.wait(document_ids, timeout_seconds))

    def retry(self, document_id: str) -> values.Document:
        """Starts a FAILED document again; raises Conflict when it is not FAILED."""
        return self._run(self._client.retry(document_id))

    def cancel(self, document_id: str) -> values.Document:
        """Ends a waiting or running document as FAILED; raises Conflict when it is settled."""
        return self._run(self._client.cancel(document_id))

    def delete(self, document_id: str, *, etag: str = "", allow_missing: bool = False) -> None:
        """See AsyncReadymark.delete."""
        self._run(self._client.delete(document_id, etag=etag, allow_missing=allow_missing))

    def attempts(self, document_id: str) -> Iterator[values.Attempt]:
        """Yields the attempts of a document, newest first; raises NotFound."""
        return self._iterate(self._client.attempts(document_id))

    def chunks(self, document_id: str, *, version: int = 0) -> Iterator[values.Chunk]:
        """Yields the chunks of a version in order; 0 is the newest that has chunks. Raises NotFound."""
        return self._iterate(self._client.chunks(document_id, version=version))

    def download(
        self, document_id: str, target: Path, *, asset_id: str = "", timeout_seconds: float = 600.0
    ) -> values.Download:
        """See AsyncReadymark.download."""
        return self._run(
            self._client.download(document_id, target, asset_id=asset_id, timeout_seconds=timeout_seconds)
        )

    def stats(self, collection: str | None = None) -> values.QueueStats:
        """See AsyncReadymark.stats."""
        return self._run(self._client.stats(collection))

    def search(
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
        """See AsyncReadymark.search."""
        return self._run(
            self._client.search(
                query,
                collection,
                top_k=top_k,
                mode=mode,
                documents=documents,
                explain=explain,
                timeout_seconds=timeout_seconds,
            )
        )

    def model(self) -> values.EmbeddingModel:
        """Returns identity and limits of the model that the embedder runs."""
        return self._run(self._client.model())

    def health(self, service: str, *, timeout_seconds: float = 5.0) -> str:
        """See AsyncReadymark.health."""
        return self._run(self._client.health(service, timeout_seconds=timeout_seconds))

    def close(self) -> None:
        """Ends calls that are under way and the thread; a second call does nothing."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, Value]) -> Value:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C ends the call too, not only the wait for it.
            future.cancel()
            raise

    def _iterate(self, source: AsyncIterator[Value]) -> Iterator[Value]:
        async def advance() -> Value:
            return await anext(source)

        try:
            while True:
                try:
                    yield self._run(advance())
                except StopAsyncIteration:
                    return
        finally:
            aclose = getattr(source, "aclose", None)
            if aclose is not None and not self._loop.is_closed():
                self._run(aclose())


def _report_fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # grpc.aio wakes every loop of the process; the ones that come late read an empty pipe.
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
