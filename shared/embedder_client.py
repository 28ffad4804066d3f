"""The embedder as ingest and search see it.

Owns batching, deadlines, patience and the checks on every answer (fingerprint, shape, finite).
Protobuf ends here. It keeps no vectors and knows nothing of documents.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
from readymark.embedder.v1 import embedder_service_pb2 as pb
from readymark.embedder.v1 import embedder_service_pb2_grpc as pb_grpc

from shared.errors import (
    DeadlineExceededError,
    DependencyUnavailableError,
    ModelMismatchError,
    OverloadedError,
    TemporaryError,
)
from shared.rpc.channel import create_channel

Kind = Literal["QUERY", "DOCUMENT"]
Vectors = npt.NDArray[np.float32]
Answer = TypeVar("Answer")
OnBatch = Callable[[int, Vectors], Awaitable[None]]

INPUT_TYPES = {"QUERY": pb.INPUT_TYPE_QUERY, "DOCUMENT": pb.INPUT_TYPE_DOCUMENT}
MODEL_TIMEOUT_SECONDS = 10.0
TOKENIZER_TIMEOUT_SECONDS = 60.0
MAX_TOKENIZER_BYTES = 128 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Identity and limits of the embedder's model."""

    model_id: str
    fingerprint: str
    dimension: int
    max_input_tokens: int
    max_batch_inputs: int
    max_batch_bytes: int
    document_overhead_tokens: int
    unknown_token_id: int | None
    tokenizer_sha256: str


@dataclasses.dataclass(frozen=True, slots=True)
class EmbedResult:
    """Vectors [texts, dimension], and counts for each text; prefix and special tokens are counted."""

    vectors: Vectors
    token_counts: tuple[int, ...]
    unknown_token_counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How documents are sent and for how long it is tried."""

    batch_tokens: int = 4096
    batch_texts: int = 64
    """More gains nothing: measured, the cost of a call is under 0.1 % at 64 texts."""
    calls_in_flight: int = 2
    base_timeout_seconds: float = 30.0
    slowest_tokens_per_second: float = 50.0
    """A call's deadline grows with its tokens at this rate."""
    retry_budget_seconds: float = 120.0
    """Since the first failure of a batch; then the embedder counts as unavailable."""
    first_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0

    def timeout_seconds(self, tokens: int) -> float:
        return self.base_timeout_seconds + tokens / self.slowest_tokens_per_second

    def backoff_seconds(self, failures: int, asked_for: float | None) -> float:
        """Returns how long to wait: never shorter than the embedder asked, and not all at the same time."""
        ceiling = min(self.max_backoff_seconds, self.first_backoff_seconds * 2.0 ** min(failures, 16))
        return (asked_for or 0.0) + random.uniform(ceiling / 2, ceiling)


