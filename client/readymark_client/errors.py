"""The errors that the SDK raises, and how they are read from a failed call.

    ReadymarkClientError
    ├── InvalidDocument       the document itself is at fault; its sender has to change it
    ├── NotFound              what is named does not exist (any more)
    ├── InvalidArgument       a field of the call is wrong
    ├── Conflict              the state does not allow the call
    ├── AlreadyExists         what the call would create is there already
    ├── Unavailable           something a service needs does not answer
    │   └── ServiceUnreachable    the service itself does not answer
    ├── Overloaded            too much to do; `retry_after_seconds` says when to come back
    ├── DeadlineExceeded      there was not enough time
    ├── ModelMismatch         the embedder runs another model than the vectors were made with
    └── ServiceFault          a bug or an unforeseen fault on the other side

Owns decoding of google.rpc details; never decides what is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "readymark"


class ReadymarkClientError(Exception):
    """`code` is the kind, `reason` the exact cause, `message` a sentence in the reader's language.

    `parameters` are the facts of the sentence; `grpc_code` is the name of the canonical
    code, e.g. "NOT_FOUND", or empty when the fault was found before any call.
    """

    code: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        parameters: Mapping[str, str] | None = None,
        grpc_code: str = "",
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.parameters: Mapping[str, str] = dict(parameters or {})
        self.grpc_code = grpc_code
        self.retry_after_seconds = retry_after_seconds

    def __str__(self) -> str:
        return f"{self.message} [{self.code}: {self.reason}]"


class InvalidDocument(ReadymarkClientError):
    """The document itself is at fault; its sender has to change it."""

    code = "INVALID_DOCUMENT"


class NotFound(ReadymarkClientError):
    """What is named does not exist (any more)."""

    code = "RESOURCE_NOT_FOUND"


class InvalidArgument(ReadymarkClientError):
    """A field of the call is wrong; the parameter `field` names it."""

    code = "INVALID_ARGUMENT"


class Conflict(ReadymarkClientError):
    """The state does not allow the call."""

    code = "CONFLICT"


class AlreadyExists(ReadymarkClientError):
    """What the call would create is there already."""

    code = "ALREADY_EXISTS"


class Unavailable(ReadymarkClientError):
    """Something a service needs does not answer; the same again may succeed later."""

    code = "UNAVAILABLE"


class ServiceUnreachable(Unavailable):
    """The service itself does not answer, so nothing is known of the call."""


class Overloaded(ReadymarkClientError):
    """Too much to do; `retry_after_seconds` says when to come back."""

    code = "OVERLOADED"


class DeadlineExceeded(ReadymarkClientError):
    """There was not enough time."""

    code = "DEADLINE_EXCEEDED"


class ModelMismatch(ReadymarkClientError):
    """The embedder runs another model than the vectors were made with."""

    code = "MODEL_MISMATCH"


class ServiceFault(ReadymarkClientError):
    """A bug or an unforeseen fault on the other side."""


BY_CODE: Mapping[str, type[ReadymarkClientError]] = {
    kind.code: kind
    for kind in (
        InvalidDocument,
        NotFound,
        InvalidArgument,
        Conflict,
        AlreadyExists,
        Unavailable,
        Overloaded,
        DeadlineExceeded,
        ModelMismatch,
        ServiceFault,
    )
}

# Used only when the answer carries no ErrorInfo: gRPC itself or a proxy made it.
BY_GRPC_CODE: Mapping[str, type[ReadymarkClientError]] = {
    "NOT_FOUND": NotFound,
    "INVALID_ARGUMENT": InvalidArgument,
    "OUT_OF_RANGE": InvalidArgument,
    "FAILED_PRECONDITION": Conflict,
    "ABORTED": Conflict,
    "ALREADY_EXISTS": AlreadyExists,
    "UNAVAILABLE": ServiceUnreachable,
    "RESOURCE_EXHAUSTED": Overloaded,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
}

# reason -> (English, Chinese): faults that are found on this side of the wire.
SENTENCES: Mapping[str, tuple[str, str]] = {
    "SERVICE_UNREACHABLE": (
        "The {service} service does not answer at {address}; start it, or give its address with {option}.",
        "{service} 服务在 {address} 没有响应；请启动该服务，或用 {option} 指定其地址。",
    ),
    "DEADLINE_EXCEEDED": (
        "The {service} service did not finish within {seconds} seconds; give the call more time.",
        "{service} 服务未能在 {seconds} 秒内完成；请给予更多时间。",
    ),
    "UNEXPECTED_ANSWER": (
        "The {service} service answered {answer}: {detail}",
        "{service} 服务返回 {answer}：{detail}",
    ),
    "FILE_NOT_READABLE": (
        "{path} cannot be read: {problem}.",
        "无法读取 {path}：{problem}。",
    ),
    "NOT_SETTLED": (
        "After {seconds} seconds {count} documents are not settled yet; wait longer or look at the queue.",
        "{seconds} 秒后仍有 {count} 个文档既未 READY 也未 FAILED；请继续等待或查看队列。",
    ),
    "DOCUMENT_DELETED": (
        "Document {document} was deleted while it was waited for.",
        "等待期间文档 {document} 已被删除。",
    ),
    "FIELD_INVALID": ("{field} is not valid: {problem}.", "字段 {field} 无效：{problem}。"),
}


def local_error(
    kind: type[ReadymarkClientError], reason: str, language: str, grpc_code: str = "", **parameters: object
) -> ReadymarkClientError:
    """Returns an error of this side, its sentence in `language`."""
    facts = {name: str(value) for name, value in parameters.items()}
    sentence = SENTENCES[reason][1 if language == "zh" else 0].format(**facts)
    return kind(reason, sentence, parameters=facts, grpc_code=grpc_code)


def from_rpc_error(
    error: grpc.RpcError, *, service: str, address: str, language: str, timeout_seconds: float
) -> ReadymarkClientError:
    """Returns what a failed call says; `service` and `address` name who was called."""
    grpc_code = error.code().name
    status = details_of(error)
    decoded = from_status(status, grpc_code) if status is not None else None
    if decoded is not None:
        return decoded
    kind = BY_GRPC_CODE.get(grpc_code, ServiceFault)
    if kind is ServiceUnreachable:
        facts = {"service": service, "address": address, "option": f"--{service}"}
        return local_error(kind, "SERVICE_UNREACHABLE", language, grpc_code, **facts)
    if kind is DeadlineExceeded:
        facts = {"service": service, "seconds": f"{timeout_seconds:g}"}
        return local_error(kind, "DEADLINE_EXCEEDED", language, grpc_code, **facts)
    detail = error.details() or "no further detail"
    return local_error(
        kind, "UNEXPECTED_ANSWER", language, grpc_code, service=service, answer=grpc_code, detail=detail
    )


def details_of(error: grpc.RpcError) -> status_pb2.Status | None:
    """Returns the google.rpc.Status in the trailing metadata, None when there is none to read."""
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == DETAILS_KEY:
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def from_status(status: status_pb2.Status, grpc_code: str = "") -> ReadymarkClientError | None:
    """Returns the error that a google.rpc.Status of a Readymark service describes, else None."""
    facts = read_details(status)
    if facts is None:
        return None
    code, reason, parameters, message, retry_after_seconds = facts
    return BY_CODE.get(code, ServiceFault)(
        reason,
        message or status.message,
        parameters=parameters,
        grpc_code=grpc_code,
        retry_after_seconds=retry_after_seconds,
    )


def read_details(status: Any) -> tuple[str, str, dict[str, str], str, float | None] | None:
    """Returns (code, reason, parameters, sentence, retry after) of a status, None without ErrorInfo."""
    code = reason = message = ""
    parameters: dict[str, str] = {}
    retry_after_seconds: float | None = None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
            if info.domain == DOMAIN:
                reason, parameters = info.reason, dict(info.metadata)
                code = parameters.pop("code", "")
        elif detail.Is(error_details_pb2.LocalizedMessage.DESCRIPTOR):
            message = error_details_pb2.LocalizedMessage.FromString(detail.value).message
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
            retry_after_seconds = delay.seconds + delay.nanos / 1e9
    return (code, reason, parameters, message, retry_after_seconds) if reason else None
