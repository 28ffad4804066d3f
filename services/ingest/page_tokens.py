"""Opaque page tokens: where a list goes on, and which list it was.

Not secret and not trusted: a token only ever holds keys of a row, and every list is read
with the caller's own filter.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from typing import Any

from shared.errors import InvalidArgumentError

MAX_PAGE_SIZE = 1000


def checked_page_size(page_size: int, default: int) -> int:
    """Returns a size from 1 to 1000; 0 means `default`; raises InvalidArgumentError below."""
    if page_size < 0:
        raise InvalidArgumentError("FIELD_INVALID", field="page_size", problem="NEGATIVE")
    return min(page_size or default, MAX_PAGE_SIZE)


def encode(list_name: str, *key: str | int) -> str:
    """Returns a token for the rows after `key`; `list_name` tells list and filter."""
    text = json.dumps([_digest(list_name), *key], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode(token: str, list_name: str, *kinds: type) -> list[Any] | None:
    """Returns the key as values of `kinds`, None for an empty token; raises for a token of another list."""
    if not token:
        return None
    key: list[Any]
    try:
        digest, *key = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        if digest != _digest(list_name) or [type(value) for value in key] != list(kinds):
            raise ValueError(token)
        if any(isinstance(value, int) and not 0 <= value < 1 << 63 for value in key):
            raise ValueError(token)
    except (ValueError, TypeError, RecursionError, binascii.Error):
        raise InvalidArgumentError("PAGE_TOKEN_INVALID", field="page_token") from None
    return key


def _digest(list_name: str) -> str:
    return hashlib.sha256(list_name.encode()).hexdigest()[:12]
