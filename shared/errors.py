"""The errors of the system, and nothing else.

    ReadymarkError
    ├── PermanentError            another attempt cannot help; ends a job (rule J8)
    │   ├── InvalidDocumentError      INVALID_DOCUMENT
    │   └── ResourceNotFoundError     RESOURCE_NOT_FOUND
    ├── RequestError              the call as it stands is refused; nothing was changed
    │   ├── InvalidArgumentError      INVALID_ARGUMENT
    │   ├── ConflictError             CONFLICT
    │   └── AlreadyExistsError        ALREADY_EXISTS
    └── TemporaryError            the same again may succeed
        ├── DependencyUnavailableError  UNAVAILABLE
        ├── OverloadedError             OVERLOADED
        ├── DeadlineExceededError       DEADLINE_EXCEEDED
        ├── ModelMismatchError          MODEL_MISMATCH
        ├── LeaseLostError              LEASE_LOST
        └── InternalError               INTERNAL

An error is raised with a reason of `shared/messages.py` and the facts of its sentence:
`raise InvalidDocumentError("PASSWORD_PROTECTED", file_type="PDF")`. The sentence is
rendered when somebody reads it, in the reader's language. Facts are shown to users: no
path, host name, SQL or secret ever goes into them (rule J10).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from shared import messages


class ReadymarkError(Exception):
    """`code` is the kind, `reason` the exact cause, `parameters` the facts of the sentence."""

    code: ClassVar[str] = "INTERNAL"

    def __init__(
        self, reason: str, /, *, retry_after_seconds: float | None = None, **parameters: object
    ) -> None:
        self.reason = reason
        self.parameters: Mapping[str, str] = {name: str(value) for name, value in parameters.items()}
        self.retry_after_seconds = retry_after_seconds
        super().__init__(messages.render(reason, self.parameters))

    def message(self, language: str = "en") -> str:
        """Returns the sentence for the person who reads it; language "en" or "zh"."""
        return messages.render(self.reason, self.parameters, language)


class PermanentError(ReadymarkError):
    """Another attempt cannot help."""


class InvalidDocumentError(PermanentError):
    """The document itself is at fault; its sender has to change it."""

    code = "INVALID_DOCUMENT"


class ResourceNotFoundError(PermanentError):
    """What is named does not exist (any more)."""

    code = "RESOURCE_NOT_FOUND"


class RequestError(ReadymarkError):
    """The call as it stands is refused."""


class InvalidArgumentError(RequestError):
    """A field of the call is wrong; the parameter `field` names it."""

    code = "INVALID_ARGUMENT"


class ConflictError(RequestError):
    """The state does not allow the call."""

    code = "CONFLICT"


class AlreadyExistsError(RequestError):
    """What the call would create is there already."""

    code = "ALREADY_EXISTS"


class TemporaryError(ReadymarkError):
    """The same again may succeed later."""


class DependencyUnavailableError(TemporaryError):
    """Something this service needs does not answer."""

    code = "UNAVAILABLE"


class OverloadedError(TemporaryError):
    """Too much to do; `retry_after_seconds` says when to come back."""

    code = "OVERLOADED"


class DeadlineExceededError(TemporaryError):
    """There was not enough time."""

    code = "DEADLINE_EXCEEDED"


class ModelMismatchError(TemporaryError):
    """The embedder runs another model than the vectors were made with."""

    code = "MODEL_MISMATCH"


class LeaseLostError(TemporaryError):
    """The worker does not hold the job any more; nothing was written."""

    code = "LEASE_LOST"


class InternalError(TemporaryError):
    """A bug or an unforeseen fault; the log has the details under the same trace id."""

    code = "INTERNAL"


LEAVES: tuple[type[ReadymarkError], ...] = (
    InvalidDocumentError,
    ResourceNotFoundError,
    InvalidArgumentError,
    ConflictError,
    AlreadyExistsError,
    DependencyUnavailableError,
    OverloadedError,
    DeadlineExceededError,
    ModelMismatchError,
    LeaseLostError,
    InternalError,
)
BY_CODE: Mapping[str, type[ReadymarkError]] = {leaf.code: leaf for leaf in LEAVES}
