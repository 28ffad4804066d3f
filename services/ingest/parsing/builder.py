"""Collects blocks into one text. Owns offsets, heading paths and the counts behind warnings.

Every format adds its blocks here, in reading order, so that a block is an exact slice of
the text whatever parser it came from.
"""

from __future__ import annotations

from services.ingest.model import Asset, Block, BlockKind, Locator, ParsedDocument, Warning
from services.ingest.parsing.accepted import MediaType
from services.ingest.parsing.cleaning import clean
from services.ingest.parsing.limits import ParseLimits
from shared.errors import InvalidDocumentError

_MAX_TITLE_CHARACTERS = 300


class DocumentBuilder:
    """Builds a ParsedDocument block by block; raises InvalidDocumentError when a limit is passed."""

    def __init__(self, media_type: MediaType, limits: ParseLimits) -> None:
        self._media_type = media_type
        self._limits = limits
        self._parts: list[str] = []
        self._length = 0
        self._blocks: list[Block] = []
        self._headings: list[tuple[int, str]] = []
        self._controls = 0
        self._hidden = 0
        self._warnings: list[Warning] = []
        self._assets: dict[str, Asset] = {}
        self.title: str | None = None

    def clean(self, text: str) -> str:
        """Returns the text as a block may hold it, and counts what was removed."""
        cleaned = clean(text)
        self._controls += cleaned.control_count
        self._hidden += cleaned.hidden_count
        return cleaned.text

    def add(
        self,
        kind: BlockKind,
        text: str,
        *,
        level: int | None = None,
        page: int | None = None,
        start_line: int | None = None,
        end_line: int | None = None,
        header_rows: int = 0,
        language: str | None = None,
        asset_sha256: str | None = None,
    ) -> None:
        """Appends a block; one without any text is left out, unless it shows an asset."""
        text = self.clean(text).strip("\n") if kind is BlockKind.CODE else self.clean(text).strip()
        if not text.strip():
            if asset_sha256 is None:
                return
            text = ""
        if kind is BlockKind.HEADING:
            text = " ".join(text.split())
            level = level or 1
            while self._headings and self._headings[-1][0] >= level:
                self._headings.pop()
        start = self._append(kind, text)
        locator = Locator(
            start,
            self._length,
            heading_path=tuple(title for _, title in self._headings),
            page=page,
            end_page=page,
            start_line=start_line,
            end_line=end_line,
        )
        if kind is BlockKind.HEADING and level is not None:
            self._headings.append((level, text))
        self._blocks.append(
            Block(
                kind,
                locator,
                level=level,
                header_rows=header_rows,
                language=language or None,
                asset_sha256=asset_sha256,
            )
        )

    def add_asset(self, asset: Asset) -> None:
        self._assets.setdefault(asset.sha256, asset)

    def warn(self, warning: Warning) -> None:
        self._warnings.append(warning)

    @property
    def has_text(self) -> bool:
        return self._length > 0

    def build(self, *, encoding: str | None = None, page_count: int | None = None) -> ParsedDocument:
        """Returns the document; raises InvalidDocumentError NO_TEXT if no block has text."""
        if not self.has_text:
            raise InvalidDocumentError("NO_TEXT")
        warnings = list(self._warnings)
        if self._controls:
            warnings.append(Warning("CONTROL_CHARACTERS_REMOVED", {"count": str(self._controls)}))
        if self._hidden:
            warnings.append(Warning("HIDDEN_TEXT", {"count": str(self._hidden)}))
        title = " ".join(clean(self.title or "").text.split()) or self._first_heading()
        return ParsedDocument(
            media_type=str(self._media_type),
            text="".join(self._parts),
            blocks=tuple(self._blocks),
            assets=tuple(self._assets.values()),
            warnings=tuple(warnings),
            title=title[:_MAX_TITLE_CHARACTERS] if title else None,
            encoding=encoding,
            page_count=page_count,
        )

    def _append(self, kind: BlockKind, text: str) -> int:
        if len(self._blocks) >= self._limits.max_blocks:
            raise InvalidDocumentError("TOO_MUCH_TEXT", limit=self._limits.max_characters)
        if text and self._length:
            is_list = kind is BlockKind.LIST_ITEM and self._blocks[-1].kind is BlockKind.LIST_ITEM
            separator = "\n" if is_list else "\n\n"
            self._parts.append(separator)
            self._length += len(separator)
        start = self._length
        self._parts.append(text)
        self._length += len(text)
        if self._length > self._limits.max_characters:
            raise InvalidDocumentError("TOO_MUCH_TEXT", limit=self._limits.max_characters)
        return start

    def _first_heading(self) -> str | None:
        for block in self._blocks:
            if block.kind is BlockKind.HEADING:
                start, end = block.locator.start_char, block.locator.end_char
                return "".join(self._parts)[start:end]
        return None
