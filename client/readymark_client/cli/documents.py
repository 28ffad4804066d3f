"""Commands about documents that were accepted: show, list, follow, retry, cancel, delete.

Each asks the SDK once and prints; the exit code is its answer.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from pathlib import Path

from readymark_client.cli.printing import (
    failure_line,
    local_moment,
    print_document,
    print_fields,
    print_json,
    print_json_line,
    print_table,
)
from readymark_client.synchronous import Readymark
from readymark_client.values import Change, Document, DocumentStatus


def get(client: Readymark, options: argparse.Namespace) -> int:
    _show(client.get(options.id), as_json=options.json)
    return 0


def retry(client: Readymark, options: argparse.Namespace) -> int:
    _show(client.retry(options.id), as_json=options.json)
    return 0


def cancel(client: Readymark, options: argparse.Namespace) -> int:
    _show(client.cancel(options.id), as_json=options.json)
    return 0


def delete(client: Readymark, options: argparse.Namespace) -> int:
    client.delete(options.id, allow_missing=options.allow_missing)
    if options.json:
        print_json({"deleted": options.id})
    elif not options.quiet:
        print(f"{options.id} is deleted")
    return 0


def download(client: Readymark, options: argparse.Namespace) -> int:
    target = Path(options.output)
    written = client.download(options.id, target, asset_id=options.asset)
    if options.json:
        print_json({"path": str(target), "media_type": written.media_type, "size_bytes": written.size_bytes})
    elif not options.quiet:
        print(f"{target}: {written.size_bytes:,} bytes, {written.media_type}")
    return 0


def list_documents(client: Readymark, options: argparse.Namespace) -> int:
    found = list(
        itertools.islice(client.list(options.collection, status=options.status), max(options.limit, 0))
    )
    if options.json:
        print_json(found)
        return 0
    rows = [
        [
            document.document_id,
            document.status.value,
            document.collection,
            str(document.chunk_count),
            local_moment(document.created_at),
            document.display_name or document.source_key,
        ]
        for document in found
    ]
    print_table(("ID", "STATUS", "COLLECTION", "CHUNKS", "CREATED", "NAME"), rows)
    return 0


def watch(client: Readymark, options: argparse.Namespace) -> int:
    """Prints every change; without --forever it ends when all named are settled, with 1 if one FAILED."""
    until_settled = bool(options.ids) and not options.forever
    latest: dict[str, Document | None] = {}
    for change in client.watch(options.ids, collection=options.collection, until_settled=until_settled):
        latest[change.document_id] = change.document
        if options.json:
            print_json_line(change)
        else:
            print(change_line(change), flush=True)
    failed = [
        document for document in latest.values() if document and document.status is DocumentStatus.FAILED
    ]
    return 1 if failed else 0


def change_line(change: Change) -> str:
    document = change.document
    if document is None:
        return f"{change.document_id}  DELETED"
    text = f"{local_moment(document.updated_at)}  {document.document_id}  {document.status:<9}"
    if document.progress is not None and not document.status.is_settled:
        text += f"  {document.progress.done}/{document.progress.total} {document.progress.unit}"
    if document.failure is not None:
        text += f"  {failure_line(document.failure)}"
    return f"{text}  {document.display_name}".rstrip()


def attempts(client: Readymark, options: argparse.Namespace) -> int:
    found = list(client.attempts(options.id))
    if options.json:
        print_json(found)
        return 0
    rows = [
        [
            str(attempt.number),
            attempt.outcome,
            attempt.last_stage,
            local_moment(attempt.started_at),
            local_moment(attempt.ended_at),
            attempt.worker,
            failure_line(attempt.failure) if attempt.failure else "",
        ]
        for attempt in found
    ]
    print_table(("NUMBER", "OUTCOME", "LAST STAGE", "STARTED", "ENDED", "WORKER", "FAILURE"), rows)
    return 0


def chunks(client: Readymark, options: argparse.Namespace) -> int:
    found = client.chunks(options.id, version=options.document_version)
    if options.json:
        print_json(list(found))
        return 0
    rows = [
        [str(chunk.ordinal), chunk.kind, str(chunk.token_count), str(chunk.locator), chunk.content]
        for chunk in found
    ]
    print_table(("ORDINAL", "KIND", "TOKENS", "LOCATOR", "CONTENT"), rows)
    return 0


def stats(client: Readymark, options: argparse.Namespace) -> int:
    found = client.stats(options.collection)
    if options.json:
        print_json(found)
        return 0
    oldest = found.oldest_pending_seconds
    print_fields(
        [
            ("documents", _counts(found.documents_by_status)),
            ("jobs", _counts(found.jobs_by_status)),
            ("oldest waiting", "none waits" if oldest is None else f"{oldest:.1f} s"),
            ("READY in the last minute", str(found.ready_last_minute)),
            ("busy workers", str(found.live_workers)),
            ("chunks served", str(found.served_chunks)),
        ]
    )
    return 0


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items()) if count) or "none"


def _show(document: Document, *, as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        print_document(document)
