"""A snapshot is read as it was written, or not at all."""

import dataclasses
import datetime
import json

import pytest
import zstandard

from services.ingest.model import Asset, BlockKind, Chunk, Locator, Warning
from services.ingest.snapshots import (
    Snapshot,
    SnapshotInvalidError,
    is_resumable,
    read_snapshot,
    write_snapshot,
)


def chunk(ordinal: int) -> Chunk:
    return Chunk(
        chunk_id=f"00000000-0000-0000-0000-{ordinal:012}",
        ordinal=ordinal,
        content=f"第{ordinal}块内容 😀 ",
        prefix="手册 > 安装\n\n" if ordinal else "",
        kind=BlockKind.TABLE,
        locator=Locator(ordinal, ordinal + 7, heading_path=("手册", "安装"), page=2, end_page=3),
        token_count=11,
        unknown_token_count=ordinal,
        asset_sha256s=("a" * 64,),
    )


SNAPSHOT = Snapshot(
    written_at=datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
    document_id="6f1c0a52-9a0e-4c1e-8f0c-2f8f6f0d6c11",
    version=2,
    source_sha256="b" * 64,
    media_type="application/pdf",
    title=None,
    parser_fingerprint="parser",
    chunker_fingerprint="chunker",
    page_count=3,
    warnings=(Warning("PAGE_WITHOUT_TEXT", {"page": "1"}, page=1),),
    assets=(Asset("a" * 64, "image/png", 12, page=2, width=64, height=32),),
    chunks=tuple(chunk(ordinal) for ordinal in range(3)),
)


def packed(envelope: object) -> bytes:
    return zstandard.compress(json.dumps(envelope, ensure_ascii=False).encode())


def unpacked(data: bytes) -> dict[str, dict[str, object]]:
    return dict(json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(data)))


def test_what_was_written_is_read() -> None:
    assert read_snapshot(write_snapshot(SNAPSHOT)) == SNAPSHOT


def test_the_same_snapshot_gives_the_same_bytes() -> None:
    assert write_snapshot(SNAPSHOT) == write_snapshot(dataclasses.replace(SNAPSHOT))


def test_the_file_says_what_it_is_in_readable_text() -> None:
    text = zstandard.ZstdDecompressor().decompressobj().decompress(write_snapshot(SNAPSHOT)).decode()
    body = json.loads(text)["snapshot"]
    assert "第1块内容" in text
    assert (body["schema_version"], body["stage"]) == (1, "post_chunk_pre_embedding")
    assert (body["chunk_count"], body["token_count"]) == (3, 33)
    assert "vector" not in text and 'embedding":' not in text


def test_every_single_damaged_byte_is_noticed() -> None:
    data = write_snapshot(SNAPSHOT)
    for position in range(len(data)):
        damaged = data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :]
        try:
            assert read_snapshot(damaged) == SNAPSHOT  # A bit without a meaning may flip.
        except SnapshotInvalidError:
            continue


@pytest.mark.parametrize("length", [0, 1, 50, -1])
def test_a_torn_file_is_not_read_in_part(length: int) -> None:
    with pytest.raises(SnapshotInvalidError):
        read_snapshot(write_snapshot(SNAPSHOT)[:length])


def test_a_changed_chunk_is_noticed_though_the_file_is_sound() -> None:
    envelope = unpacked(write_snapshot(SNAPSHOT))
    envelope["snapshot"]["chunks"][1]["content"] = "forged"  # type: ignore[index]
    with pytest.raises(SnapshotInvalidError, match="hash"):
        read_snapshot(packed(envelope))


@pytest.mark.parametrize("field", ["schema_version", "stage"])
def test_another_schema_or_stage_is_not_read(field: str) -> None:
    envelope = unpacked(write_snapshot(SNAPSHOT))
    envelope["snapshot"][field] = 999
    with pytest.raises(SnapshotInvalidError, match="schema or stage"):
        read_snapshot(packed(envelope))


@pytest.mark.parametrize("data", [b"not zstd", packed([]), packed({"snapshot": {}}), packed("text")])
def test_a_foreign_file_is_not_read(data: bytes) -> None:
    with pytest.raises(SnapshotInvalidError):
        read_snapshot(data)


def test_missing_chunks_are_noticed() -> None:
    with pytest.raises(SnapshotInvalidError, match="missing or out of order"):
        read_snapshot(write_snapshot(dataclasses.replace(SNAPSHOT, chunks=(chunk(0), chunk(2)))))


def test_j17_an_attempt_goes_on_only_with_the_same_bytes_and_rules() -> None:
    assert is_resumable(SNAPSHOT, "b" * 64, "parser", "chunker")
    assert not is_resumable(SNAPSHOT, "c" * 64, "parser", "chunker")
    assert not is_resumable(SNAPSHOT, "b" * 64, "newer", "chunker")
    assert not is_resumable(SNAPSHOT, "b" * 64, "parser", "newer")
    assert not is_resumable(dataclasses.replace(SNAPSHOT, chunks=()), "b" * 64, "parser", "chunker")
