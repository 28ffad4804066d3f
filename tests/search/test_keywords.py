"""The query side of BM25: frequencies, what is kept of them, and which terms open the gate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from services.search import keywords
from services.search.keywords import TermFrequencies


class Counted:
    """Counts by a table, and remembers what it was asked."""

    def __init__(self, frequencies: dict[int, int], shares: dict[int, float] | None = None) -> None:
        self.frequencies = frequencies
        self.shares = shares or {}
        self.asked: list[int] = []
        self.samples = 0

    async def count_terms(self, terms: Sequence[int], cap: int) -> dict[int, int]:
        self.asked.extend(terms)
        return {term: min(cap, self.frequencies.get(term, 0)) for term in terms}

    async def sample_common_terms(self) -> dict[int, float]:
        self.samples += 1
        return self.shares


def test_the_idf_is_that_of_bm25_and_never_negative() -> None:
    assert math.isclose(keywords.inverse_document_frequency(100, 3), math.log(1 + 97.5 / 3.5))
    assert keywords.inverse_document_frequency(100, 100) > 0
    assert keywords.inverse_document_frequency(100, 500) == keywords.inverse_document_frequency(100, 100)


def test_rare_terms_open_the_gate_and_common_ones_only_score() -> None:
    query = keywords.weigh({1: 1, 2: 2}, {1: 5, 2: 90_000}, 100_000)
    assert query.gate == (1,)
    assert not query.is_wide
    assert query.weights[2] == 2 * keywords.inverse_document_frequency(100_000, 90_000)
    assert query.widened().is_wide
    assert set(query.widened().gate) == {1, 2}


def test_a_query_of_common_terms_is_opened_by_the_rarest() -> None:
    assert keywords.weigh({1: 1, 2: 1}, {1: 70_000, 2: 60_000}, 100_000).gate == (2,)


def test_terms_that_occur_nowhere_do_not_keep_the_gate_for_themselves() -> None:
    query = keywords.weigh({1: 1, 2: 1, 3: 1}, {1: 0, 2: 60_000, 3: 70_000}, 100_000)
    assert set(query.gate) == {1, 2}
    assert keywords.weigh({1: 1}, {1: 0}, 100_000).gate == (1,)


@pytest.mark.parametrize(("chunk_count", "limit"), [(0, 1_000), (20_000, 1_000), (100_000, 5_000)])
def test_the_gate_is_a_twentieth_of_the_collection_and_a_thousand_chunks_at_least(
    chunk_count: int, limit: int
) -> None:
    assert keywords.gate_limit(chunk_count) == limit


async def test_small_collections_are_counted_exactly_and_never_sampled() -> None:
    counted = Counted({1: 700, 2: 3})
    frequencies = TermFrequencies()
    assert await frequencies.look_up(counted, 7, 900, [1, 2, 3]) == {1: 700, 2: 3, 3: 0}
    assert counted.samples == 0


async def test_surely_common_terms_are_estimated_and_never_counted() -> None:
    counted = Counted({1: 80_000, 2: 3, 3: 7_000}, shares={1: 0.8, 3: 0.07})
    found = await TermFrequencies().look_up(counted, 7, 100_000, [1, 2, 3])
    assert found == {1: 80_000, 2: 3, 3: 7_000}
    assert counted.asked == [2, 3]


async def test_a_term_above_the_cap_that_the_sample_missed_counts_as_just_common() -> None:
    counted = Counted({1: 9_000})
    assert await TermFrequencies().look_up(counted, 7, 100_000, [1]) == {1: 5_001}


async def test_frequencies_are_kept_until_time_or_change_makes_them_old() -> None:
    now = [0.0]
    counted = Counted({1: 10})
    frequencies = TermFrequencies(clock=lambda: now[0])

    async def times_asked(chunk_count: int, collection_id: int = 7) -> int:
        counted.asked.clear()
        assert await frequencies.look_up(counted, collection_id, chunk_count, [1]) == {1: 10}
        return len(counted.asked)

    assert await times_asked(1_000) == 1
    assert await times_asked(1_010) == 0
    assert await times_asked(1_100) == 1
    assert await times_asked(1_100, collection_id=8) == 1
    now[0] = keywords.KEPT_SECONDS + 1
    assert await times_asked(1_100) == 1


async def test_the_memory_for_frequencies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keywords, "KEPT_TERMS", 3)
    counted = Counted({})
    frequencies = TermFrequencies()
    await frequencies.look_up(counted, 7, 10, [1, 2, 3, 4])
    counted.asked.clear()
    await frequencies.look_up(counted, 7, 10, [2, 3, 4])
    assert counted.asked == []
    await frequencies.look_up(counted, 7, 10, [1])
    assert counted.asked == [1]
