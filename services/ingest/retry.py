"""Decides what happens after a failed attempt: again later, or never; and what people read.

The only place that decides it (rules J8 to J10). Pure: no database, no clock.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from shared import messages
from shared.errors import InternalError, PermanentError, ReadymarkError

MAX_DELAY_SECONDS = 300.0
# Rule J9: jobs that failed together must not return together; a fifth is the most it may shorten.
JITTER_SHARE = 0.2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`delay_seconds` is None when there is no other attempt."""

    delay_seconds: float | None
    error_message: str
    failure: dict[str, Any]


def decide(
    error: Exception,
    *,
    attempt: int,
    max_attempts: int,
    retry_delay_seconds: float,
    trace_id: str,
    jitter: float | None = None,
) -> Decision:
    """Returns what to do about `error` of attempt number `attempt`.

    `jitter` is in [0, 1) and drawn when it is not given. Moments and the stage are added by the
    statement that stores the failure, since the clock is the database's.
    """
    known = error if isinstance(error, ReadymarkError) else InternalError("INTERNAL", trace_id=trace_id)
    is_retried = not is_permanent(error) and attempt < max_attempts
    failure = {
        "code": known.code,
        "reason": known.reason,
        "parameters": dict(known.parameters),
        "attempt": attempt,
        "max_attempts": max_attempts,
        "retryable": is_retried,
        "next_attempt_at": None,
    }
    if not is_retried:
        return Decision(delay_seconds=None, error_message=known.message(), failure=failure)
    delay = backoff_seconds(attempt, retry_delay_seconds, random.random() if jitter is None else jitter)
    if known.retry_after_seconds is not None:
        delay = max(delay, min(known.retry_after_seconds, MAX_DELAY_SECONDS))
    parameters = {"attempt": str(attempt), "max_attempts": str(max_attempts), "cause": known.message()}
    message = messages.render("WILL_BE_RETRIED", parameters)
    return Decision(delay_seconds=delay, error_message=message, failure=failure)


def is_permanent(error: Exception) -> bool:
    """True for InvalidDocumentError and ResourceNotFoundError; everything else may pass (rule J8)."""
    return isinstance(error, PermanentError)


def backoff_seconds(attempt: int, retry_delay_seconds: float, jitter: float) -> float:
    """Returns min(retry_delay * 2^(attempt - 1), 300 s), shortened by `jitter` in [0, 1) fifths (rule J9)."""
    # The exponent is capped: 2.0 ** 2000 does not fit a float.
    delay = min(retry_delay_seconds * 2.0 ** min(attempt - 1, 64), MAX_DELAY_SECONDS)
    return delay * (1.0 - JITTER_SHARE * jitter)
