"""The scheduler with computations that a test can hold, count and break."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from services.embedder.lanes import Lane
from services.embedder.pooling import Vectors
from services.embedder.scheduler import Scheduler
from services.embedder.tokenizing import TokenIds
from shared.errors import (
    DeadlineExceededError,
    DependencyUnavailableError,
    InvalidArgumentError,
    OverloadedError,
)

BAD = 666
"""A token that makes a text fail."""
PROBE = np.array([1], np.int64)


def row(length: int, first: int = 7) -> TokenIds:
    return np.array([first, *range(2, length + 1)], np.int64)


class Computation:
    """Stands where the model stands. A row's vector points to its first token modulo 8."""

    def __init__(self) -> None:
        self.batches: list[list[TokenIds]] = []
        self.started = threading.Semaphore(0)
        self.allowed = threading.Semaphore(1_000_000)
        self.fail: Callable[[Sequence[TokenIds]], bool] = lambda rows: False
        self.nan_for_bad = False

    def hold(self) -> None:
        """From now on each batch waits for `allowed.release()`."""
        self.allowed = threading.Semaphore(0)

    def release_all(self) -> None:
        self.allowed.release(1_000_000)

    def __call__(self, rows: Sequence[TokenIds]) -> Vectors:
        self.batches.append(list(rows))
        self.started.release()
        self.allowed.acquire()
        if self.fail(rows):
            raise RuntimeError("as asked")
        vectors = np.zeros((len(rows), 8), np.float32)
        for index, ids in enumerate(rows):
            vectors[index, ids[0] % 8] = np.nan if self.nan_for_bad and BAD in ids else 1
        return vectors


@asynccontextmanager
async def running(compute: Computation, *, workers: int = 1, **limits: int) -> AsyncIterator[Scheduler]:
    limits = {"batch_tokens": 512, "batch_rows": 32, "max_queued_tokens": 100_000, **limits}
    scheduler = Scheduler(compute, dimension=8, probe=PROBE, workers=workers, **limits)
    scheduler.start()
    try:
        yield scheduler
    finally:
        compute.release_all()
        await scheduler.close()


async def until_started(compute: Computation) -> None:
    assert await asyncio.to_thread(compute.started.acquire, timeout=10), "no batch was started"


async def test_vectors_come_back_in_the_order_of_the_texts() -> None:
    async with running(Computation(), workers=2) as scheduler:
        rows = [row(5 + index * 37 % 300, first=index) for index in range(60)]
        computed = await scheduler.embed(rows, Lane.DOCUMENT)
    assert computed.vectors.argmax(axis=1).tolist() == [index % 8 for index in range(60)]


async def test_a_query_that_arrives_during_bulk_work_waits_for_the_running_batch_alone() -> None:
    compute = Computation()
    async with running(compute) as scheduler:
        compute.hold()
        bulk = asyncio.ensure_future(scheduler.embed([row(400, first=n) for n in range(20)], Lane.DOCUMENT))
        await until_started(compute)
        query = asyncio.ensure_future(scheduler.embed([row(9)], Lane.QUERY))
        await asyncio.sleep(0)
        compute.allowed.release()
        await until_started(compute)
        compute.allowed.release()
        await query
        assert not bulk.done()
        assert [len(batch[0]) for batch in compute.batches[:2]] == [400, 9]


async def test_bulk_work_moves_on_under_a_flood_of_queries() -> None:
    compute = Computation()
    async with running(compute) as scheduler:
        compute.hold()
        first = asyncio.ensure_future(scheduler.embed([row(500)], Lane.QUERY))
        await until_started(compute)
        bulk = asyncio.ensure_future(scheduler.embed([row(400)], Lane.DOCUMENT))
        flood = asyncio.ensure_future(scheduler.embed([row(500, first=n) for n in range(8, 40)], Lane.QUERY))
        await asyncio.sleep(0)
        compute.allowed.release(9)
        await bulk
        assert not flood.done()
        compute.release_all()
        await asyncio.gather(first, flood)


async def test_equal_texts_in_flight_are_computed_once() -> None:
    compute = Computation()
    async with running(compute) as scheduler:
        compute.hold()
        calls = [asyncio.ensure_future(scheduler.embed([row(50)] * 3, Lane.DOCUMENT)) for _ in range(4)]
        await until_started(compute)
        late = asyncio.ensure_future(scheduler.embed([row(50)], Lane.DOCUMENT))
        await asyncio.sleep(0)
        compute.release_all()
        results = await asyncio.gather(*calls, late)
    assert [len(batch) for batch in compute.batches] == [1]
    assert all((result.vectors == results[0].vectors[0]).all() for result in results)


async def test_a_cancelled_call_leaves_the_queue_uncomputed() -> None:
    compute = Computation()
    async with running(compute) as scheduler:
        compute.hold()
        running_call = asyncio.ensure_future(scheduler.embed([row(400)], Lane.DOCUMENT))
        await until_started(compute)
        shared_row, own_row = row(300, first=1), row(200, first=2)
        given_up = asyncio.ensure_future(scheduler.embed([shared_row, own_row], Lane.DOCUMENT))
        staying = asyncio.ensure_future(scheduler.embed([shared_row], Lane.DOCUMENT))
        await asyncio.sleep(0)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        compute.release_all()
        await asyncio.gather(running_call, staying)
    assert [len(ids) for batch in compute.batches for ids in batch] == [400, 300]


