"""Chunks: never too long, never cut wrong, nothing lost, always the same."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from services.ingest.chunking import Chunker, chunk_warnings
from services.ingest.model import Asset, BlockKind
from services.ingest.parsing.accepted import MediaType
from services.ingest.parsing.builder import DocumentBuilder
from services.ingest.parsing.limits import ParseLimits
from tests.support.chunking import (
    DOCUMENT_ID,
    FAMILY,
    OVERHEAD,
    build,
    chunker,
    markdown,
    split,
    tokenizer,
    without_overlap,
)
from tests.support.tokenizer_files import E5_UNKNOWN_TOKEN_ID, tokenizer_json

PIECES = st.one_of(
    st.text(max_size=60),
    st.sampled_from(
        [
            "数据备份与恢复。",
            "请注意：不可恢复！",
            "A sentence. ",
            "e.g. this one; ",
            FAMILY,
            "🇨🇳",
            "a\u0301",
            "｜",
            "word" * 40,
            "没有标点" * 40,
            "\n",
            "| x | y |\n",
        ]
    ),
)
BLOCKS = st.lists(
    st.tuples(st.sampled_from(list(BlockKind)), st.lists(PIECES, max_size=12).map("".join)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(BLOCKS, st.sampled_from([(32, 0), (64, 12), (200, 60)]))
def test_any_document_is_covered_by_exact_slices_within_the_budget(
    blocks: list[tuple[BlockKind, str]], policy: tuple[int, int]
) -> None:
    builder = DocumentBuilder(MediaType.MARKDOWN, ParseLimits())
    for index, (kind, text) in enumerate(blocks):
        level = index % 3 + 1 if kind is BlockKind.HEADING else None
        builder.add(kind, text, level=level, header_rows=2 * (index % 2) if kind is BlockKind.TABLE else 0)
    if builder.has_text:
        split(builder.build(), max_tokens=policy[0], overlap_tokens=policy[1])


@pytest.mark.parametrize("model", ["multilingual-e5-small", "all-MiniLM-L6-v2"])
def test_three_thousand_han_without_punctuation_stay_within_the_window(model: str) -> None:
    document = build((BlockKind.PARAGRAPH, "这是一段没有任何标点的文字" * 250))
    chunks = split(document, max_tokens=512, model=model)
    assert len(chunks) > 2


def test_characters_are_never_cut_and_joined_chunks_give_the_source() -> None:
    england = "🏴\U000e0067\U000e0062\U000e007f"
    body = "备份数据恢复系统" * 1250 + (FAMILY + england + "e\u0301" + "☎\ufe0f") * 300
    document = build((BlockKind.PARAGRAPH, body))
    chunks = split(document)
    assert without_overlap(document, chunks) == document.text
    borders = {match.start() for match in regex.finditer(r"\X", document.text)}
    for chunk in chunks:
        assert chunk.locator.start_char in borders
        assert "\ufffd" not in chunk.content


def test_a_blob_that_is_one_token_to_the_model_is_cut_by_characters() -> None:
    document = build((BlockKind.PARAGRAPH, "QUJD" * 12_500))
    chunks = split(document, max_tokens=256, model="all-MiniLM-L6-v2")
    assert max(len(chunk.content) for chunk in chunks) <= 4000


def test_one_character_of_a_thousand_accents_still_fits() -> None:
    split(build((BlockKind.PARAGRAPH, "a" + "\u0315\u0316" * 500)), max_tokens=32)


def test_pages_of_a_chunk_are_all_named() -> None:
    builder = DocumentBuilder(MediaType.PDF, ParseLimits())
    for page in (3, 4):
        builder.add(BlockKind.PARAGRAPH, f"Text of page {page}.", page=page)
    (chunk,) = split(builder.build())
    assert (chunk.locator.page, chunk.locator.end_page) == (3, 4)


def test_a_picture_belongs_to_the_chunk_at_its_place() -> None:
    builder = DocumentBuilder(MediaType.PDF, ParseLimits())
    sha256 = "a" * 64
    builder.add_asset(Asset(sha256, "image/png", 1))
    builder.add(BlockKind.HEADING, "One", level=1)
    builder.add(BlockKind.PARAGRAPH, "First.")
    builder.add(BlockKind.IMAGE, "", asset_sha256=sha256)
    builder.add(BlockKind.HEADING, "Two", level=1)
    builder.add(BlockKind.PARAGRAPH, "Second.")
    assert [chunk.asset_sha256s for chunk in split(builder.build())] == [(sha256,), ()]


def test_ids_are_stable_and_apart_for_equal_texts() -> None:
    document = markdown("# A\n\nsame.\n\n# A\n\nsame.")
    first, again = split(document), split(document)
    assert first == again
    assert first[0].embed_text == first[1].embed_text
    assert first[0].chunk_id != first[1].chunk_id
    assert uuid.UUID(first[0].chunk_id).version == 5
    other = chunker().split(document, "00000000-0000-0000-0000-000000000001")
    assert not {c.chunk_id for c in first} & {c.chunk_id for c in other}


def test_two_processes_with_other_hash_seeds_give_the_same_chunks() -> None:
    code = """
