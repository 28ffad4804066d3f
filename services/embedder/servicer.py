"""The edge: translates a call in, asks the embedder, translates the answer out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from readymark.embedder.v1 import embedder_service_pb2 as pb
from readymark.embedder.v1 import embedder_service_pb2_grpc as pb_grpc

from services.embedder import wire
from services.embedder.embedding import TextEmbedder
from shared import telemetry


class EmbedderServicer(pb_grpc.EmbedderServiceServicer):
    def __init__(self, embedder: TextEmbedder) -> None:
        self._embedder = embedder

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelResponse:
        return pb.GetModelResponse(model=wire.model_message(self._embedder.model))

    async def Embed(  # noqa: N802
        self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.EmbedResponse:
        with telemetry.span("embed", {"readymark.inputs": len(request.inputs)}) as span:
            embedded = await self._embedder.embed(
                list(request.inputs),
                wire.input_kind(request),
                truncate=wire.is_truncation_allowed(request),
                expected_fingerprint=request.expected_fingerprint,
                timeout_seconds=context.time_remaining(),
            )
            span.set_attributes(wire.span_attributes(embedded))
        return wire.embed_response(embedded, self._embedder.model)

    async def DownloadTokenizer(  # noqa: N802
        self, request: pb.DownloadTokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.DownloadTokenizerResponse]:
        for piece in self._embedder.tokenizer_pieces(request.expected_fingerprint):
            yield pb.DownloadTokenizerResponse(data=piece)