class EmbedderClient:
    """One channel to one embedder address. Close it with `close`."""

    def __init__(self, address: str, *, patience: Patience | None = None) -> None:
        self._patience = patience or Patience()
        self._channel = create_channel(address)
        self._stub: pb_grpc.EmbedderServiceAsyncStub = pb_grpc.EmbedderServiceStub(self._channel)
        self._model: ModelInfo | None = None
        self._asking = asyncio.Lock()

    async def close(self) -> None:
        await self._channel.close()

    async def model(self) -> ModelInfo:
        """Returns what the embedder said when it was asked first."""
        if self._model is not None:
            return self._model
        async with self._asking:
            return self._model or await self.refresh_model()

    async def refresh_model(self) -> ModelInfo:
        """Asks the embedder anew."""
        response = await self._stub.GetModel(pb.GetModelRequest(), timeout=MODEL_TIMEOUT_SECONDS)
        self._model = _model_info(response.model)
        return self._model

    async def embed(
        self,
        texts: Sequence[str],
        kind: Kind,
        expected_fingerprint: str,
        timeout_seconds: float,
    ) -> EmbedResult:
        """Returns the vectors of one call, tried once; raises a ReadymarkError.

        ModelMismatchError when the embedder runs another model than `expected_fingerprint`.
        """
        request = pb.EmbedRequest(
            expected_fingerprint=expected_fingerprint,
            inputs=texts,
            input_type=INPUT_TYPES[kind],
            truncation_policy=pb.TRUNCATION_POLICY_ERROR,
        )
        try:
            response = await self._stub.Embed(request, timeout=timeout_seconds)
        except ModelMismatchError:
            self._model = None
            raise
        return self._checked(response, len(texts), expected_fingerprint)

    async def embed_documents(
        self,
        texts: Sequence[str],
        token_counts: Sequence[int],
        expected_fingerprint: str,
        on_batch: OnBatch,
    ) -> None:
        """Sends all texts in batches and gives each batch's vectors to `on_batch(start_index, vectors)`.

        Batches may come back out of order; `on_batch` is never called twice at once. Retries while
        the embedder is away or busy, then raises DependencyUnavailableError. What `on_batch` got
        before a failure stays with it.
        """
        model = await self._model_with_retries()
        batches = _batches(texts, token_counts, model, self._patience)
        storing = asyncio.Lock()

        async def send() -> None:
            # The senders share one iterator, so a slow batch does not hold up the others.
            for start, end in batches:
                vectors = await self._embed_patiently(
                    texts[start:end], token_counts[start:end], expected_fingerprint
                )
                async with storing:
                    await on_batch(start, vectors)

        try:
            async with asyncio.TaskGroup() as senders:
                for _ in range(self._patience.calls_in_flight):
                    senders.create_task(send())
        except ExceptionGroup as group:
            # One failure cancels the others; a second one at the same moment says nothing more.
            raise group.exceptions[0] from group.exceptions[0].__cause__

    async def tokenizer_bytes(self, fingerprint: str) -> bytes:
        """Returns the tokenizer.json of the model `fingerprint`, checked against its SHA-256."""
        model = await self.model()
        request = pb.DownloadTokenizerRequest(expected_fingerprint=fingerprint)
        pieces: list[bytes] = []
        size = 0
        async for response in self._stub.DownloadTokenizer(request, timeout=TOKENIZER_TIMEOUT_SECONDS):
            size += len(response.data)
            if size > MAX_TOKENIZER_BYTES:
                raise DependencyUnavailableError("EMBEDDER_UNAVAILABLE")
            pieces.append(response.data)
        content = b"".join(pieces)
        if model.fingerprint != fingerprint:
            model = await self.refresh_model()
        if hashlib.sha256(content).hexdigest() != model.tokenizer_sha256:
            raise DependencyUnavailableError("EMBEDDER_UNAVAILABLE")
        return content

    async def _model_with_retries(self) -> ModelInfo:
        return await self._patiently(self.model)

    async def _embed_patiently(
        self, texts: Sequence[str], token_counts: Sequence[int], expected_fingerprint: str
    ) -> Vectors:
        timeout_seconds = self._patience.timeout_seconds(sum(token_counts))

        async def call() -> Vectors:
            result = await self.embed(texts, "DOCUMENT", expected_fingerprint, timeout_seconds)
            return result.vectors

        if len(texts) == 1:
            return await self._patiently(call, DeadlineExceededError)
        try:
            return await self._patiently(call)
        except DeadlineExceededError:
            # Too much for its time: two halves, one after the other, have twice the time.
            middle = len(texts) // 2
            halves = [
                await self._embed_patiently(texts[part], token_counts[part], expected_fingerprint)
                for part in (slice(0, middle), slice(middle, None))
            ]
            return np.concatenate(halves)

    async def _patiently(self, call: Callable[[], Awaitable[Answer]], *also: type[TemporaryError]) -> Answer:
        """Returns the answer of `call`, repeated while the embedder is away, busy or fails by `also`."""
        retried: tuple[type[TemporaryError], ...] = (DependencyUnavailableError, OverloadedError, *also)
        failures = 0
        give_up_at = float("inf")
        while True:
            try:
                return await call()
            except retried as error:
                wait = self._patience.backoff_seconds(failures, error.retry_after_seconds)
                if failures == 0:
                    give_up_at = time.monotonic() + self._patience.retry_budget_seconds
                if time.monotonic() + wait > give_up_at:
                    raise DependencyUnavailableError(
                        "EMBEDDER_UNAVAILABLE", retry_after_seconds=error.retry_after_seconds
                    ) from error
                failures += 1
                await asyncio.sleep(wait)

    def _checked(self, response: pb.EmbedResponse, count: int, expected_fingerprint: str) -> EmbedResult:
        """Returns the answer, when it is one: an embedder that answers nonsense counts as unavailable."""
        if expected_fingerprint and response.fingerprint != expected_fingerprint:
            self._model = None
            raise ModelMismatchError(
                "EMBEDDING_MODEL_MISMATCH", expected=expected_fingerprint, actual=response.fingerprint
            )
        counts = (len(response.token_counts), len(response.unknown_token_counts))
        if len(response.vectors) != count * response.dimension * 4 or counts != (count, count):
            raise DependencyUnavailableError("EMBEDDER_UNAVAILABLE")
        vectors = np.frombuffer(response.vectors, "<f4").reshape(count, response.dimension)
        if not np.isfinite(vectors).all():
            raise DependencyUnavailableError("EMBEDDER_UNAVAILABLE")
        return EmbedResult(vectors, tuple(response.token_counts), tuple(response.unknown_token_counts))


def _batches(
    texts: Sequence[str], token_counts: Sequence[int], model: ModelInfo, patience: Patience
) -> Iterator[tuple[int, int]]:
    """Yields start and end of each batch: neighbours in order, within the limits of client and model."""
    max_texts = min(patience.batch_texts, model.max_batch_inputs)
    start, tokens, size = 0, 0, 0
    for index, (text, count) in enumerate(zip(texts, token_counts, strict=True)):
        text_bytes = len(text.encode())
        is_full = (
            index - start >= max_texts
            or tokens + count > patience.batch_tokens
            or size + text_bytes > model.max_batch_bytes
        )
        if index > start and is_full:
            yield start, index
            start, tokens, size = index, 0, 0
        tokens += count
        size += text_bytes
    if start < len(texts):
        yield start, len(texts)


def _model_info(model: pb.Model) -> ModelInfo:
    return ModelInfo(
        model_id=model.model_id,
        fingerprint=model.fingerprint,
        dimension=model.dimension,
        max_input_tokens=model.max_input_tokens,
        max_batch_inputs=model.max_batch_inputs,
        max_batch_bytes=model.max_batch_bytes,
        document_overhead_tokens=model.document_overhead_tokens,
        unknown_token_id=None if model.unknown_token_id < 0 else model.unknown_token_id,
        tokenizer_sha256=model.tokenizer_sha256,
    )
