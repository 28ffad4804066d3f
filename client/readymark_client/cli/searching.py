"""`search` and `model`: ask, and print hits with document, place and score."""

from __future__ import annotations

import argparse
import sys

from readymark_client.cli.printing import print_fields, print_json, print_table
from readymark_client.synchronous import Readymark
from readymark_client.values import Hit


def search(client: Readymark, options: argparse.Namespace) -> int:
    found = client.search(
        options.query,
        options.collection,
        top_k=options.top_k,
        mode=options.mode,
        documents=options.document,
        explain=options.explain,
    )
    for reason in found.degraded_reasons:
        print(f"The answer is incomplete: {reason}.", file=sys.stderr)
    if options.json:
        print_json(found)
        return 0
    if not found.hits:
        print(f"No hit among {found.candidate_count} chunks.", file=sys.stderr)
    header = ["RANK", "SCORE", "DOCUMENT", "LOCATOR", "CONTENT"]
    if options.explain:
        header[2:2] = ["VECTOR", "KEYWORD"]
    rows = [_row(rank, hit, explain=options.explain) for rank, hit in enumerate(found.hits, start=1)]
    print_table(header, rows)
    return 0


def _row(rank: int, hit: Hit, *, explain: bool) -> list[str]:
    row = [
        str(rank),
        f"{hit.score:.4f}",
        hit.display_name or hit.document_id,
        str(hit.locator),
        hit.content,
    ]
    if explain:
        row[2:2] = [
            _channel(hit.vector_rank, hit.vector_score),
            _channel(hit.keyword_rank, hit.keyword_score),
        ]
    return row


def _channel(rank: int | None, score: float | None) -> str:
    return "-" if rank is None or score is None else f"#{rank} {score:.3f}"


def model(client: Readymark, options: argparse.Namespace) -> int:
    found = client.model()
    if options.json:
        print_json(found)
        return 0
    print_fields(
        [
            ("model", found.model_id),
            ("fingerprint", found.fingerprint),
            ("dimension", str(found.dimension)),
            ("tokens of one input", str(found.max_input_tokens)),
            ("inputs of one call", str(found.max_batch_inputs)),
            ("bytes of one call", f"{found.max_batch_bytes:,}"),
            ("pooling", f"{found.pooling}{', normalised' if found.normalized else ''}"),
            ("query prefix", repr(found.query_prefix) if found.query_prefix else ""),
            ("document prefix", repr(found.document_prefix) if found.document_prefix else ""),
            ("runs on", ", ".join(found.execution_providers)),
        ]
    )
    return 0
