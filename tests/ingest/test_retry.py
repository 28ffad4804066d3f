"""Rules J8, J9 and J10 as a pure decision."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingest import retry
from shared import errors
from shared.errors import InvalidDocumentError, OverloadedError, ResourceNotFoundError


def decide(
    error: Exception, attempt: int = 1, max_attempts: int = 3, delay: float = 10.0, jitter: float = 0.0
) -> retry.Decision:
    return retry.decide(
        error,
        attempt=attempt,
        max_attempts=max_attempts,
        retry_delay_seconds=delay,
        trace_id="0af7651916cd43dd8448eb211c80319c",
        jitter=jitter,
    )


def test_j8_only_the_two_permanent_errors_end_a_job_at_once() -> None:
    permanent = {leaf for leaf in errors.LEAVES if decide(leaf("INTERNAL")).delay_seconds is None}
    assert permanent == {InvalidDocumentError, ResourceNotFoundError}


@pytest.mark.parametrize("error", [RuntimeError("boom"), OSError(28, "disk"), MemoryError(), KeyError("x")])
def test_j8_any_other_exception_is_tried_again(error: Exception) -> None:
    decision = decide(error)
    assert decision.delay_seconds is not None
    assert decision.failure["retryable"] is True
    assert decision.error_message.startswith("Attempt 1 of 3 failed for now and will be retried: ")


def test_j8_the_last_attempt_is_not_retried() -> None:
    assert decide(RuntimeError("boom"), attempt=2).delay_seconds is not None
    last = decide(RuntimeError("boom"), attempt=3)
    assert last.delay_seconds is None
    assert last.failure["retryable"] is False


@pytest.mark.parametrize(
    ("attempt", "delay", "expected"),
    [(1, 10, 10), (2, 10, 20), (3, 10, 40), (6, 10, 300), (5000, 10, 300), (1, 0, 0)],
)
def test_j9_the_delay_doubles_up_to_five_minutes(attempt: int, delay: float, expected: float) -> None:
    assert retry.backoff_seconds(attempt, delay, jitter=0.0) == expected


@given(
    attempt=st.integers(1, 10_000),
    delay=st.floats(0, 1e6, allow_nan=False),
    jitter=st.floats(0, 1, exclude_max=True),
)
def test_j9_jitter_shortens_by_at_most_a_fifth_and_never_lengthens(
    attempt: int, delay: float, jitter: float
) -> None:
    full = retry.backoff_seconds(attempt, delay, 0.0)
    assert full == min(delay * 2.0 ** min(attempt - 1, 64), 300.0)
    assert 0.8 * full <= retry.backoff_seconds(attempt, delay, jitter) <= full


def test_j9_jobs_that_failed_together_do_not_return_together() -> None:
    drawn = [
        retry.decide(
            RuntimeError(), attempt=9, max_attempts=99, retry_delay_seconds=10, trace_id="t"
        ).delay_seconds
        for _ in range(1000)
    ]
    assert all(value is not None and 240 <= value <= 300 for value in drawn)
    buckets = [
        sum(1 for value in drawn if value is not None and int(value) == second) for second in range(240, 301)
    ]
    # 60 buckets of a second would hold 1.7 % each; a herd holds 100 % in one.
    assert max(buckets) < 50


def test_a_push_back_of_the_embedder_is_never_undercut() -> None:
    error = OverloadedError("EMBEDDER_OVERLOADED", retry_after_seconds=45)
    assert decide(error, delay=1, jitter=0.99).delay_seconds == 45


def test_j10_an_unforeseen_error_shows_nothing_of_its_text() -> None:
    secret = "postgresql://user:hunter2@db.internal/x /srv/app/worker.py SELECT * FROM jobs"
    for attempt in (1, 3):
        decision = decide(RuntimeError(secret), attempt=attempt)
        shown = decision.error_message + str(decision.failure)
        for part in secret.split():
            assert part not in shown
        assert "0af7651916cd43dd8448eb211c80319c" in shown


def test_j10_a_known_error_keeps_its_sentence_and_reason() -> None:
    decision = decide(InvalidDocumentError("PASSWORD_PROTECTED", file_type="PDF"))
    assert decision.error_message == "The PDF is protected by a password; upload it without one."
    assert decision.failure["code"] == "INVALID_DOCUMENT"
    assert decision.failure["reason"] == "PASSWORD_PROTECTED"
    assert decision.failure["parameters"] == {"file_type": "PDF"}


def test_the_decision_needs_no_clock_and_no_database() -> None:
    source = inspect.getsource(retry)
    assert "datetime" not in source
    assert "import time" not in source
