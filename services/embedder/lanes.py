"""Which waiting texts are computed together, and in which order.

Owns the two lanes and the forming of batches; a plain data structure without threads, clocks or
futures. Queries go before documents, but of eight batches at least one is documents while any
wait, so that a flood of queries never stops the ingestion.
"""

from __future__ import annotations

import enum
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

LENGTH_TOLERANCE = 0.15
"""Neighbours in a batch differ at most by this share: padding is computed like real tokens."""
MIN_LENGTH_TOLERANCE = 4
"""In tokens. Very short texts gain more from company than four tokens of padding cost."""
DOCUMENT_TURN = 8
"""Every eighth batch is documents while both lanes wait."""


class Lane(enum.Enum):
    QUERY = "query"
    DOCUMENT = "document"


class Sized(Protocol):
    """A text that waits; compared by identity."""

    @property
    def token_count(self) -> int: ...


Text = TypeVar("Text", bound=Sized)


class Lanes(Generic[Text]):
    """Not safe for threads; the scheduler holds its lock around every call."""

    def __init__(self, *, batch_tokens: int, batch_rows: int) -> None:
        """`batch_tokens` counts padding too; a single text may exceed it."""
        self._batch_tokens = batch_tokens
        self._batch_rows = batch_rows
        self._lanes = {lane: _Waiting[Text]() for lane in Lane}
        self._queries_in_a_row = 0

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._lanes.values())

    def tokens(self, lane: Lane) -> int:
        """Returns the tokens that wait in `lane`."""
        return self._lanes[lane].tokens

    def add(self, text: Text, lane: Lane) -> None:
        self._lanes[lane].add(text)

    def discard(self, text: Text, lane: Lane) -> None:
        """Takes `text` out, when it still waits."""
        self._lanes[lane].discard(text)

    def clear(self) -> list[Text]:
        """Takes everything out and returns it."""
        return [text for waiting in self._lanes.values() for text in waiting.clear()]

    def take_batch(self) -> list[Text]:
        """Takes out the next batch; empty when nothing waits."""
        waiting = self._lanes[self._next_lane()]
        anchor = waiting.oldest()
        if anchor is None:
            return []
        batch: list[Text] = []
        longest = 0
        for text in waiting.neighbours(anchor):
            longest = max(longest, text.token_count)
            if batch and longest * (len(batch) + 1) > self._batch_tokens:
                break
            batch.append(text)
            if len(batch) == self._batch_rows:
                break
        for text in batch:
            waiting.discard(text)
        return batch

    def _next_lane(self) -> Lane:
        documents = len(self._lanes[Lane.DOCUMENT]) > 0
        queries = len(self._lanes[Lane.QUERY]) > 0
        if not documents:
            self._queries_in_a_row = 0
            return Lane.QUERY
        if queries and self._queries_in_a_row < DOCUMENT_TURN - 1:
            self._queries_in_a_row += 1
            return Lane.QUERY
        self._queries_in_a_row = 0
        return Lane.DOCUMENT


class _Waiting(Generic[Text]):
    """Texts by age and by length; dicts serve as ordered sets."""

    def __init__(self) -> None:
        self.tokens = 0
        self._by_age: dict[Text, None] = {}
        self._by_length: defaultdict[int, dict[Text, None]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._by_age)

    def add(self, text: Text) -> None:
        self._by_age[text] = None
        self._by_length[text.token_count][text] = None
        self.tokens += text.token_count

    def discard(self, text: Text) -> None:
        if text not in self._by_age:
            return
        del self._by_age[text]
        same_length = self._by_length[text.token_count]
        del same_length[text]
        if not same_length:
            del self._by_length[text.token_count]
        self.tokens -= text.token_count

    def clear(self) -> list[Text]:
        texts = list(self._by_age)
        self._by_age.clear()
        self._by_length.clear()
        self.tokens = 0
        return texts

    def oldest(self) -> Text | None:
        return next(iter(self._by_age), None)

    def neighbours(self, anchor: Text) -> Iterator[Text]:
        """Yields `anchor`, then the others of like length, nearest length first and oldest first."""
        yield anchor
        length = anchor.token_count
        reach = max(int(length * LENGTH_TOLERANCE), MIN_LENGTH_TOLERANCE)
        steps = itertools.chain([0], *((-step, step) for step in range(1, reach + 1)))
        for step in steps:
            for text in self._by_length.get(length + step, ()):
                if text is not anchor:
                    yield text
