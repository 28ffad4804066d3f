"""Lines of a PDF to paragraphs and headings, by geometry alone.

Owns the rules that join lines, drop running headers and find headings. The order of the
text is the file's own; columns that a file writes in turn come out right.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import re
from collections.abc import Iterator, Sequence

import pypdfium2
import pypdfium2.raw as pdfium

from services.ingest.model import BlockKind
from services.ingest.parsing.captions import is_caption

Outline = dict[int, list[tuple[int, str]]]

_WIDE_CLASS = "\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\u3000-\u303f\U00020000-\U0003ffff"
_WIDE = re.compile(f"[{_WIDE_CLASS}]")
_GAP_BETWEEN_WIDE = re.compile(f"(?<=[{_WIDE_CLASS}])[ \u00a0]+(?=[{_WIDE_CLASS}])")
_SPACE = re.compile(r"\s+")
_NUMBERS = re.compile(r"[\divxlc]+")
_BULLET = re.compile(r"([•◦▪●■–\-*]|\(?\d{1,2}[.)、]|[（(][一二三四五六七八九十]+[)）])\s*\S")
# The dots that lead from a title to its page in a table of contents.
_LEADERS = re.compile(r"[ \u00a0]*(?:[.．·․‥…][ \u00a0]*){4,}")
_KEEPS_HYPHEN = re.compile(r"[/._\d]")
# PDFium puts U+0002 where a word was parted at the end of a line; some fonts give U+FFFE.
_HYPHENS = ("\x02", "\ufffe", "\u00ad")

_MARGIN_SHARE = 0.08
_RUNNING_PAGE_SHARE = 0.3
_MIN_RUNNING_PAGES = 3
_HEADING_SIZE_RATIO = 1.15
_TOP_HEADING_SIZE_RATIO = 1.6
_MAX_HEADING_CHARACTERS = 120
_MAX_NUMBERING_CHARACTERS = 8
_COLUMN_WIDTH = 24.0


@dataclasses.dataclass(slots=True)
class Line:
    """A line as printed; points, origin bottom left."""

    text: str
    left: float
    right: float
    bottom: float
    top: float
    size: float


@dataclasses.dataclass(slots=True)
class Page:
    number: int
    height: float
    lines: list[Line]

    @property
    def character_count(self) -> int:
        return sum(len(line.text) for line in self.lines)


@dataclasses.dataclass(slots=True)
class _Paragraph:
    kind: BlockKind
    text: str
    left: float
    right: float
    bottom: float
    size: float


def squeeze(text: str) -> str:
    """Returns the text without white space, by which a bookmark is compared with a line."""
    return _SPACE.sub("", text)


def read_lines(text_page: pypdfium2.PdfTextPage) -> list[Line]:
    """Returns the lines of a page in the file's order."""
    count = text_page.count_chars()
    if count <= 0:
        return []
    buffer = (ctypes.c_ushort * (count * 2 + 1))()
    written = pdfium.FPDFText_GetText(text_page.raw, 0, count, buffer)
    text = bytes(buffer)[: 2 * max(0, written - 1)].decode("utf-16-le", "replace")
    # Characters without a meaning are missing in the text but counted by PDFium.
    is_aligned = len(text) == count
    raw, box = text_page.raw, [ctypes.c_double() for _ in range(4)]
    lines: list[Line] = []
    position = 0
    for printed in text.split("\r\n"):
        stripped = printed.strip()
        content = _without_leaders(stripped)
        if content:
            first = position + len(printed) - len(printed.lstrip())
            last = first + len(stripped) - 1
            if not is_aligned:
                first = max(0, pdfium.FPDFText_GetCharIndexFromTextIndex(raw, first))
                last = max(first, pdfium.FPDFText_GetCharIndexFromTextIndex(raw, last))
            pdfium.FPDFText_GetCharBox(raw, first, *box)
            left, _, bottom, top = (value.value for value in box)
            pdfium.FPDFText_GetCharBox(raw, last, *box)
            # Not of the first character: bullets and initials have a size of their own.
            size = pdfium.FPDFText_GetFontSize(raw, (first + last) // 2)
            lines.append(Line(content, left, box[1].value, bottom, top, size))
        position += len(printed) + 2
    return lines


class Layout:
    """Rules that need the whole document: its body size, its running lines, its outline."""

    def __init__(self, pages: Sequence[Page], outline: Outline) -> None:
        self._outline = outline
        self._running = _running_lines(pages)
        sizes: collections.Counter[float] = collections.Counter()
        for page in pages:
            for line in page.lines:
                sizes[round(line.size, 1)] += len(line.text)
        self._body_size = sizes.most_common(1)[0][0] if sizes else 0.0

    def blocks(self, page: Page) -> Iterator[tuple[BlockKind, str, int | None]]:
        """Yields kind, text and heading level of the blocks of a page."""
        lines = [line for line in page.lines if not self._is_running(page, line)]
        edges = _ColumnEdges(lines)
        paragraph: _Paragraph | None = None
        for line in lines:
            level = self._heading_level(page.number, line)
            if level is None and paragraph and _continues(paragraph, line, edges):
                _join(paragraph, line)
                continue
            if paragraph:
                yield paragraph.kind, _finish(paragraph.text), None
            paragraph = None
            if level is not None:
                yield BlockKind.HEADING, _finish(line.text), level
            else:
                paragraph = _begin(line)
        if paragraph:
            yield paragraph.kind, _finish(paragraph.text), None

    def _is_running(self, page: Page, line: Line) -> bool:
        return _is_in_margin(page, line) and _running_key(line) in self._running

    def _heading_level(self, page_number: int, line: Line) -> int | None:
        squeezed = squeeze(line.text)
        for level, title in self._outline.get(page_number, ()):
            numbering = len(squeezed) - len(title)
            if squeezed.endswith(title) and numbering <= _MAX_NUMBERING_CHARACTERS:
                return level
        if self._outline or len(line.text) >= _MAX_HEADING_CHARACTERS or not self._body_size:
            return None
        ratio = line.size / self._body_size
        if ratio < _HEADING_SIZE_RATIO:
            return None
        return 1 if ratio >= _TOP_HEADING_SIZE_RATIO else 2


def largest_line(page: Page) -> str | None:
    """Returns the text set largest on a page if it stands out: on a first page, the title."""
    if not page.lines:
        return None
    sizes = sorted(line.size for line in page.lines)
    largest = max(page.lines, key=lambda line: line.size)
    stands_out = largest.size >= sizes[len(sizes) // 2] * _HEADING_SIZE_RATIO
    return _finish(largest.text) if stands_out and len(largest.text) < _MAX_HEADING_CHARACTERS else None


class _ColumnEdges:
    """Where the lines of a column end: the right edge by left edge, ragged lines aside."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._rights: dict[int, list[float]] = collections.defaultdict(list)
        for line in lines:
            self._rights[round(line.left / _COLUMN_WIDTH)].append(line.right)
        self._edges: dict[int, float] = {}

    def right_of(self, left: float) -> float:
        column = round(left / _COLUMN_WIDTH)
        if column not in self._edges:
            near = sorted(right for step in (-1, 0, 1) for right in self._rights.get(column + step, ()))
            self._edges[column] = near[int((len(near) - 1) * 0.85)] if near else 0.0
        return self._edges[column]


def _running_lines(pages: Sequence[Page]) -> frozenset[str]:
    """Lines that stand in the margin of many pages, their numbers apart."""
    counts: collections.Counter[str] = collections.Counter()
    for page in pages:
        counts.update({_running_key(line) for line in page.lines if _is_in_margin(page, line)})
    needed = max(_MIN_RUNNING_PAGES, len(pages) * _RUNNING_PAGE_SHARE)
    return frozenset(key for key, count in counts.items() if count >= needed)


def _is_in_margin(page: Page, line: Line) -> bool:
    margin = page.height * _MARGIN_SHARE
    return line.top > page.height - margin or line.bottom < margin


def _running_key(line: Line) -> str:
    return _NUMBERS.sub("#", squeeze(line.text).lower())


def _begin(line: Line) -> _Paragraph:
    kind = BlockKind.PARAGRAPH
    if _BULLET.match(line.text):
        kind = BlockKind.LIST_ITEM
    elif is_caption(line.text):
        kind = BlockKind.CAPTION
    return _Paragraph(kind, line.text, line.left, line.right, line.bottom, line.size)


def _continues(paragraph: _Paragraph, line: Line, edges: _ColumnEdges) -> bool:
    """A line goes on where the one above had no room for its first word and nothing marks a new start."""
    drop = paragraph.bottom - line.bottom
    # Lines of a list item hang behind its bullet.
    indent = 3.0 if paragraph.kind is BlockKind.LIST_ITEM else 1.2
    return (
        abs(line.size - paragraph.size) < 0.6
        and 0 < drop < line.size * 2.4
        and _is_full(paragraph, line, edges.right_of(paragraph.left))
        and line.left < paragraph.left + line.size * indent
        and not _BULLET.match(line.text)
    )


def _is_full(paragraph: _Paragraph, line: Line, edge: float) -> bool:
    """Justified lines end at the edge, or two Chinese characters before it; ragged ones before a word."""
    if paragraph.right > edge - line.size * 2.2:
        return True
    words = line.text.split(None, 1)
    if len(words) < 2 or _WIDE.search(words[0]):
        return False
    word_width = (line.right - line.left) * (len(words[0]) + 1) / len(line.text)
    return paragraph.right + word_width > edge


def _join(paragraph: _Paragraph, line: Line) -> None:
    """Chinese is joined without a space; a parted word is made whole unless its hyphen is its own."""
    text = paragraph.text
    if text.endswith(_HYPHENS):
        text = text[:-1]
        word = text.rsplit(None, 1)[-1] if text.split() else ""
        text += ("-" if _KEEPS_HYPHEN.search(word) else "") + line.text
    elif _WIDE.match(text[-1]) and _WIDE.match(line.text[0]):
        text += line.text
    else:
        text += " " + line.text
    paragraph.text = text
    paragraph.right = line.right
    paragraph.bottom = line.bottom
    # A first line may be indented by up to four characters; the edge is that of the others.
    if line.left > paragraph.left - 4 * line.size:
        paragraph.left = min(paragraph.left, line.left)
    else:
        paragraph.left = line.left


def _finish(text: str) -> str:
    for hyphen in _HYPHENS:
        text = text.replace(hyphen, "-" if text.endswith(hyphen) else "")
    return _GAP_BETWEEN_WIDE.sub("", text)


def _without_leaders(text: str) -> str:
    return _LEADERS.sub(" ", text).strip()
