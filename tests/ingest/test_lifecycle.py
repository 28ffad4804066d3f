"""The table of transitions, by itself: what rules D1, D2, J7, J8, J10, J11, J12, J13, J17, J18 say of it."""

from __future__ import annotations

import re
from pathlib import Path

from services.ingest import lifecycle
from services.ingest.lifecycle import (
    LEGAL_PAIRS,
    LIVE,
    SETTLED,
    STAGES,
    TRANSITIONS,
    UNFINISHED,
    DocumentStatus,
    Guard,
    JobStatus,
)


def test_d1_only_publish_and_convergence_lead_to_ready_and_only_from_indexing() -> None:
    to_ready = [row for row in TRANSITIONS if row.document_to is DocumentStatus.READY]
    assert {row.name for row in to_ready} == {"PUBLISH", "CONVERGE_READY"}
    assert lifecycle.PUBLISH.document_from == (DocumentStatus.INDEXING,)
    # Convergence does not make a document READY, it finds it so.
    assert lifecycle.CONVERGE_READY.document_from == (DocumentStatus.READY,)


def test_d1_the_stages_come_in_one_order() -> None:
    order = [DocumentStatus.PENDING, *STAGES]
    for stage, transition in lifecycle.STAGE_TRANSITIONS.items():
        before = order[order.index(stage) - 1]
        assert before in transition.document_from
        allowed = {before, DocumentStatus.PENDING} if stage is DocumentStatus.EMBEDDING else {before}
        assert set(transition.document_from) == allowed


def test_j7_success_is_ready_and_succeeded_together() -> None:
    assert (lifecycle.PUBLISH.document_to, lifecycle.PUBLISH.job_to) == (
        DocumentStatus.READY,
        JobStatus.SUCCEEDED,
    )


def test_j11_every_transition_leads_from_legal_pairs_to_a_legal_pair() -> None:
    for transition, document, job in lifecycle.steps():
        assert (transition.document_to, transition.job_to) in LEGAL_PAIRS, transition.name
        if document is not None and job is not None:
            assert (document, job) in LEGAL_PAIRS


def test_j11_the_legal_pairs_are_those_of_the_spec() -> None:
    spec = {("PENDING", "PENDING"), ("READY", "SUCCEEDED"), ("FAILED", "FAILED"), ("READY", "RUNNING")}
    spec |= {(status, "RUNNING") for status in ("PENDING", "PARSING", "CHUNKING", "EMBEDDING", "INDEXING")}
    assert {(str(document), str(job)) for document, job in LEGAL_PAIRS} == spec


def test_j12_nothing_is_stuck_every_legal_pair_reaches_a_settled_document() -> None:
    reachable = {pair: {pair} for pair in LEGAL_PAIRS}
    for _ in LEGAL_PAIRS:
        for transition, document, job in lifecycle.steps():
            if document is not None and job is not None:
                reachable[document, job] |= reachable[transition.document_to, transition.job_to]
    for pair, ends in reachable.items():
        assert any(document in SETTLED and job not in LIVE for document, job in ends), pair


def test_every_legal_pair_but_the_crash_window_is_reached_from_a_submission() -> None:
    reached = {(lifecycle.SUBMIT.document_to, lifecycle.SUBMIT.job_to)}
    for _ in LEGAL_PAIRS:
        for transition, document, job in lifecycle.steps():
            if (document, job) in reached:
                reached.add((transition.document_to, transition.job_to))
    assert reached == LEGAL_PAIRS - {(DocumentStatus.READY, JobStatus.RUNNING)}


def test_d3_nothing_leaves_ready() -> None:
    leaving = [row.name for row in TRANSITIONS if DocumentStatus.READY in row.document_from]
    assert leaving == ["CONVERGE_READY"]


def test_a_finished_job_is_never_changed_only_followed_by_a_new_one() -> None:
    for row in TRANSITIONS:
        if any(status not in LIVE for status in row.job_from):
            assert row.makes_job, row.name


def test_j14_every_transition_of_a_worker_needs_the_lease() -> None:
    by_worker = {
        "PARSE",
        "CHUNK",
        "EMBED",
        "INDEX",
        "PUBLISH",
        "RETRY_LATER",
        "GIVE_UP",
        "HAND_BACK",
    }
    assert {row.name for row in TRANSITIONS if row.guard is Guard.LEASE_HELD} == by_worker


def test_j8_j10_j15_j18_every_unfinished_document_can_fail_be_retried_handed_back_and_cancelled() -> None:
    for row in (lifecycle.RETRY_LATER, lifecycle.GIVE_UP, lifecycle.HAND_BACK, lifecycle.CANCEL):
        assert row.document_from == UNFINISHED, row.name


def test_the_diagram_in_the_documentation_is_printed_from_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "lifecycle.md").read_text(encoding="utf-8")
    match = re.search(r"<!-- table -->\n(.*)<!-- /table -->", text, re.DOTALL)
    assert match is not None
    assert match.group(1) == lifecycle.as_markdown()
