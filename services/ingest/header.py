"""The header of a submission: what may be in it, and what is refused before the first byte is stored.

Knows no database and no bytes. Whether the content fits is for submission.py and parsing to say.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import unicodedata
import uuid
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from services.ingest.names import parse_collection
from services.ingest.parsing.accepted import ACCEPTED
from shared.errors import InvalidArgumentError, InvalidDocumentError

MAX_METADATA_BYTES = 64 << 10
# An entry of an index has a limit in bytes, and a character may take four.
MAX_FIELD_BYTES = 2048
MAX_SOURCE_KEY_CHARACTERS = 1024
MAX_DISPLAY_NAME_CHARACTERS = 255
MAX_MEDIA_TYPE_CHARACTERS = 255

# Known not to be read; anything else is decided by its content.
_UNREADABLE_MEDIA = ("video/", "audio/", "image/", "font/", "model/")
_UNREADABLE_SUFFIXES = frozenset(
    f".{suffix}"
    for group in (
        ("7z", "bz2", "dmg", "gz", "iso", "jar", "rar", "tar", "tgz", "xz", "zip", "zst"),
        ("avi", "flac", "mkv", "mov", "mp3", "mp4", "ogg", "wav", "webm"),
        ("avif", "bmp", "gif", "heic", "jpeg", "jpg", "png", "tif", "tiff", "webp"),
        ("doc", "docx", "epub", "eml", "msg", "odp", "ods", "odt", "ppt", "pptx", "rtf", "xls", "xlsx"),
        ("class", "dll", "exe", "otf", "parquet", "pyc", "so", "sqlite", "ttf", "woff"),
    )
    for suffix in group
)


class DuplicatePolicy(enum.StrEnum):
    """What to do when the same source key, or without one the same bytes, already exist."""

    UNSPECIFIED = "UNSPECIFIED"
    REJECT = "REJECT"
    RETURN_EXISTING = "RETURN_EXISTING"
    REPLACE = "REPLACE"
    KEEP_BOTH = "KEEP_BOTH"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DocumentHeader:
    """As it was sent. Empty text and 0 mean: not given."""

    parent: str
    source_key: str = ""
    display_name: str = ""
    media_type: str = ""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    duplicate_policy: DuplicatePolicy = DuplicatePolicy.UNSPECIFIED
    request_id: str = ""
    size_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckedHeader:
    """Good to go."""

    collection: str
    source_key: str | None
    display_name: str
    media_type: str | None
    metadata: Mapping[str, Any]
    duplicate_policy: DuplicatePolicy
    request_id: uuid.UUID | None

    def digest(self, sha256: str) -> str:
        """Returns what has to be equal when one request id is used twice."""
        parts = [self.collection, self.source_key, self.display_name, self.media_type, self.duplicate_policy]
        text = json.dumps([*parts, dict(self.metadata), sha256], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()


def check_header(header: DocumentHeader, *, max_upload_bytes: int) -> CheckedHeader:
    """Returns the header cleaned; raises InvalidArgumentError or InvalidDocumentError."""
    collection = parse_collection(header.parent)
    checked = CheckedHeader(
        collection=collection,
        source_key=_plain_text("source_key", header.source_key, MAX_SOURCE_KEY_CHARACTERS) or None,
        display_name=clean_display_name(header.display_name),
        media_type=_plain_text("media_type", header.media_type, MAX_MEDIA_TYPE_CHARACTERS) or None,
        metadata=_checked_metadata(header.metadata),
        duplicate_policy=header.duplicate_policy,
        request_id=_checked_request_id(header.request_id),
    )
    check_size(header.size_bytes, max_upload_bytes)
    _refuse_unreadable(checked)
    return checked


def check_size(size_bytes: int | None, max_upload_bytes: int) -> None:
    """`None` is not known yet; it is looked at again as the bytes come."""
    if size_bytes is None:
        return
    if size_bytes < 0:
        raise InvalidArgumentError("FIELD_INVALID", field="size_bytes", problem="NEGATIVE")
    if size_bytes > max_upload_bytes:
        raise InvalidDocumentError("TOO_LARGE", actual=size_bytes, limit=max_upload_bytes)


def clean_display_name(name: str) -> str:
    """Returns a label: no folders, no control characters, not too long, never empty."""
    text = unicodedata.normalize("NFC", name).replace("\\", "/").rsplit("/", 1)[-1]
    text = "".join(
        letter for letter in text if unicodedata.category(letter) not in ("Cc", "Cs", "Cf")
    ).strip()
    if text in ("", ".", ".."):
        return "untitled"
    if len(text) > MAX_DISPLAY_NAME_CHARACTERS:
        # The ending says how to read the file, so it stays.
        suffix = PurePosixPath(text).suffix[:16]
        text = text[: MAX_DISPLAY_NAME_CHARACTERS - len(suffix)] + suffix
    return text


def is_text_type(header: CheckedHeader) -> bool:
    """True when name or type promise text."""
    suffix = PurePosixPath(header.display_name).suffix.lower()
    declared = (header.media_type or "").lower()
    return declared.startswith("text/") or suffix in {".txt", ".text", ".md", ".markdown", ".html", ".htm"}


def _refuse_unreadable(header: CheckedHeader) -> None:
    declared = (header.media_type or "").partition(";")[0].strip().lower()
    suffix = PurePosixPath(header.display_name).suffix.lower()
    if declared.startswith(_UNREADABLE_MEDIA):
        raise InvalidDocumentError("UNSUPPORTED_TYPE", detected=declared, accepted=ACCEPTED)
    if suffix in _UNREADABLE_SUFFIXES:
        raise InvalidDocumentError("UNSUPPORTED_TYPE", detected=suffix[1:].upper(), accepted=ACCEPTED)


def _plain_text(field: str, text: str, max_characters: int) -> str:
    if len(text) > max_characters:
        raise InvalidArgumentError(
            "FIELD_INVALID",
            field=field,
            problem="TOO_MANY_CHARACTERS",
            actual=len(text),
            limit=max_characters,
        )
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_FIELD_BYTES:
        raise InvalidArgumentError(
            "FIELD_INVALID", field=field, problem="TOO_MANY_BYTES", actual=size, limit=MAX_FIELD_BYTES
        )
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text):
        raise InvalidArgumentError("FIELD_INVALID", field=field, problem="CONTROL_CHARACTERS")
    return text


def _checked_metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        text = json.dumps(metadata, allow_nan=False, ensure_ascii=False)
        size = len(text.encode())
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError("FIELD_INVALID", field="metadata", problem="NOT_JSON") from error
    if size > MAX_METADATA_BYTES:
        raise InvalidArgumentError(
            "FIELD_INVALID", field="metadata", problem="TOO_MANY_BYTES", actual=size, limit=MAX_METADATA_BYTES
        )
    # PostgreSQL has no NUL in text; JSON writes it as an escape.
    if "\\u0000" in text.replace("\\\\", ""):
        raise InvalidArgumentError("FIELD_INVALID", field="metadata", problem="NUL_CHARACTER")
    return metadata


def _checked_request_id(request_id: str) -> uuid.UUID | None:
    if not request_id:
        return None
    try:
        return uuid.UUID(request_id)
    except ValueError:
        raise InvalidArgumentError("FIELD_INVALID", field="request_id", problem="NOT_A_UUID") from None
