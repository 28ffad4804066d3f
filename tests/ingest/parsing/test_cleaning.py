"""What is removed from text, and what must stay."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from services.ingest.parsing.cleaning import clean


def test_controls_and_surrogates_go_and_are_counted() -> None:
    cleaned = clean("a\0b\x07c\ud800d\x9fe\ufffe")
    assert (cleaned.text, cleaned.control_count) == ("abcde", 5)


def test_hidden_characters_go_and_are_counted() -> None:
    cleaned = clean("abc\u202eevil\u202c \u200bzero\ufeff tag\U000e0041")
    assert (cleaned.text, cleaned.hidden_count) == ("abcevil zero tag", 5)


def test_every_line_end_becomes_a_line_feed() -> None:
    assert clean("a\r\nb\rc\u2028d\x0ce").text == "a\nb\nc\nd e"


def test_composition_joins_accents_and_keeps_the_meaning_of_forms() -> None:
    assert clean("e\u0301 ①㎡Ａ").text == "é ①㎡Ａ"


def test_joined_emoji_and_flags_stay_whole() -> None:
    family, england = (
        "👨\u200d👩\u200d👧",
        "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    )
    assert clean(family + england).text == family + england


@given(st.text(st.characters(codec=None)))
def test_clean_text_is_storable_and_stays_as_it_is(text: str) -> None:
    cleaned = clean(text).text
    cleaned.encode("utf-8")
    assert "\0" not in cleaned and "\r" not in cleaned
    assert unicodedata.is_normalized("NFC", cleaned)
    assert clean(cleaned).text == cleaned
