"""Where a text may be cut."""

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from services.ingest.chunking.sentences import clauses, graphemes, lines, sentences


def parts(text: str) -> list[str]:
    return [text[start:end] for start, end in sentences(text, 0, len(text))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("你好。再见！", ["你好。", "再见！"]),
        ("他说：“好。”然后走了。", ["他说：“好。”", "然后走了。"]),
        ("One. Two? Three", ["One. ", "Two? ", "Three"]),
        ("Dr. Smith paid 3.50 e.g. in cash. Done.", ["Dr. Smith paid 3.50 e.g. in cash. ", "Done."]),
        ("J. Doe wrote v1.2.3 of it. End", ["J. Doe wrote v1.2.3 of it. ", "End"]),
        ("真的……？！好", ["真的……？！", "好"]),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text: str, expected: list[str]) -> None:
    assert parts(text) == expected


@pytest.mark.parametrize("cut", [sentences, clauses])
@pytest.mark.parametrize("mark", ["\ufe0f", "\u0301", "\u200d👩", "\U0001f3fd"])
def test_a_mark_stays_with_the_character_before_it(cut: object, mark: str) -> None:
    text = f"好！{mark}吧, {mark}x"
    borders = {match.start() for match in regex.finditer(r"\X", text)} | {len(text)}
    assert callable(cut)
    assert all(end in borders for _, end in cut(text, 0, len(text)))


@given(st.text(st.sampled_from("ab。！.,， \n|\u0301\u200d👨e"), max_size=80), st.integers(0, 10))
def test_spans_cover_their_range_without_a_gap(text: str, start: int) -> None:
    start = min(start, len(text))
    for cut in (sentences, clauses, lines):
        spans = list(cut(text, start, len(text)))
        assert "".join(text[begin:end] for begin, end in spans) == text[start:]
        assert all(begin < end for begin, end in spans)
    assert graphemes(text, start, len(text))[-1] == len(text)
