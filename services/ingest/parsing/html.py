"""HTML to blocks: html-to-markdown takes the page apart, the Markdown reader makes the blocks.

Owns what of a page is content. The text arrives decoded: the library would guess.
"""

from __future__ import annotations

import html
import re

from html_to_markdown import ConversionOptions, convert

from services.ingest.parsing.builder import DocumentBuilder
from services.ingest.parsing.markdown import parse_markdown

_TITLE = re.compile(r"<title\b[^>]*>(.*?)</title\s*>", re.I | re.S)
_TITLE_WINDOW = 65_536
# The HTML standard turns these references into U+FFFD; they stand for nothing.
_VOID_REFERENCES = re.compile(r"&#(?:0+|[xX]0+|[xX][dD][89a-fA-F][0-9a-fA-F]{2});?")
# An inline image is as long as its bytes; only its alternative text is read.
_DATA_URI = re.compile(r"(\bsrc\s*=\s*)([\"'])\s*data:[^\"']*\2", re.I)


def parse_html(text: str, builder: DocumentBuilder) -> None:
    """Adds the blocks of a page. Scripts, styles, hidden elements and navigation are left out."""
    title = _TITLE.search(text[:_TITLE_WINDOW])
    if title:
        builder.title = html.unescape(title.group(1))
    text = _VOID_REFERENCES.sub("", builder.clean(text))
    text = _DATA_URI.sub(r"\1\2#\2", text)
    options = ConversionOptions(
        extract_metadata=False,
        escape_asterisks=True,
        escape_underscores=True,
        escape_misc=True,
        autolinks=False,
    )
    markdown = convert(text, options).content or ""
    parse_markdown(markdown, builder, has_source_lines=False)
