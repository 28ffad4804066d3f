"""The tokenizer that both sides of keyword search share."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import terms

COLLECTION = 7

CUTS = [
    ("E404-B", ["e404-b", "e404", "b"]),
    ("user_id", ["user_id", "user", "id"]),
    ("v2.3.1.", ["v2.3.1", "v2", "3", "1"]),
    ("Don’t", ["don't", "don", "t"]),
    ("co\u00adoperate \ufeffnaïve", ["cooperate", "naïve"]),
    ("ＡＢＣ１２３", ["abc123"]),
    ("STRASSE Straße", ["strasse", "strasse"]),
    ("C++ C# C", ["c++", "c", "c#", "c", "c"]),
    ("部署", ["部署", "部", "署"]),
    ("docker部署", ["docker", "部署", "部", "署"]),
    ("野", ["野"]),
    ("第1章", ["第", "1", "章"]),
    ("ﾃﾞｰﾀ", ["デー", "ータ", "デ", "ー", "タ"]),
    ("サーバー・ログ", ["サー", "ーバ", "バー", "ログ", "サ", "ー", "バ", "ー", "ロ", "グ"]),
    ("한국어", ["한국", "국어", "한", "국", "어"]),
    ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
    ("the of", ["the", "of"]),
    ("", []),
    (" ,.-_!？。", []),
]


@pytest.mark.parametrize(("text", "expected"), CUTS, ids=[text or "empty" for text, _ in CUTS])
def test_a_text_is_cut_into_these_terms_and_no_others(text: str, expected: list[str]) -> None:
    assert terms.terms_of(text) == expected


def test_a_line_break_inside_chinese_text_does_not_part_neighbours() -> None:
    assert "队列" in terms.terms_of("消息队\r\n列端口")
    assert "队列" not in terms.terms_of("消息队\n\n列端口")


@pytest.mark.parametrize(
    "query", ["队列端口错配", "队列", "docker 部署", "go 部署 deployment", "野", "ABC123"]
)
def test_every_term_of_a_query_is_found_in_a_document_that_contains_the_query(query: str) -> None:
    document = terms.document_weights(f"前言，原野。{query}。然后 other words", COLLECTION)
    assert terms.query_terms(query, COLLECTION).keys() <= document.keys()


def test_single_characters_of_a_longer_query_do_not_count() -> None:
    asked = terms.query_terms("队列", COLLECTION)
    assert asked == {terms.term_id("队列", COLLECTION): 1}
    assert terms.query_terms("野", COLLECTION) == {terms.term_id("野", COLLECTION): 1}


def test_a_query_counts_what_it_says_twice() -> None:
    assert terms.query_terms("go Go stop", COLLECTION) == {
        terms.term_id("go", COLLECTION): 2,
        terms.term_id("stop", COLLECTION): 1,
    }


def test_document_weights_are_the_document_side_of_bm25() -> None:
    text = "alpha beta alpha gamma"
    weights = terms.document_weights(text, COLLECTION)
    share = terms.K1 * (1 - terms.B + terms.B * 4 / terms.AVERAGE_LENGTH)
    assert math.isclose(weights[terms.term_id("alpha", COLLECTION)], 2 * (terms.K1 + 1) / (2 + share))
    assert math.isclose(weights[terms.term_id("beta", COLLECTION)], 1 * (terms.K1 + 1) / (1 + share))
    assert len(weights) == 3


def test_the_same_term_has_other_numbers_in_other_collections() -> None:
    assert terms.term_id("alpha", 1) != terms.term_id("alpha", 2)
    # The numbers are stored; this one must never change under the same tokenizer version.
    assert terms.TOKENIZER_VERSION == 1
    assert terms.term_id("alpha", 1) == 892136157


def test_a_giant_text_stays_within_what_a_sparse_vector_holds() -> None:
    text = "often often " + " ".join(f"w{number}" for number in range(terms.MAX_TERMS + 500))
    weights = terms.document_weights(text, COLLECTION)
    assert len(weights) == terms.MAX_TERMS
    assert terms.term_id("often", COLLECTION) in weights


@given(st.text(max_size=200))
def test_any_text_gives_usable_numbers_and_is_found_by_itself(text: str) -> None:
    weights = terms.document_weights(text, COLLECTION)
    assert all(0 < number < terms.TERM_SPACE for number in weights)
    assert all(0 < weight <= terms.K1 + 1 for weight in weights.values())
    assert terms.query_terms(text, COLLECTION).keys() <= weights.keys()


# The iota subscript of ancient Greek moves when folded before it is normalised; accepted.
_LETTERS = st.characters(exclude_characters="\u0345" + "".join(map(chr, range(0x1F00, 0x2000))))


@given(st.text(_LETTERS, max_size=200))
def test_cutting_does_not_depend_on_letter_case_or_width(text: str) -> None:
    assert terms.terms_of(text.casefold()) == terms.terms_of(text)


def test_a_megabyte_is_cut_within_a_second_of_processor_time() -> None:
    english = "The worker renews its lease; user_id 42 reads v2.3.1 of the table. " * 30
    chinese = "消息队列的端口配置错误会导致部署失败，请检查容器网络设置后重试。" * 20
    started = time.process_time()
    size = 0
    while size < 1_000_000:
        for text in (english, chinese):
            terms.document_weights(text, COLLECTION)
            size += len(text.encode())
    assert time.process_time() - started < 1.0
