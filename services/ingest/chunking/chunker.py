"""A parsed document to chunks that the embedding model reads whole.

Owns verification, ids and places of chunks; units.py cuts, packing.py packs. Same
document and settings, same chunks, on any machine and in any process.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import re
import uuid
from collections.abc import Callable, Sequence

from services.ingest.chunking.packing import Draft, Packer
from services.ingest.chunking.tokens import TokenCounter
from services.ingest.chunking.units import Unit, halve, make_units
from services.ingest.model import Block, BlockKind, Chunk, Locator, ParsedDocument, Warning

# Counted up with every change of what comes out; old snapshots are rebuilt then.
_NEWLINE = re.compile("\n")
CHUNKER_VERSION = 1
# The model's own prefix may merge with the first token otherwise than counted apart.
_MARGIN_TOKENS = 1
_MIN_ROOM_TOKENS = 16
_UNKNOWN_SHARE = 0.2
_VERIFY_BATCH = 512

Progress = Callable[[int, int], None]


@dataclasses.dataclass(slots=True)
class _Verified:
    """A draft that fits: its trimmed span, what is embedded, and its tokens without the overhead."""

    draft: Draft
    start: int
    end: int
    text: str
    tokens: int
    unknown: int


class Chunker:
    """Splits documents for one model and one policy. Thread-safe; `split` holds the CPU."""

    def __init__(
        self,
        tokenizer_json: bytes,
        *,
        max_tokens: int,
        overlap_tokens: int,
        document_overhead_tokens: int,
        unknown_token_id: int | None,
        model_fingerprint: str,
    ) -> None:
        """`document_overhead_tokens`: what the model adds to each text, special tokens and prefix."""
        self._room = max_tokens - document_overhead_tokens - _MARGIN_TOKENS
        if self._room < _MIN_ROOM_TOKENS:
            raise ValueError(f"max_tokens {max_tokens} leaves no room for text")
        self._counter = TokenCounter(tokenizer_json, unknown_token_id)
        self._overhead = document_overhead_tokens
        # More than a quarter repeated would be paid for in vectors and found twice.
        self._overlap_tokens = min(overlap_tokens, self._room // 4)
        self.model_fingerprint = model_fingerprint
        tokenizer = hashlib.sha256(tokenizer_json).hexdigest()
        settings = (
            f"chunker={CHUNKER_VERSION}",
            f"room={self._room}",
            f"overlap={self._overlap_tokens}",
            f"overhead={document_overhead_tokens}",
            f"unknown={unknown_token_id}",
            f"tokenizer={tokenizer}",
        )
        self.fingerprint = hashlib.sha256("\n".join(settings).encode()).hexdigest()[:32]

    def split(
        self, document: ParsedDocument, document_id: str, on_progress: Progress | None = None
    ) -> list[Chunk]:
        """Returns the chunks in order; none if the document has no words.

        `on_progress` gets characters done and in all, each character counted twice: once when it
        is tokenized and once when its chunk is verified.
        """
        report = on_progress or (lambda done, total: None)
        total = 2 * len(document.text)
        units = make_units(document, self._counter, lambda done: report(done, total))
        packer = Packer(document, self._counter, room=self._room, overlap_tokens=self._overlap_tokens)
        drafts = packer.pack(units)
        verified = self._verify(document, drafts, lambda done: report(len(document.text) + done, total))
        newlines = [match.start() for match in _NEWLINE.finditer(document.text)]
        chunks = [
            _make_chunk(document, document_id, ordinal, item, self._overhead, newlines)
            for ordinal, item in enumerate(verified)
        ]
        report(total, total)
        return _with_assets(document, chunks)

    def _verify(
        self, document: ParsedDocument, drafts: list[Draft], on_verified: Callable[[int], None]
    ) -> list[_Verified]:
        """Returns each draft with its tokens as the model will see them; halves those over the limit."""
        verified: list[_Verified] = []
        for start in range(0, len(drafts), _VERIFY_BATCH):
            batch: list[tuple[Draft, int, int]] = []
            for draft in drafts[start : start + _VERIFY_BATCH]:
                begin, end = _span(document, draft)
                if begin < end:
                    batch.append((draft, begin, end))
            texts = [draft.prefix + document.text[begin:end] for draft, begin, end in batch]
            counts = self._counter.count_with_unknown(texts)
            for (draft, begin, end), text, (tokens, unknown) in zip(batch, texts, counts, strict=True):
                if tokens <= self._room:
                    verified.append(_Verified(draft, begin, end, text, tokens, unknown))
                else:
                    verified.extend(self._verify(document, _halve(document, draft), on_verified))
            if batch:
                on_verified(batch[-1][2])
        return verified


def chunk_warnings(chunks: Sequence[Chunk]) -> tuple[Warning, ...]:
    """Returns MODEL_LACKS_LANGUAGE if the model does not know more than a fifth of the tokens."""
    tokens = sum(chunk.token_count for chunk in chunks)
    unknown = sum(chunk.unknown_token_count for chunk in chunks)
    if not tokens or unknown / tokens <= _UNKNOWN_SHARE:
        return ()
    return (Warning("MODEL_LACKS_LANGUAGE", {"percent": str(round(100 * unknown / tokens))}),)


def _span(document: ParsedDocument, draft: Draft) -> tuple[int, int]:
    """White space around a chunk goes, but not the indent of its first line of code."""
    text = document.text
    start, end = draft.units[0].start, draft.units[-1].end
    while end > start and text[end - 1].isspace():
        end -= 1
    is_code = document.blocks[draft.units[0].block].kind is BlockKind.CODE
    while start < end and (text[start] == "\n" if is_code else text[start].isspace()):
        start += 1
    return start, end


def _halve(document: ParsedDocument, draft: Draft) -> list[Draft]:
    units = draft.units
    if len(units) == 1:
        unit = units[0]
        middle = halve(document.text, unit.start, unit.end)
        if middle is None:
            # One character alone is over the limit with what stands in front of it.
            assert draft.prefix, "a single character does not fit into an empty chunk"
            return [Draft(units, "", "")]
        left = Unit(unit.start, middle, unit.tokens, unit.block, False)
        right = Unit(middle, unit.end, unit.tokens, unit.block, False)
        first, second = [left], [right]
    else:
        first, second = units[: len(units) // 2], units[len(units) // 2 :]
    return [
        Draft(first, draft.prefix, draft.later_prefix),
        Draft(second, draft.later_prefix, draft.later_prefix),
    ]


def _make_chunk(
    document: ParsedDocument,
    document_id: str,
    ordinal: int,
    item: _Verified,
    overhead: int,
    newlines: Sequence[int],
) -> Chunk:
    units = item.draft.units
    blocks = [document.blocks[index] for index in dict.fromkeys(unit.block for unit in units)]
    body = next((block for block in blocks if block.kind is not BlockKind.HEADING), blocks[-1])
    text_hash = hashlib.sha256(item.text.encode()).hexdigest()
    pages = [block.locator.page for block in blocks if block.locator.page is not None]
    first_line, last_line = _lines(newlines, blocks, item.start, item.end)
    return Chunk(
        # The ordinal parts equal texts of one document.
        chunk_id=str(uuid.uuid5(uuid.UUID(document_id), f"{CHUNKER_VERSION}:{ordinal}:{text_hash}")),
        ordinal=ordinal,
        content=document.text[item.start : item.end],
        prefix=item.draft.prefix,
        kind=body.kind,
        locator=Locator(
            item.start,
            item.end,
            heading_path=body.locator.heading_path,
            page=min(pages, default=None),
            end_page=max(pages, default=None),
            start_line=first_line,
            end_line=last_line,
        ),
        token_count=item.tokens + overhead,
        unknown_token_count=item.unknown,
    )


def _lines(
    newlines: Sequence[int], blocks: Sequence[Block], start: int, end: int
) -> tuple[int | None, int | None]:
    """Exact where a block stands line by line as in its source; else the lines of its blocks."""
    return _line_at(newlines, blocks[0], start, first=True), _line_at(newlines, blocks[-1], end, first=False)


def _line_at(newlines: Sequence[int], block: Block, position: int, *, first: bool) -> int | None:
    place = block.locator
    if place.start_line is None or place.end_line is None:
        return None
    # Counted in the list of all newlines: counting in the text would be quadratic in a large block.
    before = bisect.bisect_left(newlines, place.start_char)
    if bisect.bisect_left(newlines, place.end_char) - before == place.end_line - place.start_line:
        return place.start_line + bisect.bisect_left(newlines, max(position, place.start_char)) - before
    return place.start_line if first else place.end_line


def _with_assets(document: ParsedDocument, chunks: list[Chunk]) -> list[Chunk]:
    """Gives each asset to the chunk at its place, or else to the one before it."""
    starts = [chunk.locator.start_char for chunk in chunks]
    by_chunk: dict[int, list[str]] = {}
    for block in document.blocks:
        if block.asset_sha256 and chunks:
            index = max(0, bisect.bisect_right(starts, block.locator.start_char) - 1)
            assets = by_chunk.setdefault(index, [])
            if block.asset_sha256 not in assets:
                assets.append(block.asset_sha256)
    for index, assets in by_chunk.items():
        chunks[index] = dataclasses.replace(chunks[index], asset_sha256s=tuple(assets))
    return chunks
