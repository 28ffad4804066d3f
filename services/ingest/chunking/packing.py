"""Units to chunks, greedily. Owns what may stand together in a chunk and what is repeated.

A chunk stays inside one section, and tables, code and prose keep apart. Headings and the
caption of a table go into the chunk that follows them, so every character of a document
is in some chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from services.ingest.chunking.prefixes import HeadingPrefixes, Prefix, table_prefix
from services.ingest.chunking.tokens import TokenCounter
from services.ingest.chunking.units import MAX_CHARACTERS, Unit, split_to_fit
from services.ingest.model import Block, BlockKind, ParsedDocument

_APART = (BlockKind.TABLE, BlockKind.CODE)
# Headings in a row beyond this share of a chunk become a chunk of their own.
_MAX_LEAD_SHARE = 0.5
_MAX_TABLE_HEADER_SHARE = 1 / 3


@dataclasses.dataclass(slots=True)
class Draft:
    """A chunk before its tokens are verified."""

    units: list[Unit]
    prefix: str
    later_prefix: str
    """For the second half, should the draft turn out too long."""


class Packer:
    """Packs one document; `room` is what a chunk may hold, prefix included."""

    def __init__(
        self, document: ParsedDocument, counter: TokenCounter, *, room: int, overlap_tokens: int
    ) -> None:
        self._document = document
        self._counter = counter
        self._room = room
        self._overlap_tokens = overlap_tokens
        self._headings = HeadingPrefixes(counter, room // 4)
        # Blank lines between blocks are tokens to some models and nothing to others.
        apart, together = counter.count(["a\n\nb", "a"])
        self._gap_tokens = max(0, apart - 2 * together)
        self._drafts: list[Draft] = []
        self._lead: list[Unit] = []
        """Headings, and the caption of a table, that wait for what they belong to."""
        self._units: list[Unit] = []
        self._tokens = 0
        self._prefix: Prefix = ("", 0)
        self._later: Prefix = ("", 0)

    def pack(self, units_by_block: Sequence[list[Unit]]) -> list[Draft]:
        """Returns the drafts in order; `units_by_block` as make_units gives it."""
        blocks = self._document.blocks
        self._headings.prepare(block.locator.heading_path for block in blocks)
        path: tuple[str, ...] = ()
        for index, (block, units) in enumerate(zip(blocks, units_by_block, strict=True)):
            if not units:
                continue
            if block.kind is BlockKind.HEADING or self._is_table_caption(index):
                self._flush()
                self._add_lead(units)
                continue
            if block.kind in _APART or block.locator.heading_path != path:
                self._flush()
            path = block.locator.heading_path
            if block.kind is BlockKind.TABLE:
                self._pack_table(block, units)
            else:
                self._pack_units(block, units, repeats=block.kind not in _APART)
            if block.kind in _APART:
                self._flush()
        self._flush()
        self._flush_lead()
        return self._drafts

    def _is_table_caption(self, index: int) -> bool:
        blocks = self._document.blocks
        return (
            blocks[index].kind is BlockKind.CAPTION
            and index + 1 < len(blocks)
            and blocks[index + 1].kind is BlockKind.TABLE
        )

    def _pack_units(self, block: Block, units: Sequence[Unit], *, repeats: bool) -> None:
        later = self._headings.of(block.locator.heading_path)
        for unit in units:
            room = self._room - later[1]
            fits = unit.tokens <= room and unit.end - unit.start <= MAX_CHARACTERS
            parts = [unit] if fits else split_to_fit(self._document.text, unit, room, self._counter)
            for part in parts:
                self._add(part, later, repeats=repeats)

    def _pack_table(self, block: Block, units: Sequence[Unit]) -> None:
        """A table that fits stays whole; the parts of a longer one repeat caption and header."""
        text = self._document.text
        heading = self._headings.of(block.locator.heading_path)
        header_end = units[min(block.header_rows, len(units)) - 1].end if block.header_rows else 0
        header = text[block.locator.start_char : header_end] if header_end else ""
        if header and not header.endswith("\n"):
            header += "\n"
        caption = self._lead_caption()
        limit = int((self._room - heading[1]) * _MAX_TABLE_HEADER_SHARE)
        later = table_prefix(heading, caption, header, limit, lambda words: self._counter.count([words])[0])
        head, rows = _head(units, block.header_rows), units[block.header_rows :]
        for unit in [*head, *rows]:
            room = self._room - later[1]
            is_long = unit.tokens > room or unit.end - unit.start > MAX_CHARACTERS
            for part in split_to_fit(text, unit, room, self._counter) if is_long else [unit]:
                # A chunk that begins with the header itself has no second one in front.
                self._add(part, heading if unit in head else later, repeats=False)
                self._later = later

    def _lead_caption(self) -> str:
        words = [
            self._document.text[unit.start : unit.end]
            for unit in self._lead
            if self._document.blocks[unit.block].kind is BlockKind.CAPTION
        ]
        return "".join(words).strip()

    def _add(self, unit: Unit, later: Prefix, *, repeats: bool) -> None:
        if not self._units:
            self._open(unit, later)
        if not self._fits(unit):
            repeated = self._repeated(unit, later) if repeats else []
            self._flush()
            self._prefix = self._later = later
            self._units = repeated
            self._tokens = sum(item.tokens for item in repeated)
        if self._units and self._units[-1].block != unit.block:
            self._tokens += self._gap_tokens
        self._units.append(unit)
        self._tokens += unit.tokens

    def _fits(self, unit: Unit) -> bool:
        if not self._units:
            return True
        tokens = self._tokens + unit.tokens
        if self._units[-1].block != unit.block:
            tokens += self._gap_tokens
        is_short = unit.end - self._units[0].start <= MAX_CHARACTERS
        return is_short and tokens <= self._room - self._prefix[1]

    def _open(self, unit: Unit, later: Prefix) -> None:
        """Begins a chunk. One that begins with its headings has only their parents in front."""
        self._prefix = self._later = later
        if not self._lead:
            return
        parents = self._headings.of(self._document.blocks[self._lead[0].block].locator.heading_path)
        tokens = sum(item.tokens + self._gap_tokens for item in self._lead)
        is_short = unit.end - self._lead[0].start <= MAX_CHARACTERS
        if not is_short or tokens + unit.tokens > self._room - parents[1]:
            self._flush_lead()
            return
        self._prefix = parents
        self._units, self._tokens = self._lead, tokens
        self._lead = []

    def _repeated(self, unit: Unit, later: Prefix) -> list[Unit]:
        """Returns the last whole sentences of the chunk before, as many as the overlap allows."""
        room = self._room - later[1] - unit.tokens - self._gap_tokens
        taken: list[Unit] = []
        tokens = 0
        # Never all of them: a chunk that another one holds entirely would be found twice.
        for item in reversed(self._units[1:]):
            tokens += item.tokens
            is_long = unit.end - item.start > MAX_CHARACTERS
            is_prose = self._document.blocks[item.block].kind is not BlockKind.HEADING
            if tokens > min(self._overlap_tokens, room) or is_long or not (item.is_whole and is_prose):
                break
            taken.append(item)
        return taken[::-1]

    def _add_lead(self, units: Sequence[Unit]) -> None:
        limit = int(self._room * _MAX_LEAD_SHARE)
        for unit in units:
            is_long = unit.tokens > limit or unit.end - unit.start > MAX_CHARACTERS
            parts = split_to_fit(self._document.text, unit, limit, self._counter) if is_long else [unit]
            for part in parts:
                tokens = sum(item.tokens + self._gap_tokens for item in self._lead) + part.tokens
                if self._lead and tokens > limit:
                    self._flush_lead()
                self._lead.append(part)

    def _flush_lead(self) -> None:
        if self._lead:
            parents = self._headings.of(self._document.blocks[self._lead[0].block].locator.heading_path)
            self._drafts.append(Draft(self._lead, parents[0], parents[0]))
            self._lead = []

    def _flush(self) -> None:
        if self._units:
            self._drafts.append(Draft(self._units, self._prefix[0], self._later[0]))
        self._units = []
        self._tokens = 0


def _head(units: Sequence[Unit], header_rows: int) -> list[Unit]:
    """Header rows as one unit, lest a chunk begin between the header and its rule."""
    if not header_rows:
        return []
    rows = units[:header_rows]
    tokens = sum(row.tokens for row in rows)
    return [Unit(rows[0].start, rows[-1].end, tokens, rows[0].block, True)]