from tests.support import chunking as t
table = "| a | b |\\n|---|---|\\n" + "| 1 | 2 |\\n" * 60
chunks = t.split(t.markdown("# A\\n\\n" + "备份完成。Now rest. " * 60 + "\\n\\n" + table))
print(t.chunker().fingerprint, *(f"{c.chunk_id}:{c.locator}:{c.token_count}" for c in chunks))
"""
    outputs = []
    for seed in ("1", "4711"):
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        outputs.append(run.stdout)
    assert len(outputs[0].split()) > 5
    assert outputs[0] == outputs[1]


def test_the_fingerprint_changes_with_what_changes_chunks_and_with_nothing_else() -> None:
    prints = {chunker().fingerprint, chunker(64).fingerprint, chunker(128, 0).fingerprint}
    prints.add(chunker(128, 16, "all-MiniLM-L6-v2").fingerprint)
    assert len(prints) == 4
    other_model = Chunker(
        tokenizer_json(),
        max_tokens=128,
        overlap_tokens=16,
        document_overhead_tokens=OVERHEAD,
        unknown_token_id=E5_UNKNOWN_TOKEN_ID,
        model_fingerprint="another model with the same tokenizer",
    )
    assert other_model.fingerprint == chunker().fingerprint


def test_a_model_that_does_not_know_the_language_is_named() -> None:
    document = build((BlockKind.PARAGRAPH, "本指南说明如何备份生产数据库。" * 20))
    (warning,) = chunk_warnings(split(document, model="all-MiniLM-L6-v2"))
    assert warning.reason == "MODEL_LACKS_LANGUAGE"
    assert int(warning.parameters["percent"]) > 20
    assert chunk_warnings(split(document)) == ()
    assert chunk_warnings([]) == ()


def test_progress_never_goes_back_and_ends_at_its_total() -> None:
    seen: list[tuple[int, int]] = []
    document = build((BlockKind.PARAGRAPH, "一句话。" * 5_000))
    chunker().split(document, DOCUMENT_ID, lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (2 * len(document.text), 2 * len(document.text))


def test_a_limit_without_room_for_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no room"):
        chunker(20)


def byte_level_tokenizer() -> bytes:
    """Returns a tokenizer that cuts rare characters into bytes and counts line ends, as many models' do."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator(["the backup of the database is done. "], trainer)
    return model.to_str().encode()


def test_a_tokenizer_of_bytes_cuts_no_character_and_counts_line_ends() -> None:
    splitter = Chunker(
        byte_level_tokenizer(),
        max_tokens=64,
        overlap_tokens=8,
        document_overhead_tokens=2,
        unknown_token_id=None,
        model_fingerprint="bytes",
    )
    document = markdown("猫😀" * 1000 + "\n\n" + "\n\n".join("the backup" for _ in range(60)))
    chunks = splitter.split(document, DOCUMENT_ID)
    assert without_overlap(document, chunks) == "".join(document.text.split())
    counter = tokenizers.Tokenizer.from_str(byte_level_tokenizer().decode())
    for chunk in chunks:
        assert "\ufffd" not in chunk.content
        assert chunk.token_count == len(counter.encode(chunk.embed_text)) + 2 <= 64
        assert chunk.unknown_token_count == 0


def test_a_chunk_fits_the_model_with_its_prefix_and_special_tokens() -> None:
    overhead = len(tokenizer().encode("passage: "))
    splitter = Chunker(
        tokenizer_json(),
        max_tokens=64,
        overlap_tokens=8,
        document_overhead_tokens=overhead,
        unknown_token_id=E5_UNKNOWN_TOKEN_ID,
        model_fingerprint="e5",
    )
    body = "数据备份完成后请检查日志。The restore took 3.5 hours on node-7; see log. 😀" * 100
    for chunk in splitter.split(markdown(f"# 手册\n\n{body}"), DOCUMENT_ID):
        assert len(tokenizer().encode("passage: " + chunk.embed_text)) <= chunk.token_count <= 64
