"""The query side of BM25: what each term weighs, and which terms look for candidates.

The document side lies in the rows (`shared.terms.document_weights`), so a chunk's score is
one sparse inner product. Document frequencies are counted when a term is asked for the first
time and kept for a minute: an outdated one shifts weights a little and loses no hit.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

Value = TypeVar("Value")

# A term of more chunks than this share, and than this number, does not look for candidates:
# measured, 5 % loses nothing of the best ten and is 35 times faster than letting all terms look.
GATE_SHARE = 0.05
GATE_MIN_CHUNKS = 1_000
# The sample shows a term this common; counting it would read many rows and change nothing.
SURELY_COMMON_SHARE = 0.10

KEPT_SECONDS = 60.0
KEPT_TERMS = 50_000
KEPT_SAMPLES = 64
SAMPLE_KEPT_SECONDS = 600.0
# A count is used as long as its collection has grown or shrunk by no more than this share.
TOLERATED_CHANGE = 0.02


class TermCounts(Protocol):
    """Where frequencies are counted: one snapshot of one collection."""

    async def count_terms(self, terms: Sequence[int], cap: int) -> dict[int, int]:
        """Returns in how many chunks each term occurs, never more than `cap`."""
        ...

    async def sample_common_terms(self) -> dict[int, float]:
        """Returns the estimated share of chunks of each term that is in 2 % of them or more."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class KeywordQuery:
    """`weights`: term id -> idf times its count in the query. `gate`: terms that find candidates."""

    weights: Mapping[int, float]
    gate: tuple[int, ...]

    @property
    def is_wide(self) -> bool:
        """True when every term finds candidates, so that a chunk that is not found matches nothing."""
        return len(self.gate) == len(self.weights)

    def widened(self) -> KeywordQuery:
        return KeywordQuery(self.weights, tuple(self.weights))


def gate_limit(chunk_count: int) -> int:
    """Returns in how many chunks a term may occur and still look for candidates."""
    return max(GATE_MIN_CHUNKS, int(chunk_count * GATE_SHARE))


def inverse_document_frequency(chunk_count: int, document_frequency: int) -> float:
    """Returns the BM25 idf: how much it says that a chunk contains the term. Never negative."""
    frequency = min(document_frequency, chunk_count)
    return math.log(1 + (chunk_count - frequency + 0.5) / (frequency + 0.5))


def weigh(terms: Mapping[int, int], frequencies: Mapping[int, int], chunk_count: int) -> KeywordQuery:
    """Returns the query side of BM25 for `terms` (id -> count in the query)."""
    weights = {
        term: count * inverse_document_frequency(chunk_count, frequencies[term])
        for term, count in terms.items()
    }
    limit = gate_limit(chunk_count)
    gate = tuple(term for term in terms if frequencies[term] <= limit)
    # Terms that occur nowhere find nothing; a gate of only those would hide the common ones.
    if not any(frequencies[term] for term in gate):
        occurring = [term for term in terms if frequencies[term]]
        if occurring:
            gate = (*gate, min(occurring, key=lambda term: frequencies[term]))
    return KeywordQuery(weights, gate)


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept(Generic[Value]):
    value: Value
    chunk_count: int
    expires_at: float

    def is_good(self, chunk_count: int, now: float) -> bool:
        return now < self.expires_at and (
            abs(chunk_count - self.chunk_count) <= self.chunk_count * TOLERATED_CHANGE
        )


class TermFrequencies:
    """Document frequencies of the terms asked for lately; bounded."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: OrderedDict[tuple[int, int], _Kept[int]] = OrderedDict()
        self._samples: OrderedDict[int, _Kept[Mapping[int, float]]] = OrderedDict()

    async def look_up(
        self, counts: TermCounts, collection_id: int, chunk_count: int, terms: Sequence[int]
    ) -> dict[int, int]:
        """Returns the document frequency of each term: exact up to the gate limit, estimated above it."""
        now = self._clock()
        found = {}
        for term in terms:
            kept = self._counts.get((collection_id, term))
            if kept is not None and kept.is_good(chunk_count, now):
                self._counts.move_to_end((collection_id, term))
                found[term] = kept.value
        missing = [term for term in terms if term not in found]
        if not missing:
            return found
        counted = await self._count(counts, collection_id, chunk_count, missing)
        for term, frequency in counted.items():
            self._counts[collection_id, term] = _Kept(frequency, chunk_count, now + KEPT_SECONDS)
        while len(self._counts) > KEPT_TERMS:
            self._counts.popitem(last=False)
        return found | counted

    async def _count(
        self, counts: TermCounts, collection_id: int, chunk_count: int, terms: Sequence[int]
    ) -> dict[int, int]:
        limit = gate_limit(chunk_count)
        if chunk_count <= limit:
            return await counts.count_terms(terms, chunk_count)
        shares = await self._sample(counts, collection_id, chunk_count)
        rare = [term for term in terms if shares.get(term, 0.0) < SURELY_COMMON_SHARE]
        counted = await counts.count_terms(rare, limit + 1)
        common = {
            term: max(limit + 1, round(chunk_count * shares.get(term, 0.0)))
            for term in terms
            if counted.get(term, limit + 1) > limit
        }
        return counted | common

    async def _sample(self, counts: TermCounts, collection_id: int, chunk_count: int) -> Mapping[int, float]:
        now = self._clock()
        kept = self._samples.get(collection_id)
        if kept is None or now >= kept.expires_at:
            shares: Mapping[int, float] = await counts.sample_common_terms()
            kept = _Kept(shares, chunk_count, now + SAMPLE_KEPT_SECONDS)
            self._samples[collection_id] = kept
            while len(self._samples) > KEPT_SAMPLES:
                self._samples.popitem(last=False)
        return kept.value
