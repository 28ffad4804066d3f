"""Resource names: `collections/{collection}` and `collections/{collection}/documents/{document}`.

Owns their grammar, nothing else. `-` stands for any collection where a name is looked up.
"""

from __future__ import annotations

import dataclasses
import re
import uuid

from services.ingest.model import DocumentId
from shared.errors import InvalidArgumentError

ANY = "-"
_COLLECTION = re.compile(r"collections/([a-z0-9][a-z0-9\-_.]{0,62})")
_DOCUMENT = re.compile(r"collections/(-|[a-z0-9][a-z0-9\-_.]{0,62})/documents/([0-9a-fA-F\-]{36})")


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentName:
    """`collection` is None when any will do."""

    collection: str | None
    document_id: DocumentId

    def __str__(self) -> str:
        """For sentences: the full name where the collection is known, the id alone where it is not."""
        if self.collection is None:
            return str(self.document_id)
        return f"collections/{self.collection}/documents/{self.document_id}"


def parse_collection(parent: str, *, field: str = "parent") -> str:
    """Returns the collection's own name; raises InvalidArgumentError."""
    match = _COLLECTION.fullmatch(parent)
    if match is None:
        raise InvalidArgumentError("FIELD_INVALID", field=field, problem="NOT_A_COLLECTION")
    return match.group(1)


def parse_collection_or_any(parent: str, *, field: str = "parent") -> str | None:
    """As parse_collection, but `collections/-` means any: None."""
    if not parent:
        raise InvalidArgumentError("FIELD_REQUIRED", field=field)
    if parent == f"collections/{ANY}":
        return None
    return parse_collection(parent, field=field)


def parse_document(name: str, *, field: str = "name") -> DocumentName:
    """Returns what `name` names; raises InvalidArgumentError."""
    match = _DOCUMENT.fullmatch(name)
    try:
        if match is None:
            raise ValueError(name)
        document_id = DocumentId(str(uuid.UUID(match.group(2))))
    except ValueError:
        raise InvalidArgumentError("FIELD_INVALID", field=field, problem="NOT_A_DOCUMENT") from None
    return DocumentName(None if match.group(1) == ANY else match.group(1), document_id)
