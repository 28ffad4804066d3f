"""The statuses of documents and jobs, and THE TABLE of their joint transitions.

A transition names both statuses before and after, so "both change in one transaction"
(rule J11) cannot be said halfway. Every statement that changes a status takes its
before and after from this table (`repository/*.sql` through `sql_constants`), the
diagram in docs/lifecycle.md is printed from it, and tests check the rules on it.

A document's status here is that of one version; see the glossary in docs/architecture.md.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping


class DocumentStatus(enum.StrEnum):
    PENDING = "PENDING"
    PARSING = "PARSING"
    CHUNKING = "CHUNKING"
    EMBEDDING = "EMBEDDING"
    INDEXING = "INDEXING"
    READY = "READY"
    FAILED = "FAILED"


class JobStatus(enum.StrEnum):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


class Outcome(enum.StrEnum):
    """How an attempt ended (rule J16); RUNNING while it has not."""

    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    RETRY_LATER = "RETRY_LATER"
    FAILED = "FAILED"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    HANDED_BACK = "HANDED_BACK"
    CANCELLED = "CANCELLED"


class Guard(enum.StrEnum):
    """What must hold besides the statuses."""

    NOTHING = "nothing"
    LEASE_HELD = "the worker still holds the lease epoch"
    DUE_OR_EXPIRED = "due and attempts left, or the lease expired and attempts left"
    EXPIRED_AND_EXHAUSTED = "the lease expired and no attempts are left"
    EXPIRED = "the lease expired"


UNFINISHED = (
    DocumentStatus.PENDING,
    DocumentStatus.PARSING,
    DocumentStatus.CHUNKING,
    DocumentStatus.EMBEDDING,
    DocumentStatus.INDEXING,
)
STAGES = UNFINISHED[1:]
SETTLED = (DocumentStatus.READY, DocumentStatus.FAILED)
LIVE = (JobStatus.PENDING, JobStatus.RUNNING)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One row: the statuses of document and job before and after. Empty before = made by it."""

    name: str
    document_from: tuple[DocumentStatus, ...]
    document_to: DocumentStatus
    job_from: tuple[JobStatus, ...]
    job_to: JobStatus
    guard: Guard
    makes_job: bool = False
    """A new job row is made; `job_from` is what the previous one may be, it stays as history."""


D, J = DocumentStatus, JobStatus


def _row(
    name: str,
    document_from: tuple[DocumentStatus, ...],
    document_to: DocumentStatus,
    job_from: tuple[JobStatus, ...],
    job_to: JobStatus,
    guard: Guard,
    *,
    makes_job: bool = False,
) -> Transition:
    return Transition(
        name=name,
        document_from=document_from,
        document_to=document_to,
        job_from=job_from,
        job_to=job_to,
        guard=guard,
        makes_job=makes_job,
    )


SUBMIT = _row("SUBMIT", (), D.PENDING, (), J.PENDING, Guard.NOTHING, makes_job=True)
# From every unfinished status, since a worker may have died in any stage; PENDING again by rule J3.
CLAIM = _row("CLAIM", UNFINISHED, D.PENDING, LIVE, J.RUNNING, Guard.DUE_OR_EXPIRED)
PARSE = _row("PARSE", (D.PENDING,), D.PARSING, (J.RUNNING,), J.RUNNING, Guard.LEASE_HELD)
CHUNK = _row("CHUNK", (D.PARSING,), D.CHUNKING, (J.RUNNING,), J.RUNNING, Guard.LEASE_HELD)
# From PENDING when a valid snapshot makes parsing and chunking unnecessary (rule J17).
EMBED = _row("EMBED", (D.PENDING, D.CHUNKING), D.EMBEDDING, (J.RUNNING,), J.RUNNING, Guard.LEASE_HELD)
INDEX = _row("INDEX", (D.EMBEDDING,), D.INDEXING, (J.RUNNING,), J.RUNNING, Guard.LEASE_HELD)
PUBLISH = _row("PUBLISH", (D.INDEXING,), D.READY, (J.RUNNING,), J.SUCCEEDED, Guard.LEASE_HELD)
RETRY_LATER = _row("RETRY_LATER", UNFINISHED, D.PENDING, (J.RUNNING,), J.PENDING, Guard.LEASE_HELD)
GIVE_UP = _row("GIVE_UP", UNFINISHED, D.FAILED, (J.RUNNING,), J.FAILED, Guard.LEASE_HELD)
HAND_BACK = _row("HAND_BACK", UNFINISHED, D.PENDING, (J.RUNNING,), J.PENDING, Guard.LEASE_HELD)
CONVERGE_FAILED = _row(
    "CONVERGE_FAILED", UNFINISHED, D.FAILED, (J.RUNNING,), J.FAILED, Guard.EXPIRED_AND_EXHAUSTED
)
CONVERGE_READY = _row("CONVERGE_READY", (D.READY,), D.READY, (J.RUNNING,), J.SUCCEEDED, Guard.EXPIRED)
CANCEL = _row("CANCEL", UNFINISHED, D.FAILED, LIVE, J.FAILED, Guard.NOTHING)
RETRY_BY_HAND = _row(
    "RETRY_BY_HAND", (D.FAILED,), D.PENDING, (J.FAILED,), J.PENDING, Guard.NOTHING, makes_job=True
)

