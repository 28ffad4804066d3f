"""`submit`: files and folders in, documents out; one bad file does not stop the others.

Owns walking, the progress line and the collected answer. Uploads go one after another:
the service, not the line, is what takes time.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from readymark_client.cli.printing import cut, failure_line, print_error, print_json, print_table
from readymark_client.errors import DeadlineExceeded, ReadymarkClientError, ServiceUnreachable
from readymark_client.synchronous import Readymark
from readymark_client.values import Document, DocumentStatus

DEFAULT_COLUMNS = 80


@dataclasses.dataclass(slots=True)
class Outcome:
    """What became of one path."""

    path: Path
    document: Document | None = None
    error: ReadymarkClientError | None = None
    already_existed: bool = False


def submit(client: Readymark, options: argparse.Namespace) -> int:
    paths = list(_walk(options.paths))
    if (options.source_key or options.request_id) and (
        len(options.paths) != 1 or Path(options.paths[0]).is_dir()
    ):
        options.usage("--source-key and --request-id name one document: give exactly one file")
    line = ProgressLine(enabled=sys.stderr.isatty() and not options.quiet)
    outcomes = []
    for number, path in enumerate(paths, start=1):
        outcome = _submit_one(client, options, path, line, f"[{number}/{len(paths)}]")
        outcomes.append(outcome)
        if isinstance(outcome.error, ServiceUnreachable):
            # The others would each wait for the same nothing.
            break
    if options.wait:
        _wait(client, options, outcomes, line)
    line.clear()
    _report(outcomes, options)
    return _exit_code(outcomes)


def _walk(arguments: list[str]) -> Iterator[Path]:
    """Yields the files of the arguments, folders walked in order of name, hidden files left out."""
    for argument in arguments:
        path = Path(argument)
        if not path.is_dir():
            yield path
            continue
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from (Path(folder) / name for name in sorted(files) if not name.startswith("."))


def _submit_one(
    client: Readymark, options: argparse.Namespace, path: Path, line: ProgressLine, counter: str
) -> Outcome:
    def on_sent(sent_bytes: int, total_bytes: int) -> None:
        line.show(f"{counter} {path.name} {bar(sent_bytes, total_bytes)} sent")

    outcome = Outcome(path)
    line.show(f"{counter} {path.name}")
    try:
        outcome.document = client.submit(
            path,
            options.collection,
            source_key=options.source_key,
            metadata=dict(options.metadata),
            on_duplicate=options.on_duplicate,
            request_id=options.request_id,
            on_sent=on_sent,
        )
        outcome.already_existed = outcome.document.already_existed
    except ReadymarkClientError as error:
        outcome.error = error
        line.clear()
        print_error(error, str(path))
    return outcome


def _wait(
    client: Readymark, options: argparse.Namespace, outcomes: list[Outcome], line: ProgressLine
) -> None:
    """Follows the accepted documents until they settle; an outcome's document is its latest state."""
    waiting: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.document is not None:
            waiting.setdefault(outcome.document.document_id, []).append(outcome)
    ids = list(waiting)
    settled: set[str] = set()
    try:
        for start in range(0, len(ids), 1000):
            for change in client.watch(
                ids[start : start + 1000], until_settled=True, timeout_seconds=options.wait_timeout
            ):
                for outcome in waiting.get(change.document_id, ()):
                    outcome.document = change.document
                if change.document is None or change.document.status.is_settled:
                    settled.add(change.document_id)
                line.show(f"{bar(len(settled), len(ids))} settled  {_moving(waiting)}")
    except DeadlineExceeded as error:
        for document_id in ids:
            for outcome in waiting[document_id]:
                if document_id not in settled:
                    outcome.error = error
        line.clear()
        print_error(error)


def _moving(waiting: dict[str, list[Outcome]]) -> str:
    for outcomes in waiting.values():
        document = outcomes[0].document
        if document is not None and not document.status.is_settled:
            progress = document.progress
            counted = f" {progress.done}/{progress.total} {progress.unit}" if progress else ""
            return f"{document.display_name} {document.status}{counted}"
    return ""


def _report(outcomes: list[Outcome], options: argparse.Namespace) -> None:
    if options.json:
        print_json(
            [
                {
                    "path": str(outcome.path),
                    "created": outcome.document is not None and not outcome.already_existed,
                    "document": outcome.document,
                    "error": _error_json(outcome.error),
                }
                for outcome in outcomes
            ]
        )
        return
    rows = []
    for outcome in outcomes:
        document = outcome.document
        if document is None:
            continue
        note = failure_line(document.failure) if document.failure else ""
        if outcome.already_existed:
            note = f"was there already {note}".rstrip()
        rows.append([document.document_id, document.status.value, str(outcome.path), note])
    print_table(("ID", "STATUS", "PATH", "NOTE"), rows)


def _error_json(error: ReadymarkClientError | None) -> dict[str, object] | None:
    if error is None:
        return None
    return {
        "code": error.code,
        "reason": error.reason,
        "message": error.message,
        "parameters": dict(error.parameters),
    }


def _exit_code(outcomes: list[Outcome]) -> int:
    if any(isinstance(outcome.error, ServiceUnreachable) for outcome in outcomes):
        return 3
    bad = [
        outcome
        for outcome in outcomes
        if outcome.error is not None
        or outcome.document is None
        or outcome.document.status is DocumentStatus.FAILED
    ]
    return 1 if bad else 0


class ProgressLine:
    """One line on a terminal's stderr that is written over; silent elsewhere."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def show(self, text: str) -> None:
        if self._enabled:
            # A terminal that does not know its width says 0.
            width = os.get_terminal_size(sys.stderr.fileno()).columns or DEFAULT_COLUMNS
            sys.stderr.write(f"\r\x1b[2K{cut(text, width - 1)}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._enabled:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


def bar(done: int, total: int, width: int = 20) -> str:
    """Returns a bar such as `[#####-----] 50 %`; an unknown total counts as done."""
    share = min(done / total, 1.0) if total > 0 else 1.0
    filled = int(share * width)
    return f"[{'#' * filled}{'-' * (width - filled)}] {share * 100:3.0f} %"
