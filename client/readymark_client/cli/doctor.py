"""`doctor`: checks each service the way a client meets it, and says what to do for each fault.

Owns the checks and the advice. Changes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
from collections.abc import Callable

import grpc

from readymark_client.cli.printing import print_json, print_table
from readymark_client.connection import client_version
from readymark_client.errors import NotFound, ReadymarkClientError
from readymark_client.synchronous import Readymark

# A due job that waits longer while nobody works means that no worker runs.
IDLE_QUEUE_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the answer; `advice` is empty when all is well."""

    subject: str
    ok: bool
    detail: str
    advice: str = ""


def doctor(client: Readymark, options: argparse.Namespace) -> int:
    versions = f"readymark {client_version()}, grpcio {grpc.__version__}, Python {platform.python_version()}"
    checks = [Check(subject="client", ok=True, detail=versions)]
    for service in ("ingest", "embedder", "search"):
        address = getattr(options, service)
        health = _health(client, service, address)
        checks.append(health)
        if health.ok:
            # What a service that does not serve would say next only hides the first fault.
            checks.append(_ask(service, FURTHER[service], client))
    healthy = all(check.ok for check in checks)
    if options.json:
        print_json({"healthy": healthy, "checks": checks})
    else:
        rows = [
            [check.subject, "ok" if check.ok else "FAULT", f"{check.detail} {check.advice}".rstrip()]
            for check in checks
        ]
        print_table(("SUBJECT", "RESULT", "DETAIL"), rows)
    return 0 if healthy else 1


def _health(client: Readymark, service: str, address: str) -> Check:
    try:
        state = client.health(service)
    except ReadymarkClientError as error:
        advice = f"Start it (`readymark up`), or give its address with --{service}."
        return Check(
            subject=service, ok=False, detail=f"does not answer at {address} [{error.reason}].", advice=advice
        )
    if state != "SERVING":
        advice = "It is starting, stopping, or misses something it needs: its log says what."
        return Check(subject=service, ok=False, detail=f"answers {state} at {address}.", advice=advice)
    return Check(subject=service, ok=True, detail=f"serving at {address}")


def _ask(service: str, further: Callable[[Readymark], Check], client: Readymark) -> Check:
    try:
        return further(client)
    except ReadymarkClientError as error:
        advice = ADVICE.get(error.reason, "The log of the service has the details.")
        return Check(subject=f"{service} call", ok=False, detail=str(error), advice=advice)


def _database(client: Readymark) -> Check:
    stats = client.stats()
    documents = sum(stats.documents_by_status.values())
    detail = f"answers; {documents} documents, {stats.served_chunks} chunks served"
    oldest = stats.oldest_pending_seconds
    if oldest is not None and oldest > IDLE_QUEUE_SECONDS and stats.live_workers == 0:
        return Check(
            subject="workers",
            ok=False,
            detail=f"a job has been due for {oldest:.0f} s and no worker holds one.",
            advice="Start workers (`python -m services.ingest work`), or look at their logs.",
        )
    return Check(subject="database", ok=True, detail=detail)


def _model(client: Readymark) -> Check:
    model = client.model()
    detail = f"{model.model_id}, {model.dimension} dimensions, fingerprint {model.fingerprint[:12]}"
    return Check(subject="model", ok=True, detail=f"{detail}, on {', '.join(model.execution_providers)}")


def _probe_search(client: Readymark) -> Check:
    try:
        found = client.search("readymark doctor", top_k=1)
    except NotFound:
        return Check(subject="search call", ok=True, detail="answers; collection default does not exist yet")
    if found.degraded_reasons:
        return Check(
            subject="search call",
            ok=False,
            detail=f"answers without some channels: {', '.join(found.degraded_reasons)}.",
            advice="Check that the embedder serves and that READYMARK_EMBEDDER_ADDRESS of search names it.",
        )
    return Check(subject="search call", ok=True, detail=f"answers; {found.candidate_count} chunks in default")


FURTHER = {"ingest": _database, "embedder": _model, "search": _probe_search}
ADVICE = {
    "DATABASE_UNAVAILABLE": "Check that PostgreSQL runs and that the service's database URL reaches it.",
    "EMBEDDER_UNAVAILABLE": "Check that the embedder runs and that READYMARK_EMBEDDER_ADDRESS names it.",
    "EMBEDDING_MODEL_MISMATCH": "Start the embedder with the model that the collection was built with.",
    "DEADLINE_EXCEEDED": "It is overloaded or hangs; look at its log.",
}
