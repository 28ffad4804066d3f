"""How results look: JSON, aligned tables, local moments, errors.

Owns the look of every command. Never calls a service.
"""

from __future__ import annotations

import json
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from readymark_client.errors import ReadymarkClientError
from readymark_client.values import Document, Failure, to_json

GAP = "  "
MIN_LAST_COLUMN = 20


def print_json(value: Any) -> None:
    """Prints one JSON document, indented for people who look at it."""
    print(json.dumps(to_json(value), ensure_ascii=False, indent=2))


def print_json_line(value: Any) -> None:
    """Prints one line of a stream and flushes it, so that a reader sees it at once."""
    print(json.dumps(to_json(value), ensure_ascii=False, separators=(",", ":")), flush=True)


def print_error(error: ReadymarkClientError, subject: str = "") -> None:
    """Prints the sentence and the reason code on stderr, after what it is about."""
    prefix = f"{subject}: " if subject else ""
    print(f"{prefix}{error}", file=sys.stderr, flush=True)


def failure_line(failure: Failure) -> str:
    return f"{failure.message} [{failure.code}: {failure.reason}]"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints aligned columns; on a terminal the last one is cut to the width of the screen."""
    if not rows:
        return
    lines = [list(header), *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(display_width(line[column]) for line in lines) for column in range(len(header))]
    limit = None
    if sys.stdout.isatty():
        used = sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
        limit = max(shutil.get_terminal_size().columns - used, MIN_LAST_COLUMN)
    for line in lines:
        cells = [pad(cell, width) for cell, width in zip(line[:-1], widths[:-1], strict=True)]
        last = line[-1] if limit is None else cut(line[-1], limit)
        print(GAP.join([*cells, last]).rstrip())


def print_fields(pairs: Sequence[tuple[str, str]]) -> None:
    """Prints `name  value` lines; pairs with an empty value are left out."""
    shown = [(name, value) for name, value in pairs if value]
    width = max((display_width(name) for name, _ in shown), default=0)
    for name, value in shown:
        print(f"{pad(name, width)}{GAP}{value}")


def print_document(document: Document) -> None:
    """Prints what a person wants to know of one document."""
    progress = document.progress
    failure = document.failure
    chunks = f"{document.chunk_count} ({document.token_count} tokens)" if document.chunk_count else ""
    metadata = json.dumps(to_json(document.metadata), ensure_ascii=False) if document.metadata else ""
    print_fields(
        [
            ("id", document.document_id),
            ("name", document.display_name),
            ("title", document.title),
            ("collection", document.collection),
            ("source key", document.source_key),
            ("status", f"{document.status} (job {document.job_status})"),
            ("progress", f"{progress.done}/{progress.total} {progress.unit}" if progress else ""),
            ("failure", failure_line(failure) if failure else ""),
            ("next attempt", local_moment(failure.next_attempt_at) if failure else ""),
            ("searchable", f"yes, version {document.served_version}" if document.searchable else "no"),
            ("version", str(document.version)),
            ("attempts", f"{document.attempts} of {document.max_attempts}"),
            ("type", document.media_type),
            ("size", f"{document.size_bytes:,} bytes"),
            ("chunks", chunks),
            ("sha256", document.sha256),
            ("metadata", metadata),
            ("created", local_moment(document.created_at)),
            ("ready", local_moment(document.ready_at)),
            ("trace", document.trace_id),
        ]
    )
    for warning in document.warnings:
        print(f"warning: {warning.message} [{warning.reason}]")


def local_moment(moment: datetime | None) -> str:
    """Returns local time in ISO 8601 with offset, to the second; empty for None."""
    return "" if moment is None else moment.astimezone().isoformat(timespec="seconds")


def one_line(text: str) -> str:
    """Returns the text on one line, without control characters: content must not drive the terminal."""
    return "".join(
        character for character in " ".join(text.split()) if unicodedata.category(character)[0] != "C"
    )


def display_width(text: str) -> int:
    """Returns the terminal columns of a text: Chinese takes two, combining marks none."""
    return sum(_columns(character) for character in text)


def pad(text: str, width: int) -> str:
    return text + " " * max(width - display_width(text), 0)


def cut(text: str, width: int) -> str:
    """Returns the text in at most `width` columns, an ellipsis at the end when it is longer."""
    if display_width(text) <= width:
        return text
    kept: list[str] = []
    used = 1
    for character in text:
        used += _columns(character)
        if used > width:
            break
        kept.append(character)
    return "".join(kept) + "…"


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
