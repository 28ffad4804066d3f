"""From bytes to a parsed document: sniff, decode, hand to the parser of the format.

Owns which parser reads what. Runs inside a sandboxed
process (sandbox.py); it can be called directly on bytes that are trusted.
"""

from __future__ import annotations

from collections.abc import Callable

from services.ingest.model import ParsedDocument
from services.ingest.parsing.accepted import MediaType
from services.ingest.parsing.builder import DocumentBuilder
from services.ingest.parsing.decoding import decode
from services.ingest.parsing.html import parse_html
from services.ingest.parsing.limits import ParseLimits
from services.ingest.parsing.markdown import parse_markdown
from services.ingest.parsing.pdf import parse_pdf
from services.ingest.parsing.sniffing import sniff
from services.ingest.parsing.text import parse_text
from shared.errors import InvalidDocumentError


def parse(
    data: bytes,
    *,
    display_name: str,
    declared_media_type: str | None,
    limits: ParseLimits,
    save_asset: Callable[[str, bytes], None],
    on_progress: Callable[[int, int], None],
) -> ParsedDocument:
    """Returns the document in `data`; raises InvalidDocumentError with what its sender can do.

    `save_asset` gets hash and bytes of each asset; `on_progress` gets pages done and pages in all.
    """
    if len(data) > limits.max_input_bytes:
        raise InvalidDocumentError("TOO_LARGE", actual=len(data), limit=limits.max_input_bytes)
    sniffed = sniff(data, display_name=display_name, declared_media_type=declared_media_type)
    builder = DocumentBuilder(sniffed.media_type, limits)
    for warning in sniffed.warnings:
        builder.warn(warning)
    if sniffed.media_type is MediaType.PDF:
        page_count = parse_pdf(data, builder, limits, save_asset, on_progress)
        return builder.build(page_count=page_count)
    decoded = decode(data)
    if len(decoded.text) > limits.max_characters:
        raise InvalidDocumentError("TOO_MUCH_TEXT", limit=limits.max_characters)
    parser = {
        MediaType.HTML: parse_html,
        MediaType.MARKDOWN: parse_markdown,
        MediaType.TEXT: parse_text,
    }[sniffed.media_type]
    parser(decoded.text, builder)
    return builder.build(encoding=decoded.encoding)
