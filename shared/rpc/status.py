"""Errors to gRPC statuses and back. The one file that knows gRPC status codes.

An error travels as canonical code + google.rpc details: ErrorInfo (reason, domain, the
facts of the sentence and the error's kind under "code"), LocalizedMessage in the reader's
language, RetryInfo where there is a time to wait, BadRequest where a field is at fault.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shared import errors, messages, telemetry
from shared.errors import ReadymarkError

DOMAIN = "readymark"
# The kind of the error travels among the facts under this name.
CODE_KEY = "code"
# Clients refuse trailers of more than 8 KiB, and then see no error of ours at all. Each byte
# of a fact costs about eight there: percent-encoded once, in base64 four times.
MAX_FACT_BYTES = 240
PUSHBACK_KEY = "grpc-retry-pushback-ms"

STATUS_OF: Mapping[type[ReadymarkError], grpc.StatusCode] = {
    errors.InvalidDocumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ResourceNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.ConflictError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    errors.ModelMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DependencyUnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.LeaseLostError: grpc.StatusCode.ABORTED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
# What a status means that does not come from a Readymark service: a proxy, gRPC itself.
_FOREIGN: Mapping[grpc.StatusCode, tuple[type[ReadymarkError], str]] = {
    grpc.StatusCode.UNAVAILABLE: (errors.DependencyUnavailableError, "UNAVAILABLE"),
    grpc.StatusCode.CANCELLED: (errors.DependencyUnavailableError, "UNAVAILABLE"),
    grpc.StatusCode.ABORTED: (errors.DependencyUnavailableError, "UNAVAILABLE"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (errors.OverloadedError, "OVERLOADED"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (errors.DeadlineExceededError, "DEADLINE_EXCEEDED"),
}


def code_of(error: ReadymarkError) -> grpc.StatusCode:
    return STATUS_OF[type(error)]


def to_rpc_status(error: ReadymarkError, language: str = "en") -> status_pb2.Status:
    """Returns the status a client gets, sentence in `language`."""
    facts = {name: _shortened(value) for name, value in error.parameters.items()}
    message = messages.render(error.reason, facts, language)
    status = status_pb2.Status(code=code_of(error).value[0], message=message)
    details: list[object] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=DOMAIN, metadata={**facts, CODE_KEY: error.code}
        ),
        error_details_pb2.LocalizedMessage(locale="zh-CN" if language == "zh" else "en-US", message=message),
    ]
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_seconds * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    field = facts.get("field")
    if field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)  # type: ignore[arg-type]
        status.details.append(packed)
    return status


def _shortened(fact: str) -> str:
    # A lone surrogate (a file name that is no UTF-8) would make protobuf fail, and hide the error.
    encoded = fact[: MAX_FACT_BYTES + 1].encode("utf-8", "replace")
    if len(encoded) <= MAX_FACT_BYTES:
        return encoded.decode("utf-8")
    return encoded[:MAX_FACT_BYTES].decode("utf-8", "ignore") + "…"


def trailing_metadata(error: ReadymarkError) -> tuple[tuple[str, str], ...]:
    """Returns what a gRPC client library itself understands: how long to wait before a retry."""
    if error.retry_after_seconds is None:
        return ()
    return ((PUSHBACK_KEY, str(int(error.retry_after_seconds * 1000))),)


def from_rpc_error(error: grpc.RpcError) -> ReadymarkError:
    """Returns the error that a service raised, or the nearest of ours for a foreign status."""
    info, retry_after = _details_of(error)
    kind, reason = _foreign(error)
    if info is not None and info.domain == DOMAIN:
        facts = dict(info.metadata)
        # A kind that a newer release has is taken for the nearest one by status.
        kind = errors.BY_CODE.get(facts.pop(CODE_KEY, ""), kind)
        facts.pop("retry_after_seconds", None)
        return kind(info.reason, retry_after_seconds=retry_after, **facts)
    if kind is errors.InternalError:
        return kind(reason, trace_id=telemetry.current_trace_id() or "?")
    return kind(reason, retry_after_seconds=retry_after)


def _foreign(error: grpc.RpcError) -> tuple[type[ReadymarkError], str]:
    # gRPC calls a message that is too large RESOURCE_EXHAUSTED as well; waiting would not shrink it.
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or ""):
        return errors.InternalError, "INTERNAL"
    return _FOREIGN.get(error.code(), (errors.InternalError, "INTERNAL"))


def _details_of(error: grpc.RpcError) -> tuple[error_details_pb2.ErrorInfo | None, float | None]:
    """Returns what and when to come back; nothing when there are no details, or none that can be read."""
    info: error_details_pb2.ErrorInfo | None = None
    retry_after = None
    try:
        status = rpc_status.from_call(error)
        for detail in status.details if status is not None else ():
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                found = error_details_pb2.ErrorInfo()
                detail.Unpack(found)
                info = found
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry = error_details_pb2.RetryInfo()
                detail.Unpack(retry)
                retry_after = retry.retry_delay.ToMilliseconds() / 1000
    except (ValueError, DecodeError):
        # Damaged, or they contradict the code: somebody between us changed one of them.
        return None, None
    return info, retry_after
