"""What a file is, whatever its name says."""

import io
import zipfile

import pytest

from services.ingest.parsing.sniffing import sniff
from shared.errors import InvalidDocumentError


def type_of(data: bytes, name: str = "file", declared: str | None = None) -> str:
    return str(sniff(data, display_name=name, declared_media_type=declared).media_type)


def refusal_of(data: bytes, name: str = "file") -> InvalidDocumentError:
    with pytest.raises(InvalidDocumentError) as caught:
        sniff(data, display_name=name, declared_media_type=None)
    return caught.value


def zip_with(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("[Content_Types].xml", "")
        archive.writestr(name, "x")
    return buffer.getvalue()


def test_a_pdf_is_a_pdf_behind_junk_and_under_another_name() -> None:
    sniffed = sniff(b"junk\n" * 50 + b"%PDF-1.7\n", display_name="a.txt", declared_media_type=None)
    assert sniffed.media_type == "application/pdf"
    assert [(w.reason, w.parameters) for w in sniffed.warnings] == [
        ("TYPE_MISMATCH", {"declared": "TXT", "detected": "PDF"})
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"<!DOCTYPE html><p>x",
        b"\xef\xbb\xbf  <HTML lang='zh'>",
        b"<?xml version='1.0'?><!-- c --><html>",
        "<html><body>".encode("utf-16"),
    ],
)
def test_a_page_is_html_without_a_name(data: bytes) -> None:
    assert type_of(data) == "text/html"


def test_markdown_that_talks_about_html_stays_markdown() -> None:
    assert type_of(b"# How to\n\nWrite `<html>` first.\n\n<html>", "a.md") == "text/markdown"


def test_the_declared_type_breaks_the_tie_between_text_formats() -> None:
    assert type_of(b"# a", "notes", "text/markdown; charset=utf-8") == "text/markdown"
    assert type_of(b"# a", "notes.md") == "text/markdown"
    assert type_of(b"# a", "notes") == "text/plain"


@pytest.mark.parametrize("data", [b"", b" \n\t\r\n"])
def test_a_file_without_content_is_empty(data: bytes) -> None:
    assert refusal_of(data).reason == "EMPTY_DOCUMENT"


@pytest.mark.parametrize(
    ("data", "detected"),
    [
        (zip_with("word/document.xml"), "DOCX"),
        (zip_with("xl/workbook.xml"), "XLSX"),
        (zip_with("ppt/presentation.xml"), "PPTX"),
        (zip_with("hello.txt"), "ZIP"),
        (b"PK\x03\x04 torn off", "ZIP"),
        (b"\x89PNG\r\n\x1a\n....", "PNG"),
        (b"\xff\xd8\xff\xe0", "JPEG"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "WEBP"),
        (b"{\\rtf1 x}", "RTF"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + "WordDocument".encode("utf-16-le"), "DOC"),
        (b"From: a@b\r\nTo: c@d\r\nSubject: x\r\n\r\nbody", "EML"),
    ],
)
def test_what_is_not_read_is_refused_by_name(data: bytes, detected: str) -> None:
    error = refusal_of(data, "report.pdf")
    assert error.reason == "UNSUPPORTED_TYPE"
    assert error.parameters["detected"] == detected
    assert "PDF" in error.parameters["accepted"]


def test_an_encrypted_office_file_is_named_as_such() -> None:
    data = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 512 + "EncryptedPackage".encode("utf-16-le")
    assert refusal_of(data, "x.docx").reason == "PASSWORD_PROTECTED"
