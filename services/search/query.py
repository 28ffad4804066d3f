"""What a caller asks, checked. Owns the rules of a valid question; knows no protobuf and no SQL."""

from __future__ import annotations

import dataclasses
import enum
import re
import uuid
from collections.abc import Iterable

from shared.errors import InvalidArgumentError

DEFAULT_TOP_K = 10
MAX_TOP_K = 200
MAX_DOCUMENTS = 1_000

_PARENT = re.compile(r"collections/(?P<collection>[^/\s\0]{1,128})")
_DOCUMENT = re.compile(r"collections/(?P<collection>[^/\s]{1,128})/documents/(?P<document>[0-9A-Fa-f-]{36})")
ANY_COLLECTION = "-"


class SearchMode(enum.Enum):
    VECTOR = "VECTOR"
    KEYWORD = "KEYWORD"
    HYBRID = "HYBRID"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchQuery:
    collection: str
    text: str
    mode: SearchMode = SearchMode.HYBRID
    top_k: int = DEFAULT_TOP_K
    # None: all documents of the collection.
    document_ids: tuple[uuid.UUID, ...] | None = None
    explain: bool = False


def checked_query(
    *,
    parent: str,
    text: str,
    mode: SearchMode,
    top_k: int,
    documents: Iterable[str],
    explain: bool,
    max_characters: int,
) -> SearchQuery:
    """Returns the question; raises InvalidArgumentError that names the first wrong field."""
    matched = _PARENT.fullmatch(parent)
    if matched is None or matched["collection"] == ANY_COLLECTION:
        raise _invalid("parent", "NOT_A_COLLECTION")
    if not text.strip():
        raise _invalid("query", "EMPTY")
    if len(text) > max_characters:
        raise _invalid("query", "TOO_MANY_CHARACTERS", actual=len(text), limit=max_characters)
    if "\0" in text:
        raise _invalid("query", "NUL_CHARACTER")
    if not 0 <= top_k <= MAX_TOP_K:
        raise _invalid("top_k", "OUT_OF_RANGE", range=f"0-{MAX_TOP_K}")
    collection = matched["collection"]
    return SearchQuery(
        collection=collection,
        text=text,
        mode=mode,
        top_k=top_k or DEFAULT_TOP_K,
        document_ids=_document_ids(list(documents), collection),
        explain=explain,
    )


def _document_ids(names: list[str], collection: str) -> tuple[uuid.UUID, ...] | None:
    if not names:
        return None
    if len(names) > MAX_DOCUMENTS:
        raise _invalid("documents", "TOO_MANY_ENTRIES", actual=len(names), limit=MAX_DOCUMENTS)
    found: dict[uuid.UUID, None] = {}
    for index, name in enumerate(names):
        matched = _DOCUMENT.fullmatch(name)
        if matched is None:
            raise _invalid(f"documents[{index}]", "NOT_A_DOCUMENT")
        if matched["collection"] not in (collection, ANY_COLLECTION):
            raise _invalid(f"documents[{index}]", "OTHER_COLLECTION", collection=collection)
        try:
            found[uuid.UUID(matched["document"])] = None
        except ValueError:
            raise _invalid(f"documents[{index}]", "NOT_A_DOCUMENT") from None
    return tuple(found)


def _invalid(field: str, problem: str, **facts: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        "FIELD_INVALID", retry_after_seconds=None, field=field, problem=problem, **facts
    )