TRANSITIONS: tuple[Transition, ...] = (
    SUBMIT,
    CLAIM,
    PARSE,
    CHUNK,
    EMBED,
    INDEX,
    PUBLISH,
    RETRY_LATER,
    GIVE_UP,
    HAND_BACK,
    CONVERGE_FAILED,
    CONVERGE_READY,
    CANCEL,
    RETRY_BY_HAND,
)
STAGE_TRANSITIONS: Mapping[DocumentStatus, Transition] = {
    transition.document_to: transition for transition in (PARSE, CHUNK, EMBED, INDEX)
}

# Rule J11: the pairs any reader may see. READY with RUNNING only under an expired lease.
LEGAL_PAIRS: frozenset[tuple[DocumentStatus, JobStatus]] = frozenset(
    {(D.PENDING, J.PENDING), (D.READY, J.SUCCEEDED), (D.READY, J.RUNNING), (D.FAILED, J.FAILED)}
    | {(status, J.RUNNING) for status in UNFINISHED}
)


def steps() -> Iterator[tuple[Transition, DocumentStatus | None, JobStatus | None]]:
    """Yields each transition once for every legal pair that it may start from."""
    for transition in TRANSITIONS:
        for document in transition.document_from or (None,):
            for job in transition.job_from or (None,):
                if document is None or job is None or (document, job) in LEGAL_PAIRS:
                    yield transition, document, job


def sql_constants() -> dict[str, str]:
    """Returns what `repository/*.sql` may name in double braces, e.g. {{CLAIM.job_to}} = 'RUNNING'.

    Literals rather than parameters: with a parameter PostgreSQL cannot prove that a
    partial index applies once it has a generic plan.
    """
    constants = {"UNFINISHED": _sql_list(UNFINISHED), "LIVE": _sql_list(LIVE)}
    for transition in TRANSITIONS:
        constants[f"{transition.name}.document_from"] = _sql_list(transition.document_from)
        constants[f"{transition.name}.document_to"] = f"'{transition.document_to}'"
        constants[f"{transition.name}.job_from"] = _sql_list(transition.job_from)
        constants[f"{transition.name}.job_to"] = f"'{transition.job_to}'"
    for outcome in Outcome:
        constants[f"Outcome.{outcome}"] = f"'{outcome}'"
    return constants


def _sql_list(statuses: tuple[enum.StrEnum, ...]) -> str:
    return "(" + ", ".join(f"'{status}'" for status in statuses) + ")"


def as_markdown() -> str:
    """Returns the diagram and the table that docs/lifecycle.md holds between its marks."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> PENDING: SUBMIT"]
    for transition in TRANSITIONS:
        lines += [
            f"    {document} --> {transition.document_to}: {transition.name}"
            for document in transition.document_from
        ]
    lines += ["```", "", "| transition | document | job | holds only if |", "| --- | --- | --- | --- |"]
    for transition in TRANSITIONS:
        document = f"{_names(transition.document_from)} → {transition.document_to}"
        job = f"{_names(transition.job_from)} → {transition.job_to}"
        if transition.makes_job and transition.job_from:
            job += " (a new job)"
        lines.append(f"| {transition.name} | {document} | {job} | {transition.guard} |")
    return "\n".join(lines) + "\n"


def _names(statuses: tuple[enum.StrEnum, ...]) -> str:
    if statuses == UNFINISHED:
        return "any unfinished"
    return " / ".join(statuses) or "none"
