"""Builds documents, splits them and checks what holds for all chunks of all documents."""

from __future__ import annotations

import functools

import tokenizers

from services.ingest.chunking import Chunker
from services.ingest.model import BlockKind, Chunk, ParsedDocument
from services.ingest.parsing.accepted import MediaType
from services.ingest.parsing.builder import DocumentBuilder
from services.ingest.parsing.limits import ParseLimits
from services.ingest.parsing.markdown import parse_markdown
from tests.support.tokenizer_files import E5_UNKNOWN_TOKEN_ID, MINILM_UNKNOWN_TOKEN_ID, tokenizer_json

DOCUMENT_ID = "6f1c0a52-9a0e-4c1e-8f0c-2f8f6f0d6c11"
OVERHEAD = 5
FAMILY = "👨\u200d👩\u200d👧\u200d👦"


@functools.cache
def chunker(max_tokens: int = 128, overlap_tokens: int = 16, model: str = "multilingual-e5-small") -> Chunker:
    unknown = E5_UNKNOWN_TOKEN_ID if model.startswith("multi") else MINILM_UNKNOWN_TOKEN_ID
    return Chunker(
        tokenizer_json(model),
        max_tokens=max_tokens,
        overlap_tokens=overlap_tokens,
        document_overhead_tokens=OVERHEAD,
        unknown_token_id=unknown,
        model_fingerprint="test",
    )


@functools.cache
def tokenizer(model: str = "multilingual-e5-small") -> tokenizers.Tokenizer:
    loaded = tokenizers.Tokenizer.from_buffer(tokenizer_json(model))
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def build(*blocks: tuple[BlockKind, str]) -> ParsedDocument:
    builder = DocumentBuilder(MediaType.MARKDOWN, ParseLimits())
    for kind, text in blocks:
        builder.add(kind, text, level=1 if kind is BlockKind.HEADING else None)
    return builder.build()


def markdown(text: str) -> ParsedDocument:
    builder = DocumentBuilder(MediaType.MARKDOWN, ParseLimits())
    parse_markdown(text, builder)
    return builder.build()


def check(document: ParsedDocument, chunks: list[Chunk], max_tokens: int, model: str) -> None:
    """What holds for all chunks of all documents."""
    covered = bytearray(len(document.text))
    for ordinal, chunk in enumerate(chunks):
        start, end = chunk.locator.start_char, chunk.locator.end_char
        assert chunk.ordinal == ordinal
        assert chunk.content == document.text[start:end] != ""
        assert len(chunk.content) <= 4000
        tokens = len(tokenizer(model).encode(chunk.embed_text, add_special_tokens=False))
        assert chunk.token_count == tokens + OVERHEAD <= max_tokens
        covered[start:end] = b"\1" * (end - start)
    missed = [
        document.text[index]
        for index, is_covered in enumerate(covered)
        if not is_covered and not document.text[index].isspace()
    ]
    assert missed == []
    assert len({chunk.chunk_id for chunk in chunks}) == len(chunks)
    starts = [chunk.locator.start_char for chunk in chunks]
    assert starts == sorted(starts)


def split(
    document: ParsedDocument,
    *,
    max_tokens: int = 128,
    overlap_tokens: int = 16,
    model: str = "multilingual-e5-small",
) -> list[Chunk]:
    chunks = chunker(max_tokens, overlap_tokens, model).split(document, DOCUMENT_ID)
    check(document, chunks, max_tokens, model)
    return chunks


def without_overlap(document: ParsedDocument, chunks: list[Chunk]) -> str:
    parts, position = [], 0
    for chunk in chunks:
        start = max(position, chunk.locator.start_char)
        parts.append(document.text[start : chunk.locator.end_char])
        position = max(position, chunk.locator.end_char)
    return "".join("".join(parts).split())
