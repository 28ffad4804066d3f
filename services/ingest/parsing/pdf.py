"""PDF to blocks by PDFium. Owns the order of the steps and what a faulty or scanned file is told.

The layout of lines is in pdf_layout.py, images in pdf_images.py, fonts in pdf_fonts.py.
Tables without marks in the file stay paragraphs.
"""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Callable, Iterator

import pypdfium2

from services.ingest.model import BlockKind, Warning
from services.ingest.parsing import pdf_fonts
from services.ingest.parsing.builder import DocumentBuilder
from services.ingest.parsing.captions import is_figure_caption
from services.ingest.parsing.limits import ParseLimits
from services.ingest.parsing.pdf_images import ImageCollector, is_mostly_image
from services.ingest.parsing.pdf_layout import Layout, Outline, Page, largest_line, read_lines, squeeze
from shared.errors import DependencyUnavailableError, InvalidDocumentError

# A scanner's stamp or page number may be text; a page with fewer characters and a picture over
# most of it is a scan.
_MIN_PAGE_CHARACTERS = 10
_PROGRESS_PAGES = 20
_MAX_OUTLINE_DEPTH = 8
_MAX_OUTLINE_ENTRIES = 20_000
# What typesetting programs write when nobody gave a title.
_USELESS_TITLE = re.compile(r"(untitled|无标题|microsoft word - |.*\.(docx?|pdf|tex|indd|dvi|pptx?)$)", re.I)


def parse_pdf(
    data: bytes,
    builder: DocumentBuilder,
    limits: ParseLimits,
    save_asset: Callable[[str, bytes], None],
    on_progress: Callable[[int, int], None],
) -> int:
    """Adds the blocks of a PDF and returns its number of pages.

    Raises InvalidDocumentError: PASSWORD_PROTECTED, CORRUPT_FILE, TOO_MANY_PAGES, NO_TEXT_LAYER;
    DependencyUnavailableError CJK_FONT_MISSING if all text is lost for want of a font.
    """
    with contextlib.closing(_open(data)) as document:
        page_count = len(document)
        if page_count > limits.max_pages:
            raise InvalidDocumentError("TOO_MANY_PAGES", actual=page_count, limit=limits.max_pages)
        images = ImageCollector(limits, save_asset)
        pages: list[Page] = []
        scans: list[int] = []
        is_font_missing = False
        for number, page in _pages(document, page_count):
            text_page = page.get_textpage()
            pages.append(Page(number, page.get_size()[1], read_lines(text_page)))
            if pages[-1].character_count < _MIN_PAGE_CHARACTERS and is_mostly_image(page):
                scans.append(number)
            elif not is_font_missing:
                is_font_missing = pdf_fonts.lacks_cjk_font(page, text_page)
            images.collect(page, number)
            text_page.close()
            if number % _PROGRESS_PAGES == 0 or number == page_count:
                on_progress(number, page_count)
        _refuse_scan(pages, scans)
        for number in scans:
            builder.warn(Warning("PAGE_WITHOUT_TEXT", {"page": str(number)}, page=number))
        if is_font_missing:
            if not any(page.lines for page in pages):
                # The operator can cure this and then retry; the sender of the document cannot.
                raise DependencyUnavailableError("CJK_FONT_MISSING")
            builder.warn(Warning("CJK_FONT_MISSING"))
        builder.title = _title(document) or largest_line(pages[0])
        _add_blocks(builder, pages, _outline(document), images)
    return page_count


def _open(data: bytes) -> pypdfium2.PdfDocument:
    try:
        document = pypdfium2.PdfDocument(data)
        if len(document) > 0:
            return document
        document.close()
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower() or "security" in str(error).lower():
            raise InvalidDocumentError("PASSWORD_PROTECTED", file_type="PDF") from error
        raise InvalidDocumentError("CORRUPT_FILE", file_type="PDF") from error
    raise InvalidDocumentError("CORRUPT_FILE", file_type="PDF")


def _pages(document: pypdfium2.PdfDocument, count: int) -> Iterator[tuple[int, pypdfium2.PdfPage]]:
    for index in range(count):
        try:
            page = document[index]
        except pypdfium2.PdfiumError as error:
            raise InvalidDocumentError("CORRUPT_FILE", file_type="PDF") from error
        try:
            yield index + 1, page
        finally:
            page.close()


def _refuse_scan(pages: list[Page], scans: list[int]) -> None:
    """A stamp on each page of a scan is no content: the document counts as a whole."""
    characters = sum(page.character_count for page in pages)
    if scans and characters < _MIN_PAGE_CHARACTERS * len(pages):
        others = sum(page.character_count for page in pages if page.number not in scans)
        if others < _MIN_PAGE_CHARACTERS:
            raise InvalidDocumentError("NO_TEXT_LAYER", pages=len(scans))


def _title(document: pypdfium2.PdfDocument) -> str | None:
    title = str(document.get_metadata_value("Title") or "").strip()
    return None if not title or _USELESS_TITLE.match(title) else title


def _outline(document: pypdfium2.PdfDocument) -> Outline:
    """Returns the bookmarks as (level, squeezed title) by page number."""
    outline: Outline = collections.defaultdict(list)
    for count, bookmark in enumerate(document.get_toc(max_depth=_MAX_OUTLINE_DEPTH)):
        if count >= _MAX_OUTLINE_ENTRIES:
            break
        destination = bookmark.get_dest()
        index = destination.get_index() if destination else None
        title = squeeze(bookmark.get_title() or "")
        if index is not None and title:
            outline[index + 1].append((min(bookmark.level + 1, 6), title))
    return dict(outline)


def _add_blocks(
    builder: DocumentBuilder, pages: list[Page], outline: Outline, images: ImageCollector
) -> None:
    layout = Layout(pages, outline)
    for page in pages:
        figures: list[str] = []
        for kind, text, level in layout.blocks(page):
            builder.add(kind, text, level=level, page=page.number)
            if is_figure_caption(text):
                figures.append(text)
        for asset in images.of_page(page.number, figures):
            builder.add_asset(asset)
            builder.add(BlockKind.IMAGE, "", page=page.number, asset_sha256=asset.sha256)
