"""Weights and fusion of two rankings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.search import fusion
from services.search.fusion import RankedChunk


def ranking(*ordinals: int) -> list[RankedChunk]:
    return [RankedChunk((1, ordinal), rank, 1.0 / rank) for rank, ordinal in enumerate(ordinals, start=1)]


def order(vector: list[RankedChunk], keyword: list[RankedChunk], **changes: float) -> list[int]:
    settings = {"vector_weight": 1.0, "keyword_weight": 1.0, "limit": 10} | changes
    return [chunk.key[1] for chunk in fusion.fuse(vector, keyword, **settings)]


def test_a_chunk_that_both_channels_found_comes_before_what_one_found_higher() -> None:
    assert order(ranking(1, 2), ranking(3, 2)) == [2, 1, 3]


def test_a_channel_without_weight_fills_up_behind_the_other() -> None:
    assert order(ranking(1, 2), ranking(9, 8), keyword_weight=0.0) == [1, 2, 9, 8]
    assert order(ranking(1, 2), ranking(9, 8), vector_weight=0.0) == [9, 8, 1, 2]


def test_the_score_is_the_weighted_sum_of_reciprocal_ranks_and_keeps_its_parts() -> None:
    (chunk,) = fusion.fuse(ranking(5), ranking(5), vector_weight=0.5, keyword_weight=0.25, limit=1)
    assert chunk.score == pytest.approx(0.75 / 61)
    assert chunk.vector is not None
    assert chunk.keyword is not None
    assert (chunk.vector.rank, chunk.keyword.rank) == (1, 1)


def test_equal_scores_come_in_order_of_place() -> None:
    assert order(ranking(7), ranking(3)) == [3, 7]


keys = st.lists(st.integers(0, 30), unique=True, max_size=20)
weights = st.floats(0, 1)


@given(keys, keys, weights, weights, st.integers(1, 50))
def test_fusion_loses_nothing_and_repeats_nothing(
    vector: list[int], keyword: list[int], vector_weight: float, keyword_weight: float, limit: int
) -> None:
    fused = fusion.fuse(
        ranking(*vector),
        ranking(*keyword),
        vector_weight=vector_weight,
        keyword_weight=keyword_weight,
        limit=limit,
    )
    found = [chunk.key[1] for chunk in fused]
    assert len(found) == len(set(found)) == min(limit, len({*vector, *keyword}))
    assert [chunk.score for chunk in fused] == sorted((chunk.score for chunk in fused), reverse=True)


def test_coverage_is_the_share_of_weight_that_the_best_hit_contains() -> None:
    assert fusion.keyword_coverage({1: 3.0, 2: 1.0}, {1, 9}) == 0.75
    assert fusion.keyword_coverage({1: 3.0}, set()) == 0.0
    assert fusion.keyword_coverage({}, {1}) == 0.0
    assert fusion.keyword_coverage({1: 0.0}, {1}) == 0.0


def test_keywords_count_fully_when_covered_and_not_at_all_by_chance() -> None:
    middle = (fusion.NO_COVERAGE + fusion.FULL_COVERAGE) / 2
    assert fusion.keyword_weight(fusion.NO_COVERAGE, 1.0) == 0.0
    assert fusion.keyword_weight(0.0, 1.0) == 0.0
    assert fusion.keyword_weight(fusion.FULL_COVERAGE, 1.0) == 1.0
    assert fusion.keyword_weight(1.0, 1.0) == 1.0
    assert 0.0 < fusion.keyword_weight(middle, 1.0) < 1.0


def test_one_channel_may_always_speak() -> None:
    assert fusion.keyword_weight(0.0, 0.0) == 1.0
    assert fusion.keyword_weight(0.0, 0.25) == 0.75


def test_the_vector_counts_less_the_fewer_tokens_the_model_knows() -> None:
    assert fusion.vector_weight(0.0) == 1.0
    assert 0.0 < fusion.vector_weight(fusion.ALL_UNKNOWN / 2) < 1.0
    assert fusion.vector_weight(fusion.ALL_UNKNOWN) == 0.0
    assert fusion.vector_weight(1.0) == 0.0
