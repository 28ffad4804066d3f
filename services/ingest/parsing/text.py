"""Plain text to paragraphs. Owns what is a paragraph and a heading where nothing is marked.

Headings are only lines that say so with `#`: guessing at others would cut sections apart.
"""

from __future__ import annotations

import re

from services.ingest.model import BlockKind
from services.ingest.parsing.builder import DocumentBuilder
from services.ingest.parsing.cleaning import normalize_line_ends

_HEADING = re.compile(r"(#{1,6})[ \t]+(\S.*?)[ \t]*#*[ \t]*$")


def parse_text(text: str, builder: DocumentBuilder) -> None:
    """Adds the paragraphs of `text`, which blank lines part, with the lines on which they stand."""
    paragraph: list[str] = []
    lines = normalize_line_ends(text).split("\n")

    def flush(next_line: int) -> None:
        if paragraph:
            builder.add(
                BlockKind.PARAGRAPH,
                "\n".join(paragraph),
                start_line=next_line - len(paragraph),
                end_line=next_line - 1,
            )
            paragraph.clear()

    for number, line in enumerate(lines, start=1):
        heading = _HEADING.match(line)
        if heading:
            flush(number)
            level = len(heading.group(1))
            builder.add(BlockKind.HEADING, heading.group(2), level=level, start_line=number, end_line=number)
        elif line.strip():
            paragraph.append(line.rstrip())
        else:
            flush(number)
    flush(len(lines) + 1)