@pytest.mark.parametrize("nan", [True, False], ids=["not a number", "exception"])
async def test_a_bad_text_fails_alone_and_is_named(nan: bool) -> None:
    compute = Computation()
    compute.nan_for_bad = nan
    if not nan:
        compute.fail = lambda rows: any(BAD in ids for ids in rows)
    bad = np.array([3, BAD, *range(48)], np.int64)
    async with running(compute) as scheduler:
        compute.hold()
        blocker = asyncio.ensure_future(scheduler.embed([row(500)], Lane.DOCUMENT))
        await until_started(compute)
        good = asyncio.ensure_future(scheduler.embed([row(50, first=n) for n in range(5)], Lane.DOCUMENT))
        poisoned = asyncio.ensure_future(scheduler.embed([row(50, first=9), bad], Lane.DOCUMENT))
        await asyncio.sleep(0)
        compute.release_all()
        await blocker
        assert (await good).vectors.argmax(axis=1).tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(InvalidArgumentError) as caught:
            await poisoned
        assert (caught.value.reason, caught.value.parameters["index"]) == ("VECTOR_INVALID", "1")
        assert any(len(batch) > 1 and any(BAD in ids for ids in batch) for batch in compute.batches)
        assert not scheduler.broken.is_set()


async def test_an_exception_once_costs_no_caller_anything() -> None:
    compute = Computation()
    failures = iter([True])
    compute.fail = lambda rows: next(failures, False)
    async with running(compute) as scheduler:
        computed = await scheduler.embed([row(50), row(50, first=8)], Lane.DOCUMENT)
        assert computed.vectors.argmax(axis=1).tolist() == [7, 0]


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_model_that_always_fails_is_given_up_and_nobody_is_left_waiting(workers: int) -> None:
    compute = Computation()
    async with running(compute, workers=workers) as scheduler:
        compute.hold()
        calls = [asyncio.ensure_future(scheduler.embed([row(400, first=n)], Lane.DOCUMENT)) for n in range(6)]
        await until_started(compute)
        compute.fail = lambda rows: True
        compute.release_all()
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        assert all(isinstance(result, DependencyUnavailableError) for result in results)
        await asyncio.wait_for(scheduler.broken.wait(), 10)
        with pytest.raises(DependencyUnavailableError):
            await scheduler.embed([row(5)], Lane.QUERY)


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    compute = Computation()
    async with running(compute, max_queued_tokens=1000) as scheduler:
        compute.hold()
        first = asyncio.ensure_future(scheduler.embed([row(400)], Lane.DOCUMENT))
        await until_started(compute)
        waiting = [
            asyncio.ensure_future(scheduler.embed([row(400, first=n)], Lane.DOCUMENT)) for n in range(2)
        ]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as caught:
            await scheduler.embed([row(400, first=90)], Lane.DOCUMENT)
        assert caught.value.reason == "EMBEDDER_OVERLOADED"
        assert caught.value.retry_after_seconds is not None
        query = asyncio.ensure_future(scheduler.embed([row(400)], Lane.QUERY))
        compute.release_all()
        await asyncio.gather(first, *waiting, query)


async def test_a_call_that_cannot_meet_its_deadline_is_refused_before_it_waits() -> None:
    compute = Computation()
    async with running(compute) as scheduler:
        # Measured here: 100 tokens in at least 50 ms, so 2,000 tokens a second at most.
        compute.hold()
        timer = threading.Timer(0.05, compute.release_all)
        timer.start()
        await scheduler.embed([row(100)], Lane.DOCUMENT)
        timer.join()
        compute.hold()
        calls = [
            asyncio.ensure_future(scheduler.embed([row(500, first=n)], Lane.DOCUMENT)) for n in range(10)
        ]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as overloaded:
            await scheduler.embed([row(10)], Lane.DOCUMENT, timeout_seconds=1.0)
        assert overloaded.value.retry_after_seconds is not None
        assert overloaded.value.retry_after_seconds > 1
        with pytest.raises(DeadlineExceededError):
            await scheduler.embed(
                [row(500, first=n) for n in range(50, 60)], Lane.DOCUMENT, timeout_seconds=1
            )
        query = asyncio.ensure_future(scheduler.embed([row(10)], Lane.QUERY, timeout_seconds=1.0))
        await asyncio.sleep(0)
        compute.release_all()
        await asyncio.gather(*calls, query)


async def test_an_idle_embedder_takes_a_call_whatever_it_measured_before() -> None:
    compute = Computation()
    async with running(compute) as scheduler:
        compute.hold()
        threading.Timer(0.1, compute.release_all).start()
        await scheduler.embed([row(2)], Lane.DOCUMENT)
        await scheduler.embed([row(500)], Lane.DOCUMENT, timeout_seconds=1)


async def test_closing_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    compute = Computation()
    async with running(compute) as scheduler:
        compute.hold()
        calls = [asyncio.ensure_future(scheduler.embed([row(400, first=n)], Lane.DOCUMENT)) for n in range(5)]
        await until_started(compute)
        closing = asyncio.ensure_future(scheduler.close())
        await asyncio.sleep(0)
        with pytest.raises(DependencyUnavailableError) as caught:
            await scheduler.embed([row(5)], Lane.QUERY)
        assert caught.value.reason == "SHUTTING_DOWN"
        compute.release_all()
        await asyncio.gather(*calls)
        await closing
