"""Between protobuf messages and values. Owns the encoding of vectors; decides nothing."""

from __future__ import annotations

from datetime import timedelta

from readymark.embedder.v1 import embedder_service_pb2 as pb

from services.embedder.embedding import Embedded, LoadedModel
from services.embedder.tokenizing import InputKind
from shared.errors import InvalidArgumentError

KINDS = {pb.INPUT_TYPE_QUERY: InputKind.QUERY, pb.INPUT_TYPE_DOCUMENT: InputKind.DOCUMENT}
TRUNCATE = {
    pb.TRUNCATION_POLICY_UNSPECIFIED: False,
    pb.TRUNCATION_POLICY_ERROR: False,
    pb.TRUNCATION_POLICY_END: True,
}


def input_kind(request: pb.EmbedRequest) -> InputKind:
    if request.input_type == pb.INPUT_TYPE_UNSPECIFIED:
        raise InvalidArgumentError("FIELD_REQUIRED", field="input_type")
    kind = KINDS.get(request.input_type)
    if kind is None:
        raise InvalidArgumentError("FIELD_INVALID", field="input_type", problem="UNKNOWN_VALUE")
    return kind


def is_truncation_allowed(request: pb.EmbedRequest) -> bool:
    allowed = TRUNCATE.get(request.truncation_policy)
    if allowed is None:
        raise InvalidArgumentError("FIELD_INVALID", field="truncation_policy", problem="UNKNOWN_VALUE")
    return allowed


def embed_response(embedded: Embedded, model: LoadedModel) -> pb.EmbedResponse:
    response = pb.EmbedResponse(
        fingerprint=model.fingerprint,
        dimension=model.dimension,
        vectors=embedded.vectors.astype("<f4", copy=False).tobytes(),
        token_counts=embedded.token_counts,
        truncated=embedded.truncated,
        unknown_token_counts=embedded.unknown_token_counts,
    )
    response.queue_time.FromTimedelta(timedelta(seconds=embedded.queue_seconds))
    response.compute_time.FromTimedelta(timedelta(seconds=embedded.compute_seconds))
    return response


def span_attributes(embedded: Embedded) -> dict[str, float]:
    return {
        "tokens": sum(embedded.token_counts),
        "queue_seconds": embedded.queue_seconds,
        "compute_seconds": embedded.compute_seconds,
    }


def model_message(model: LoadedModel) -> pb.Model:
    return pb.Model(
        model_id=model.model_id,
        fingerprint=model.fingerprint,
        dimension=model.dimension,
        max_input_tokens=model.max_input_tokens,
        max_batch_inputs=model.max_batch_inputs,
        max_batch_bytes=model.max_batch_bytes,
        normalized=True,
        pooling=model.pooling,
        query_prefix=model.query_prefix,
        document_prefix=model.document_prefix,
        execution_providers=model.providers,
        tokenizer_sha256=model.tokenizer_sha256,
        document_overhead_tokens=model.document_overhead_tokens,
        unknown_token_id=-1 if model.unknown_token_id is None else model.unknown_token_id,
    )
