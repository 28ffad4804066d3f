"""Text is decoded exactly or refused."""

import random

import pytest

from services.ingest.parsing.decoding import decode
from shared.errors import InvalidDocumentError


def reason_of(data: bytes) -> str:
    with pytest.raises(InvalidDocumentError) as caught:
        decode(data)
    return caught.value.reason


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unicode_with_and_without_a_mark_is_read(encoding: str) -> None:
    text = "数据备份 and restore 😀"
    assert decode(text.encode(encoding)).text == text


def test_big_endian_text_is_read_by_its_mark() -> None:
    decoded = decode(b"\xfe\xff" + "恢复".encode("utf-16-be"))
    assert (decoded.text, decoded.encoding) == ("恢复", "utf-16-be")


@pytest.mark.parametrize("encoding", ["gb18030", "big5", "cp1252"])
def test_text_in_another_encoding_is_refused_with_the_cure(encoding: str) -> None:
    text = "Café – naïve façade " if encoding == "cp1252" else "系統備份文件"
    assert reason_of((text * 20).encode(encoding)) == "UNKNOWN_ENCODING"


def test_utf16_without_a_mark_is_refused_as_text() -> None:
    assert reason_of(("plain words and more " * 20).encode("utf-16-le")) == "UNKNOWN_ENCODING"


def test_random_bytes_are_no_text() -> None:
    assert reason_of(random.Random(1).randbytes(100_000)) == "BINARY_OR_UNKNOWN"


def test_bytes_that_happen_to_be_valid_utf8_are_no_text_either() -> None:
    assert reason_of(bytes(range(32)) * 100) == "BINARY_OR_UNKNOWN"


def test_no_replacement_character_appears_that_nobody_wrote() -> None:
    assert reason_of("正常文字".encode() * 20 + b"\xff\xfe\x80") == "UNKNOWN_ENCODING"
    assert decode("a\ufffdb".encode()).text == "a\ufffdb"
