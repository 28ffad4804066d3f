"""Bytes to text, or a clear refusal. Owns which encodings are read.

The whole file is decoded strictly: no byte is ever replaced, so no U+FFFD appears that
the sender did not write. Another encoding joins as one more function in `_DECODERS`.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable

from services.ingest.parsing import cleaning
from services.ingest.parsing.accepted import ACCEPTED
from shared.errors import InvalidDocumentError

# UTF-32 first: its little-endian mark begins with the one of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# A text may hold a stray NUL or two; a file with more than this is no text.
_STRAY_CONTROLS = 8
_MAX_CONTROL_SHARE = 0.01


@dataclasses.dataclass(frozen=True, slots=True)
class Decoded:
    text: str
    encoding: str


def decode(data: bytes) -> Decoded:
    """Returns the text of `data`.

    Raises InvalidDocumentError: UNKNOWN_ENCODING for text in another encoding,
    BINARY_OR_UNKNOWN for bytes that are no text at all.
    """
    for decoder in _DECODERS:
        decoded = decoder(data)
        if decoded is not None:
            count, share = cleaning.control_share(decoded.text)
            if count > _STRAY_CONTROLS and share > _MAX_CONTROL_SHARE:
                break
            return decoded
    raise _refusal(data)


def _by_mark(data: bytes) -> Decoded | None:
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            try:
                return Decoded(data[len(mark) :].decode(encoding), encoding)
            except UnicodeDecodeError:
                return None
    return None


def _by_utf8(data: bytes) -> Decoded | None:
    try:
        return Decoded(data.decode("utf-8"), "utf-8")
    except UnicodeDecodeError:
        return None


_DECODERS: tuple[Callable[[bytes], Decoded | None], ...] = (_by_mark, _by_utf8)


def _refusal(data: bytes) -> InvalidDocumentError:
    """Text in GBK, Big5 or Latin-1 has no control bytes; UTF-16 without a mark has NULs on one side only."""
    controls = sum(data.count(byte) for byte in (*range(0x09), *range(0x0E, 0x1B), *range(0x1C, 0x20), 0x7F))
    even, odd = data[0::2].count(0), data[1::2].count(0)
    looks_like_utf16 = max(even, odd) > 0.2 * len(data) and min(even, odd) < 0.02 * len(data)
    if controls <= _MAX_CONTROL_SHARE * len(data) or looks_like_utf16:
        return InvalidDocumentError("UNKNOWN_ENCODING")
    return InvalidDocumentError("BINARY_OR_UNKNOWN", accepted=ACCEPTED)
