"""Parses bytes in this process: for tests of what comes out, not of where it runs."""

from __future__ import annotations

import dataclasses

from services.ingest.model import BlockKind, ParsedDocument
from services.ingest.parsing.formats import parse
from services.ingest.parsing.limits import ParseLimits


@dataclasses.dataclass
class Parsed:
    document: ParsedDocument
    assets: dict[str, bytes]

    @property
    def blocks(self) -> list[tuple[BlockKind, str]]:
        text = self.document.text
        return [
            (block.kind, text[block.locator.start_char : block.locator.end_char])
            for block in self.document.blocks
        ]

    @property
    def reasons(self) -> list[str]:
        return [warning.reason for warning in self.document.warnings]


def parse_bytes(
    data: bytes, name: str = "file", declared: str | None = None, limits: ParseLimits | None = None
) -> Parsed:
    """Returns what the parser of the format makes of `data`; blocks are slices in order, or this fails."""
    assets: dict[str, bytes] = {}
    document = parse(
        data,
        display_name=name,
        declared_media_type=declared,
        limits=limits or ParseLimits(),
        save_asset=assets.__setitem__,
        on_progress=lambda done, total: None,
    )
    position = 0
    for block in document.blocks:
        assert position <= block.locator.start_char <= block.locator.end_char <= len(document.text)
        position = block.locator.end_char
    return Parsed(document, assets)
