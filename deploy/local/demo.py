"""`python -m deploy.local.demo --data DIR`: the main job once, end to end, as `make run` shows it.

Starts the local stack on free ports (or uses the one that runs on the folder), submits the
samples, follows them to READY, asks two questions and checks that the right document answers.
Exit code 1 when a sample is not READY or a question is not answered by its document.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from readymark_client import Document, DocumentStatus, Readymark, ReadymarkClientError

from deploy.local.data_folder import DataFolder, default_data_dir, process_lives

SAMPLES = Path(__file__).parent / "samples"
COLLECTION = "samples"
WAIT_SECONDS = 300.0
STOP_SECONDS = 180.0
TOP_K = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    text: str
    answered_by: str
    """File name of the sample that has to come first."""


QUESTIONS = (
    Question("How many vacation days do I get?", "leave-policy.md"),
    Question("连接池的默认上限是多少？", "connection-pool.zh.txt"),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.local.demo", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", default=default_data_dir())
    folder = DataFolder(parser.parse_args().data)
    state = folder.read_state()
    if state is not None and process_lives(int(state["pid"])):
        print(f"A stack runs on {folder.path} already; the samples go there.")
        return _show(folder, state["addresses"])
    free_ports = [word for service in ("ingest", "embedder", "search") for word in (f"--{service}-port", "0")]
    stack = subprocess.Popen(
        [sys.executable, "-m", "deploy.local.stack", "up", "--data", str(folder.path), *free_ports],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        addresses = _await_ready(stack)
        if addresses is None:
            return stack.wait() or 1
        exit_code = _show(folder, addresses)
    finally:
        exit_of_stack = _stop(stack)
    return exit_code or exit_of_stack


def _await_ready(stack: subprocess.Popen[str]) -> dict[str, str] | None:
    assert stack.stdout is not None
    words = stack.stdout.readline().split()
    if words[:1] != ["ready"]:
        return None
    return dict(word.split("=", 1) for word in words[1:])


def _stop(stack: subprocess.Popen[str]) -> int:
    if stack.poll() is None:
        stack.send_signal(signal.SIGTERM)
    return stack.wait(STOP_SECONDS)


def _show(folder: DataFolder, addresses: Mapping[str, str]) -> int:
    try:
        with Readymark(addresses["ingest"], addresses["search"], addresses["embedder"]) as client:
            model = client.model()
            print(f"\nModel {model.model_id}, {model.dimension} dimensions.\n\nSubmitting the samples:")
            ready = _ingest(client)
            answered = [_ask(client, question) for question in QUESTIONS]
    except ReadymarkClientError as error:
        print(error, file=sys.stderr)
        return 1
    command = _command()
    print(
        f"\nThe data stays in {folder.path}. Go on with:\n"
        f"  {command} up --data {folder.path} --detach\n"
        f"  {command} submit YOUR_FILES --collection {COLLECTION} --wait\n"
        f"  {command} search 'your question' --collection {COLLECTION}\n"
        f"  {command} down --data {folder.path}\n"
    )
    return 0 if ready and all(answered) else 1


def _command() -> str:
    """Returns how the reader calls `readymark` from where they stand."""
    beside = Path(sys.executable).with_name("readymark")
    with contextlib.suppress(ValueError):
        return str(beside.relative_to(Path.cwd()))
    return str(beside)


def _ingest(client: Readymark) -> bool:
    """Submits every sample and prints each change; returns whether all are READY."""
    documents: dict[str, Document] = {}
    started_at = time.monotonic()
    for path in sorted(path for path in SAMPLES.iterdir() if path.is_file()):
        document = client.submit(path, COLLECTION, source_key=f"samples/{path.name}")
        note = "was there already" if document.already_existed else f"{document.size_bytes:,} bytes"
        if document.status is DocumentStatus.FAILED:
            document, note = client.retry(document.document_id), "had failed before, is retried"
        documents[document.document_id] = document
        print(f"  {document.display_name:<24} {document.status:<9} {note}", flush=True)
    unsettled = [document.document_id for document in documents.values() if not document.status.is_settled]
    if unsettled:
        print("\nFollowing them:")
        for change in client.watch(unsettled, until_settled=True, timeout_seconds=WAIT_SECONDS):
            if change.document is not None:
                documents[change.document_id] = change.document
                _print_change(change.document, time.monotonic() - started_at)
    return all(document.status is DocumentStatus.READY for document in documents.values())


def _print_change(document: Document, seconds: float) -> None:
    text = f"  {seconds:5.1f} s  {document.display_name:<24} {document.status:<9}"
    if document.status is DocumentStatus.READY:
        text += f" {document.chunk_count} chunks, {document.token_count} tokens"
    elif document.failure is not None:
        text += f" {document.failure.message} [{document.failure.code}: {document.failure.reason}]"
    print(text.rstrip(), flush=True)


def _ask(client: Readymark, question: Question) -> bool:
    """Prints the hits; returns whether the right document comes first, by both channels."""
    found = client.search(question.text, COLLECTION, top_k=TOP_K)
    milliseconds = sum(found.stage_seconds.values()) * 1000
    print(f"\nSearch: {question.text}   ({found.applied_mode}, {milliseconds:.0f} ms)")
    for reason in found.degraded_reasons:
        print(f"  incomplete: {reason}")
    for rank, hit in enumerate(found.hits, start=1):
        print(f"  {rank}. {hit.score:.4f}  {hit.display_name} | {hit.locator}")
        print(f"     {' '.join(hit.content.split())[:110]}")
    right = bool(found.hits) and found.hits[0].display_name == question.answered_by
    if not right:
        print(f"  expected first: {question.answered_by}", file=sys.stderr)
    return right and not found.degraded_reasons


if __name__ == "__main__":
    sys.exit(main())
