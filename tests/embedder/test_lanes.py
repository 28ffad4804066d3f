from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from services.embedder.lanes import DOCUMENT_TURN, Lane, Lanes


@dataclasses.dataclass(eq=False, frozen=True)
class Text:
    token_count: int
    lane: Lane = Lane.DOCUMENT


def filled(texts: list[Text], *, batch_tokens: int = 512, batch_rows: int = 32) -> Lanes[Text]:
    lanes: Lanes[Text] = Lanes(batch_tokens=batch_tokens, batch_rows=batch_rows)
    for text in texts:
        lanes.add(text, text.lane)
    return lanes


def drained(lanes: Lanes[Text]) -> list[list[Text]]:
    batches = []
    while batch := lanes.take_batch():
        batches.append(batch)
    return batches


@given(
    st.lists(st.builds(Text, st.integers(1, 600), st.sampled_from(Lane)), max_size=120),
    st.integers(1, 512),
    st.integers(1, 40),
)
def test_every_text_is_computed_once_within_the_budget(
    texts: list[Text], batch_tokens: int, batch_rows: int
) -> None:
    lanes = filled(texts, batch_tokens=batch_tokens, batch_rows=batch_rows)
    assert sum(lanes.tokens(lane) for lane in Lane) == sum(text.token_count for text in texts)
    batches = drained(lanes)
    taken = [text for batch in batches for text in batch]
    assert sorted(map(id, taken)) == sorted(map(id, texts))
    assert (len(lanes), *(lanes.tokens(lane) for lane in Lane)) == (0, 0, 0)
    for batch in batches:
        longest = max(text.token_count for text in batch)
        assert len(batch) == 1 or longest * len(batch) <= batch_tokens
        assert len(batch) <= batch_rows
        assert len({text.lane for text in batch}) == 1


@given(st.lists(st.builds(Text, st.integers(30, 512)), min_size=1, max_size=120))
def test_hardly_anything_is_padding(texts: list[Text]) -> None:
    batches = drained(filled(texts))
    padded = sum(max(text.token_count for text in batch) * len(batch) for batch in batches)
    # Shortest to longest of a batch is at worst 0.85 to 1.15 of its anchor.
    assert padded <= sum(text.token_count for text in texts) * 1.15 / 0.85


def test_the_oldest_text_is_in_the_next_batch_whatever_its_length() -> None:
    texts = [Text(400), *(Text(20) for _ in range(50))]
    assert drained(filled(texts))[0] == [texts[0]]


def test_texts_of_like_length_are_computed_together_although_others_came_between() -> None:
    texts = [Text(100), Text(300), Text(105), Text(20), Text(110)]
    batch = drained(filled(texts))[0]
    assert [text.token_count for text in batch] == [100, 105, 110]


def test_queries_go_first_but_never_take_every_turn_of_the_documents() -> None:
    texts = [
        *(Text(400, Lane.DOCUMENT) for _ in range(3)),
        *(Text(400, Lane.QUERY) for _ in range(3 * DOCUMENT_TURN)),
    ]
    order = [batch[0].lane for batch in drained(filled(texts))]
    assert order[: DOCUMENT_TURN - 1] == [Lane.QUERY] * (DOCUMENT_TURN - 1)
    turns = [index for index, lane in enumerate(order) if lane is Lane.DOCUMENT]
    assert turns == [DOCUMENT_TURN - 1, 2 * DOCUMENT_TURN - 1, 3 * DOCUMENT_TURN - 1]


def test_a_text_that_was_taken_out_is_not_computed() -> None:
    texts = [Text(100), Text(100), Text(100)]
    lanes = filled(texts)
    lanes.discard(texts[1], Lane.DOCUMENT)
    lanes.discard(texts[1], Lane.DOCUMENT)
    assert lanes.tokens(Lane.DOCUMENT) == 200
    assert drained(lanes) == [[texts[0], texts[2]]]
