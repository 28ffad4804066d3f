"""The smallest pieces that are packed: sentences, lines of code, rows of tables, and parts of those too long.

Owns how a block falls into units and how a unit over the limit is cut. A unit never
crosses a block, and no cut goes through what a reader takes for one character.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from services.ingest.chunking.sentences import Span, clauses, graphemes, lines, sentences
from services.ingest.chunking.tokens import TokenCounter
from services.ingest.model import Block, BlockKind, ParsedDocument

# Some tokenizers make one token of any long word, so tokens alone do not bound a chunk.
MAX_CHARACTERS = 4_000
_COUNT_BATCH = 2_048
_BY_LINES = (BlockKind.CODE, BlockKind.TABLE)
# Tokens of the parts add up to a little more than those of the whole.
_PART_SHARE = 0.95


@dataclasses.dataclass(slots=True)
class Unit:
    """A span of the text with its tokens. `is_whole`: a sentence or line, not a part of one."""

    start: int
    end: int
    tokens: int
    block: int
    is_whole: bool


def make_units(
    document: ParsedDocument, counter: TokenCounter, on_counted: Callable[[int], None]
) -> list[list[Unit]]:
    """Returns the units of each block, counted; `on_counted` gets the characters done so far."""
    by_block: list[list[Unit]] = []
    uncounted: list[Unit] = []
    for index, block in enumerate(document.blocks):
        units = [
            Unit(start, end, 0, index, is_whole) for start, end, is_whole in _spans(document.text, block)
        ]
        by_block.append(units)
        uncounted.extend(units)
        if len(uncounted) >= _COUNT_BATCH:
            _count(document.text, uncounted, counter)
            on_counted(uncounted[-1].end)
            uncounted = []
    _count(document.text, uncounted, counter)
    on_counted(len(document.text))
    return by_block


def split_to_fit(text: str, unit: Unit, room: int, counter: TokenCounter) -> list[Unit]:
    """Returns the unit in parts of at most `room` tokens: at commas and spaces, else between characters."""
    spans = list(clauses(text, unit.start, unit.end))
    counts = counter.count([text[start:end] for start, end in spans])
    parts: list[Unit] = []
    for (start, end), tokens in zip(spans, counts, strict=True):
        if tokens > room:
            parts.extend(_split_characters(text, start, end, unit.block, room, counter))
        elif parts and parts[-1].tokens + tokens <= room and parts[-1].end == start:
            parts[-1] = Unit(parts[-1].start, end, parts[-1].tokens + tokens, unit.block, False)
        else:
            parts.append(Unit(start, end, tokens, unit.block, False))
    return parts


def halve(text: str, start: int, end: int) -> int | None:
    """Returns a place near the middle between two characters; None if there is none."""
    borders = graphemes(text, start, end)
    if len(borders) > 2:
        return borders[len(borders) // 2]
    # One character of hundreds of code points, as a hostile text piles up accents.
    return (start + end) // 2 if end - start > 1 else None


def _spans(text: str, block: Block) -> Iterable[tuple[int, int, bool]]:
    start, end = block.locator.start_char, block.locator.end_char
    if block.kind is BlockKind.HEADING:
        spans: Iterable[Span] = [(start, end)]
    else:
        spans = (lines if block.kind in _BY_LINES else sentences)(text, start, end)
    for begin, stop in spans:
        if stop - begin <= MAX_CHARACTERS:
            if stop > begin:
                yield begin, stop, True
        else:
            for part in _windows(text, begin, stop):
                yield *part, False


def _windows(text: str, start: int, end: int) -> Iterable[Span]:
    """Yields parts of at most MAX_CHARACTERS; before counting, so that no huge text is tokenized at once."""
    begin = position = start
    for _, stop in clauses(text, start, end):
        if stop - begin > MAX_CHARACTERS and position > begin:
            yield begin, position
            begin = position
        while stop - begin > MAX_CHARACTERS:
            borders = graphemes(text, begin, min(stop, begin + MAX_CHARACTERS))
            # The last border but one: the last character may go on behind the window.
            border = borders[-2] if len(borders) > 2 else borders[-1]
            yield begin, border
            begin = border
        position = stop
    if begin < end:
        yield begin, end


def _split_characters(
    text: str, start: int, end: int, block: int, room: int, counter: TokenCounter
) -> list[Unit]:
    parts: list[Unit] = []
    pending = [(start, end)]
    while pending:
        spans = pending
        pending = []
        counts = counter.count([text[begin:stop] for begin, stop in spans])
        for (begin, stop), tokens in zip(spans, counts, strict=True):
            if tokens <= room or stop - begin == 1:
                parts.append(Unit(begin, stop, tokens, block, False))
            else:
                pending.extend(_even_parts(text, begin, stop, tokens, room))
    return sorted(parts, key=lambda part: part.start)


def _even_parts(text: str, start: int, end: int, tokens: int, room: int) -> list[Span]:
    borders = graphemes(text, start, end)
    if len(borders) <= 2:
        borders = list(range(start, end + 1))
    count = min(len(borders) - 1, max(2, -(-tokens // max(1, int(room * _PART_SHARE)))))
    cuts = [borders[(len(borders) - 1) * part // count] for part in range(count + 1)]
    return [(begin, stop) for begin, stop in itertools.pairwise(cuts) if stop > begin]


def _count(text: str, units: Sequence[Unit], counter: TokenCounter) -> None:
    for unit, tokens in zip(
        units, counter.count([text[unit.start : unit.end] for unit in units]), strict=True
    ):
        unit.tokens = tokens
