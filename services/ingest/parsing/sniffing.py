"""What a file is. Content decides; name and declared type only break ties between text formats.

Owns the recognition of formats and the refusal of those that are not read. Parses nothing.
"""

from __future__ import annotations

import codecs
import dataclasses
import io
import re
import zipfile
from pathlib import PurePath

from services.ingest.model import Warning
from services.ingest.parsing.accepted import ACCEPTED, NAMES, MediaType
from shared.errors import InvalidDocumentError

# The standard allows junk in front of the PDF header, within the first 1024 bytes.
_PDF_HEADER_WINDOW = 1024
_MAGIC = (
    (b"{\\rtf", "RTF"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"\x1f\x8b", "gzip"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"Rar!\x1a\x07", "RAR"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x7fELF", "ELF"),
    (b"OggS", "Ogg"),
    (b"ID3", "MP3"),
    (b"SQLite format 3\x00", "SQLite"),
)
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_ZIP_FAMILY = (
    ("word/", "DOCX"),
    ("ppt/", "PPTX"),
    ("xl/", "XLSX"),
    ("META-INF/container.xml", "EPUB"),
)
_OLE_FAMILY = (("WordDocument", "DOC"), ("PowerPoint Document", "PPT"), ("Workbook", "XLS"), ("Book", "XLS"))
_HTML_START = re.compile(
    rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)[\s>]", re.I | re.S
)
_MAIL_HEADER = re.compile(rb"(?:[!-9;-~]+:[^\r\n]*\r?\n(?:[ \t][^\r\n]*\r?\n)*){3,}\r?\n")
_MAIL_FIELDS = re.compile(rb"^(?:from|subject|received):", re.I | re.M)
_BY_EXTENSION = {
    ".pdf": MediaType.PDF,
    ".html": MediaType.HTML,
    ".htm": MediaType.HTML,
    ".xhtml": MediaType.HTML,
    ".md": MediaType.MARKDOWN,
    ".markdown": MediaType.MARKDOWN,
    ".txt": MediaType.TEXT,
    ".text": MediaType.TEXT,
}
_BY_DECLARED = {
    "application/pdf": MediaType.PDF,
    "application/x-pdf": MediaType.PDF,
    "text/html": MediaType.HTML,
    "application/xhtml+xml": MediaType.HTML,
    "text/markdown": MediaType.MARKDOWN,
    "text/x-markdown": MediaType.MARKDOWN,
    "text/plain": MediaType.TEXT,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Sniffed:
    media_type: MediaType
    warnings: tuple[Warning, ...] = ()


def sniff(data: bytes, *, display_name: str, declared_media_type: str | None) -> Sniffed:
    """Returns the type by which `data` is to be parsed, with a warning if another one was claimed.

    Raises InvalidDocumentError: EMPTY_DOCUMENT, UNSUPPORTED_TYPE, PASSWORD_PROTECTED. Whether
    text can be decoded is for decoding.py to say.
    """
    if _is_blank(data):
        raise InvalidDocumentError("EMPTY_DOCUMENT")
    claimed = claimed_type(display_name, declared_media_type)
    if b"%PDF-" in data[:_PDF_HEADER_WINDOW]:
        detected = MediaType.PDF
    else:
        _refuse_unsupported(data)
        detected = _text_type(data, claimed)
    return Sniffed(detected, _mismatch(detected, claimed))


def claimed_type(display_name: str, declared_media_type: str | None) -> MediaType | None:
    """Returns what the sender says the file is; the declared type goes before the name."""
    declared = (declared_media_type or "").partition(";")[0].strip().lower()
    return _BY_DECLARED.get(declared) or _BY_EXTENSION.get(PurePath(display_name).suffix.lower())


def _refuse_unsupported(data: bytes) -> None:
    name: str | None = None
    if data.startswith(_ZIP):
        name = _zip_name(data)
    elif data.startswith(_OLE):
        name = _ole_name(data)
    elif data[:4] == b"RIFF" and data[8:12] in (b"WEBP", b"WAVE", b"AVI "):
        name = data[8:12].decode("ascii").strip()
    elif data[4:8] == b"ftyp":
        name = "MP4"
    elif data.startswith(b"BM") and data[6:10] == b"\0\0\0\0":
        name = "BMP"
    elif (header := _MAIL_HEADER.match(data[:65536])) and _MAIL_FIELDS.search(header.group()):
        name = "EML"
    else:
        name = next((label for magic, label in _MAGIC if data.startswith(magic)), None)
    if name is not None:
        raise InvalidDocumentError("UNSUPPORTED_TYPE", detected=name, accepted=ACCEPTED)


def _zip_name(data: bytes) -> str:
    """Reads the directory only; nothing is unpacked."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError):
        return "ZIP"
    for prefix, label in _ZIP_FAMILY:
        if any(name.startswith(prefix) for name in names):
            return label
    return "OpenDocument" if "mimetype" in names and "content.xml" in names else "ZIP"


def _ole_name(data: bytes) -> str:
    """Names of streams stand in the file as UTF-16; an encrypted office file has a stream of its own."""
    if "EncryptedPackage".encode("utf-16-le") in data:
        raise InvalidDocumentError("PASSWORD_PROTECTED", file_type="Office")
    for stream, label in _OLE_FAMILY:
        if stream.encode("utf-16-le") in data:
            return label
    return "OLE"


def _text_type(data: bytes, claimed: MediaType | None) -> MediaType:
    # In UTF-16 every second byte is NUL; without them the tags read as ASCII.
    head = data[:4096]
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        head = head[2:].replace(b"\0", b"")
    if _HTML_START.match(head.removeprefix(b"\xef\xbb\xbf")):
        return MediaType.HTML
    if claimed in (MediaType.HTML, MediaType.MARKDOWN):
        return claimed
    return MediaType.TEXT


def _mismatch(detected: MediaType, claimed: MediaType | None) -> tuple[Warning, ...]:
    if claimed is None or claimed is detected:
        return ()
    return (Warning("TYPE_MISMATCH", {"declared": NAMES[claimed], "detected": NAMES[detected]}),)


def _is_blank(data: bytes) -> bool:
    """True for nothing but white space, behind a byte order mark or not."""
    blanks = b" \t\r\n\v\f"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        data, blanks = data[2:], blanks + b"\0"
    elif data.startswith(codecs.BOM_UTF8):
        data = data[3:]
    return not data[:4096].strip(blanks) and not data.strip(blanks)
