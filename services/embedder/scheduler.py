"""Admission and computation: who may wait, for how long, and the threads that compute.

Owns the worker threads and the promise to every caller: an answer, or a refusal at once. Bounded
by tokens; a caller who could not be served within its deadline is refused before it waits; work
that nobody waits for any more is taken out unseen. One bad text fails alone. Knows no gRPC, no
tokenizer and no ONNX.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from services.embedder.lanes import Lane, Lanes
from services.embedder.pooling import Vectors, usable_rows
from services.embedder.tokenizing import TokenIds
from shared.errors import (
    DeadlineExceededError,
    DependencyUnavailableError,
    InvalidArgumentError,
    OverloadedError,
    ReadymarkError,
)
from shared.telemetry import log_event

log = logging.getLogger(__name__)

Encode = Callable[[Sequence[TokenIds]], Vectors]

MIN_RETRY_SECONDS = 0.05
MAX_RETRY_SECONDS = 30.0
RATE_MEMORY = 0.95
"""Weight of the past in the measured rate, a batch: about the last twenty batches count."""


@dataclasses.dataclass(frozen=True, slots=True)
class Computed:
    """The vectors of one call, in the order of its texts."""

    vectors: Vectors
    queue_seconds: float
    compute_seconds: float


class _Call:
    """One caller and what it still waits for."""

    def __init__(self, future: asyncio.Future[None], count: int, dimension: int) -> None:
        self.future = future
        self.vectors = np.empty((count, dimension), np.float32)
        self.remaining = count
        self.texts: list[_Text] = []
        self.submitted_at = time.monotonic()
        self.started_at: float | None = None
        self.finished_at = 0.0
        self.error: ReadymarkError | None = None


@dataclasses.dataclass(eq=False, slots=True)
class _Text:
    """One text in flight. Several calls, or one call several times, may wait for it."""

    key: tuple[Lane, bytes]
    ids: TokenIds
    waiters: list[tuple[_Call, int]] = dataclasses.field(default_factory=list)
    """Call and index in the call."""

    @property
    def token_count(self) -> int:
        return len(self.ids)


class Scheduler:
    """One model's worker threads. Belongs to the event loop that called `start`."""

    def __init__(
        self,
        encode: Encode,
        *,
        dimension: int,
        probe: TokenIds,
        workers: int,
        batch_tokens: int,
        batch_rows: int,
        max_queued_tokens: int,
    ) -> None:
        """`probe` is a text that every working model can compute; it tells a bad text from a broken model."""
        self._encode = encode
        self._dimension = dimension
        self._probe = probe
        self._workers = workers
        self._max_queued_tokens = max_queued_tokens
        self._lanes: Lanes[_Text] = Lanes(batch_tokens=batch_tokens, batch_rows=batch_rows)
        self._texts: dict[tuple[Lane, bytes], _Text] = {}
        self._running_tokens = 0
        self._measured_tokens = 0.0
        self._measured_seconds = 0.0
        self._closing = False
        self._broken = False
        # Guards everything above. Held for microseconds; never while the model computes.
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self.broken = asyncio.Event()
        """Set when the model does not compute any more; nothing is accepted from then on."""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        for number in range(self._workers):
            thread = threading.Thread(target=self._work, name=f"encoder-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    async def close(self) -> None:
        """Finishes what was accepted, then ends the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def queued_tokens(self, lane: Lane) -> int:
        with self._changed:
            return self._lanes.tokens(lane)

    async def embed(
        self, rows: Sequence[TokenIds], lane: Lane, *, timeout_seconds: float | None = None
    ) -> Computed:
        """Returns the vectors of `rows`; raises a ReadymarkError at once when that is not to be hoped for.

        The caller enforces its deadline by cancelling; its texts then leave the queue.
        """
        call = _Call(self._loop.create_future(), len(rows), self._dimension)
        with self._changed:
            self._admit(sum(len(row) for row in rows), lane, timeout_seconds)
            for index, row in enumerate(rows):
                self._enqueue(call, index, row, lane)
            self._changed.notify(len(rows))
        try:
            await call.future
        finally:
            with self._changed:
                self._leave(call)
        if call.error is not None:
            raise call.error
        started_at = call.started_at or call.submitted_at
        return Computed(call.vectors, started_at - call.submitted_at, call.finished_at - started_at)

    # Callers hold the lock in everything from here to the threads.

    def _admit(self, tokens: int, lane: Lane, timeout_seconds: float | None) -> None:
        """Raises when the texts would wait too long. A bound for each lane: bulk never shuts out queries."""
        if self._broken:
            raise DependencyUnavailableError("EMBEDDER_UNAVAILABLE")
        if self._closing:
            raise DependencyUnavailableError("SHUTTING_DOWN")
        ahead = self._lanes.tokens(Lane.QUERY)
        if lane is Lane.DOCUMENT:
            ahead += self._lanes.tokens(Lane.DOCUMENT)
        # An idle embedder accepts anything within the limits of a call: a rate that was measured
        # while the machine stood still could otherwise refuse work for ever.
        if ahead + self._running_tokens == 0:
            return
        rate = self._tokens_per_second()
        waiting = self._lanes.tokens(lane)
        if waiting and waiting + tokens > self._max_queued_tokens:
            excess = waiting + tokens - self._max_queued_tokens
            raise _overloaded(excess / rate)
        if timeout_seconds is None:
            return
        if tokens / rate > timeout_seconds:
            raise DeadlineExceededError("DEADLINE_EXCEEDED")
        if (ahead + tokens) / rate > timeout_seconds:
            raise _overloaded(ahead / rate)

    def _tokens_per_second(self) -> float:
        """Returns the measured rate of all workers together; infinite until a batch was measured."""
        if self._measured_seconds == 0:
            return float("inf")
        return self._workers * self._measured_tokens / self._measured_seconds

    def _enqueue(self, call: _Call, index: int, row: TokenIds, lane: Lane) -> None:
        key = (lane, row.tobytes())
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = _Text(key, row)
            self._lanes.add(text, lane)
        text.waiters.append((call, index))
        call.texts.append(text)

    def _leave(self, call: _Call) -> None:
        """Takes the call out of all it waits for, and texts that nobody else waits for out of the queue."""
        for text in call.texts:
            text.waiters = [waiter for waiter in text.waiters if waiter[0] is not call]
            if not text.waiters:
                self._lanes.discard(text, text.key[0])
                if self._texts.get(text.key) is text:
                    del self._texts[text.key]
        call.texts.clear()

    # The threads.

    def _work(self) -> None:
        try:
            while batch := self._next_batch():
                started_at = time.monotonic()
                rows = self._compute(batch)
                self._finish(batch, rows, time.monotonic() - started_at)
        except Exception:
            # Whatever it is, the model or this code is broken; silence would leave callers hanging.
            log.exception("embedder broken")
            self._break()

    def _next_batch(self) -> list[_Text]:
        """Waits for work; returns an empty list when it is time to end."""
        with self._changed:
            while True:
                if self._broken:
                    return []
                batch = self._lanes.take_batch()
                if batch:
                    break
                if self._closing:
                    return []
                self._changed.wait()
            started_at = time.monotonic()
            self._running_tokens += sum(text.token_count for text in batch)
            for text in batch:
                for call, _ in text.waiters:
                    call.started_at = call.started_at or started_at
        return batch

    def _compute(self, batch: Sequence[_Text]) -> list[Vectors | None]:
        """Returns a vector for each text, or None where the text alone gives no usable one."""
        try:
            vectors = self._encode([text.ids for text in batch])
        except Exception as error:  # noqa: BLE001 - which row is to blame shows when each runs alone
            log_event(log, "batch failed", logging.WARNING, rows=len(batch), cause=type(error).__name__)
            return [self._compute_alone(text) for text in batch]
        usable = usable_rows(vectors)
        if usable.all():
            return list(vectors)
        return [
            vectors[index] if usable[index] else self._compute_alone(text) for index, text in enumerate(batch)
        ]

    def _compute_alone(self, text: _Text) -> Vectors | None:
        """Returns the vector, or None for a bad text; raises when the model fails with a good text too."""
        try:
            vectors = self._encode([text.ids])
            if usable_rows(vectors).all():
                return vectors.reshape(-1)
        except Exception as error:  # noqa: BLE001 - the probe decides whether the text or the model is at fault
            log_event(log, "text failed", logging.WARNING, tokens=len(text.ids), cause=type(error).__name__)
        if not usable_rows(self._encode([self._probe])).all():
            raise RuntimeError("the model gives no usable vector for its probe")
        return None

    def _finish(self, batch: Sequence[_Text], rows: Sequence[Vectors | None], seconds: float) -> None:
        done: list[_Call] = []
        with self._changed:
            tokens = sum(text.token_count for text in batch)
            self._running_tokens -= tokens
            self._measured_tokens = self._measured_tokens * RATE_MEMORY + tokens
            self._measured_seconds = self._measured_seconds * RATE_MEMORY + seconds
            for text, row in zip(batch, rows, strict=True):
                if self._texts.get(text.key) is text:
                    del self._texts[text.key]
                for call, index in text.waiters:
                    if row is None:
                        call.error = InvalidArgumentError(
                            "VECTOR_INVALID", field=f"inputs[{index}]", index=index
                        )
                    else:
                        call.vectors[index] = row
                    call.remaining -= 1
                    if call.remaining == 0 or row is None:
                        call.finished_at = time.monotonic()
                        done.append(call)
        if done:
            self._loop.call_soon_threadsafe(_resolve, done)

    def _break(self) -> None:
        """Fails every call that waits; called once the model is known not to work."""
        with self._changed:
            self._broken = True
            self._lanes.clear()
            calls = {call for text in self._texts.values() for call, _ in text.waiters}
            self._texts.clear()
            for call in calls:
                call.error = DependencyUnavailableError("EMBEDDER_UNAVAILABLE")
            self._changed.notify_all()
        self._loop.call_soon_threadsafe(_resolve, list(calls))
        self._loop.call_soon_threadsafe(self.broken.set)


def _resolve(calls: Sequence[_Call]) -> None:
    for call in calls:
        if not call.future.done():
            call.future.set_result(None)


def _overloaded(wait_seconds: float) -> OverloadedError:
    seconds = min(max(wait_seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
    return OverloadedError("EMBEDDER_OVERLOADED", retry_after_seconds=seconds)
