"""The use case: texts in, checked vectors out.

Owns the order of the steps (limits, tokens, queue) and the warm-up. The model's files, the
tokenizer, the session and the scheduler each know their own part; this file knows no gRPC.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from services.embedder.encoder import OnnxEncoder
from services.embedder.lanes import Lane
from services.embedder.model_files import find_model, read_model_files
from services.embedder.pooling import Vectors
from services.embedder.scheduler import Scheduler
from services.embedder.settings import EmbedderSettings
from services.embedder.tokenizing import InputKind, TextTokenizer, TokenizedText
from shared.errors import InvalidArgumentError, ModelMismatchError

LANE = {InputKind.QUERY: Lane.QUERY, InputKind.DOCUMENT: Lane.DOCUMENT}
TOKENIZER_PIECE_BYTES = 1 << 20
WARM_UP_TEXT = "A text of ordinary length, as it comes from a document, warms the model up. "


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Identity and limits of what runs here."""

    model_id: str
    fingerprint: str
    dimension: int
    max_input_tokens: int
    max_batch_inputs: int
    max_batch_bytes: int
    pooling: str
    query_prefix: str
    document_prefix: str
    providers: tuple[str, ...]
    tokenizer_sha256: str
    document_overhead_tokens: int
    unknown_token_id: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """The answer of one call; every sequence has an entry for each text, in order."""

    vectors: Vectors
    token_counts: Sequence[int]
    truncated: Sequence[bool]
    unknown_token_counts: Sequence[int]
    queue_seconds: float
    compute_seconds: float


class TextEmbedder:
    """One loaded model with its queue."""

    def __init__(
        self, model: LoadedModel, tokenizer: TextTokenizer, tokenizer_path: Path, scheduler: Scheduler
    ) -> None:
        self.model = model
        self.scheduler = scheduler
        self._tokenizer = tokenizer
        self._tokenizer_path = tokenizer_path
        # A thread for each kind, so that a query is not tokenised behind a batch of documents.
        self._threads = {
            kind: ThreadPoolExecutor(1, thread_name_prefix=f"tokenizer-{kind.value}") for kind in InputKind
        }

    async def embed(
        self,
        texts: Sequence[str],
        kind: InputKind,
        *,
        truncate: bool,
        expected_fingerprint: str,
        timeout_seconds: float | None,
    ) -> Embedded:
        """Returns a vector for each text; raises a ReadymarkError for the call as a whole."""
        self._check_fingerprint(expected_fingerprint)
        self._check_limits(texts)
        tokenized = await self._tokenize(texts, kind, truncate=truncate)
        rows = [text.ids for text in tokenized]
        computed = await self.scheduler.embed(rows, LANE[kind], timeout_seconds=timeout_seconds)
        return Embedded(
            vectors=computed.vectors,
            token_counts=[len(text.ids) for text in tokenized],
            truncated=[text.truncated for text in tokenized],
            unknown_token_counts=[text.unknown_token_count for text in tokenized],
            queue_seconds=computed.queue_seconds,
            compute_seconds=computed.compute_seconds,
        )

    def tokenizer_pieces(self, expected_fingerprint: str) -> Iterator[bytes]:
        """Returns tokenizer.json in pieces of a size that a message holds."""
        self._check_fingerprint(expected_fingerprint)
        return self._read_tokenizer()

    async def warm_up(self) -> None:
        """Runs the shapes that a day brings, so that the first caller does not pay for them.

        It also gives the scheduler its first measurement, by which it admits work.
        """
        longest = WARM_UP_TEXT * self.model.max_input_tokens
        for texts in (["a"], [longest], [f"{number} {WARM_UP_TEXT * 4}" for number in range(32)]):
            tokenized = await self._tokenize(texts, InputKind.DOCUMENT, truncate=True)
            await self.scheduler.embed([text.ids for text in tokenized], Lane.DOCUMENT)

    async def close(self) -> None:
        """Finishes what was accepted."""
        await self.scheduler.close()
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    async def _tokenize(
        self, texts: Sequence[str], kind: InputKind, *, truncate: bool
    ) -> list[TokenizedText]:
        def work() -> list[TokenizedText]:
            return self._tokenizer.tokenize(texts, kind, truncate=truncate)

        return await asyncio.get_running_loop().run_in_executor(self._threads[kind], work)

    def _read_tokenizer(self) -> Iterator[bytes]:
        with self._tokenizer_path.open("rb") as file:
            while piece := file.read(TOKENIZER_PIECE_BYTES):
                yield piece

    def _check_fingerprint(self, expected: str) -> None:
        if expected and expected != self.model.fingerprint:
            raise ModelMismatchError(
                "EMBEDDING_MODEL_MISMATCH", expected=expected, actual=self.model.fingerprint
            )

    def _check_limits(self, texts: Sequence[str]) -> None:
        if not texts:
            raise InvalidArgumentError("FIELD_REQUIRED", field="inputs")
        if len(texts) > self.model.max_batch_inputs:
            _refuse("TOO_MANY_INPUTS", actual=len(texts), limit=self.model.max_batch_inputs)
        size = sum(len(text.encode()) for text in texts)
        if size > self.model.max_batch_bytes:
            _refuse("TOO_MANY_BYTES", actual=size, limit=self.model.max_batch_bytes)
        for index, text in enumerate(texts):
            if not text.strip():
                raise InvalidArgumentError("INPUT_EMPTY", field=f"inputs[{index}]", index=index)


def _refuse(reason: str, *, actual: int, limit: int) -> NoReturn:
    raise InvalidArgumentError(reason, field="inputs", actual=actual, limit=limit)


def load_embedder(settings: EmbedderSettings) -> TextEmbedder:
    """Returns the embedder of the settings' model, not started yet; raises ModelFilesError."""
    files = read_model_files(*find_model(settings.model, Path(settings.models_dir)))
    tokenizer = TextTokenizer(files)
    encoder = OnnxEncoder(files, settings.provider)
    model = LoadedModel(
        model_id=files.model_id,
        fingerprint=files.fingerprint(),
        dimension=encoder.dimension,
        max_input_tokens=files.max_input_tokens,
        max_batch_inputs=settings.max_batch_inputs,
        max_batch_bytes=settings.max_batch_bytes,
        pooling=files.pooling.value,
        query_prefix=files.query_prefix,
        document_prefix=files.document_prefix,
        providers=encoder.providers,
        tokenizer_sha256=hashlib.sha256(files.tokenizer.read_bytes()).hexdigest(),
        document_overhead_tokens=tokenizer.overhead_tokens(InputKind.DOCUMENT),
        unknown_token_id=tokenizer.unknown_token_id,
    )
    (probe,) = tokenizer.tokenize(["probe"], InputKind.QUERY, truncate=True)
    scheduler = Scheduler(
        encoder.encode,
        dimension=encoder.dimension,
        probe=probe.ids,
        workers=settings.worker_count,
        batch_tokens=settings.tokens_of_a_batch,
        batch_rows=settings.rows_of_a_batch,
        max_queued_tokens=settings.max_queued_tokens,
    )
    return TextEmbedder(model, tokenizer, files.tokenizer, scheduler)
