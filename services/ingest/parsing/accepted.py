"""The kinds of documents that are read: their media types and the names that people know them by."""

from __future__ import annotations

import enum


class MediaType(enum.StrEnum):
    PDF = "application/pdf"
    HTML = "text/html"
    MARKDOWN = "text/markdown"
    TEXT = "text/plain"


NAMES = {
    MediaType.PDF: "PDF",
    MediaType.HTML: "HTML",
    MediaType.MARKDOWN: "Markdown",
    MediaType.TEXT: "TXT",
}
ACCEPTED = ", ".join(NAMES.values())
"""For sentences that tell what is accepted."""
