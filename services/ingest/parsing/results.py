"""The files in which a parser process leaves its result. Owns their form and their checks.

The reader trusts nothing: the process that wrote them has read a hostile document. Sizes
are checked before a byte is read, hashes before an asset is accepted, and the form is
JSON, which can run nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from services.ingest import model
from services.ingest.parsing.limits import ParseLimits

_RESULT = "result.json"
_ASSETS = "assets"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOCK_SIZE = 1 << 20


class ResultInvalidError(Exception):
    """The files are not what a sound parser process writes."""


def asset_path(output_dir: Path, sha256: str) -> Path:
    """Returns where the bytes of an asset lie; `sha256` must be one."""
    if not _SHA256.fullmatch(sha256):
        raise ResultInvalidError("an asset has no hash for a name")
    return output_dir / _ASSETS / sha256


def save_asset(output_dir: Path, sha256: str, data: bytes) -> None:
    path = asset_path(output_dir, sha256)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(data)


def write_result(output_dir: Path, document: model.ParsedDocument) -> None:
    text = json.dumps(model.to_json(document), ensure_ascii=False, separators=(",", ":"))
    (output_dir / _RESULT).write_text(text, encoding="utf-8")


def read_result(output_dir: Path, limits: ParseLimits) -> model.ParsedDocument:
    """Returns the document that a parser process left; raises ResultInvalidError."""
    path = output_dir / _RESULT
    try:
        if path.is_symlink() or path.stat().st_size > limits.max_result_bytes:
            raise ResultInvalidError("the result is too large or no plain file")
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        document = model.parsed_document_from_json(data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ResultInvalidError(f"the result cannot be read: {type(error).__name__}") from error
    _check_blocks(document, limits)
    _check_assets(document, output_dir, limits)
    return document


def _check_blocks(document: model.ParsedDocument, limits: ParseLimits) -> None:
    length = len(document.text)
    if length > limits.max_characters or len(document.blocks) > limits.max_blocks:
        raise ResultInvalidError("the result has more text than the limit")
    # A lone surrogate or a NUL would fail much later, in the database.
    if "\0" in document.text or not _is_encodable(document.text):
        raise ResultInvalidError("the text holds characters that no clean text has")
    position = 0
    for block in document.blocks:
        start, end = block.locator.start_char, block.locator.end_char
        if not position <= start <= end <= length:
            raise ResultInvalidError("blocks are not slices of the text in order")
        position = end
        numbers = (block.locator.page, block.locator.start_line, block.locator.end_line, block.level)
        if any(number is not None and (type(number) is not int or number < 1) for number in numbers):
            raise ResultInvalidError("a place is not a number")
        if not all(isinstance(title, str) for title in block.locator.heading_path):
            raise ResultInvalidError("a heading path is not text")


def _check_assets(document: model.ParsedDocument, output_dir: Path, limits: ParseLimits) -> None:
    if len(document.assets) > limits.max_assets:
        raise ResultInvalidError("the result has more assets than the limit")
    known = {asset.sha256 for asset in document.assets}
    if any(block.asset_sha256 not in known for block in document.blocks if block.asset_sha256):
        raise ResultInvalidError("a block shows an asset that is not there")
    total = 0
    for asset in document.assets:
        path = asset_path(output_dir, asset.sha256)
        try:
            size = path.lstat().st_size
            total += size
            if path.is_symlink() or size != asset.size_bytes or size > limits.max_asset_bytes:
                raise ResultInvalidError("an asset has another size than its result says")
            if total > limits.max_assets_bytes:
                raise ResultInvalidError("the assets are larger than the limit")
            if _hash(path) != asset.sha256:
                raise ResultInvalidError("an asset is not what its hash says")
        except OSError as error:
            raise ResultInvalidError("an asset cannot be read") from error


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_SIZE):
            digest.update(block)
    return digest.hexdigest()


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
