"""How two rankings become one, and how much each may say. Pure arithmetic, no I/O.

Reciprocal rank fusion: a hit at rank r of a channel gets weight / (60 + r). Ranks, because
cosine and BM25 have no common scale. Equal weights are wrong in two cases, both measured:

- The words of the query hardly occur. A question in English over Chinese documents shares
  names and digits with wrong paragraphs only; equal weights took nDCG@10 from .84 to .61.
  So the keyword channel counts by its coverage: the share of the query's idf that the best
  keyword hit contains.
- The model does not know the letters. Chinese under an English model is mostly unknown
  tokens; equal weights took nDCG@10 from .96 to .60. So the vector channel counts by the
  share of tokens that are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

ChunkKey = tuple[int, int]
"""(version_id, ordinal): the place of a chunk in its collection."""

RANK_OFFSET = 60

# Below NO_COVERAGE a keyword hit is chance and says nothing; from FULL_COVERAGE on it counts fully.
NO_COVERAGE = 0.2
FULL_COVERAGE = 0.4

# From this share of unknown tokens on the vector says nothing about the query.
ALL_UNKNOWN = 0.3


@dataclasses.dataclass(frozen=True, slots=True)
class RankedChunk:
    """A chunk at a channel's rank (from 1) with the channel's own score, higher is better."""

    key: ChunkKey
    rank: int
    score: float


@dataclasses.dataclass(frozen=True, slots=True)
class FusedChunk:
    """A chunk with its fused score and what each channel said of it."""

    key: ChunkKey
    score: float
    _: dataclasses.KW_ONLY
    vector: RankedChunk | None = None
    keyword: RankedChunk | None = None


def keyword_coverage(query_weights: Mapping[int, float], best_hit_terms: Collection[int]) -> float:
    """Returns the share, 0 to 1, of the query's weight that the best keyword hit contains."""
    total = sum(query_weights.values())
    if total <= 0:
        return 0.0
    found = set(best_hit_terms)
    return sum(weight for term, weight in query_weights.items() if term in found) / total


def keyword_weight(coverage: float, vector_weight: float) -> float:
    """Returns 0 to 1: how much the keyword channel may say; what the vector may not, it may."""
    by_coverage = min(1.0, max(0.0, (coverage - NO_COVERAGE) / (FULL_COVERAGE - NO_COVERAGE)))
    return max(by_coverage, 1.0 - vector_weight)


def vector_weight(unknown_share: float) -> float:
    """Returns 0 to 1: how much the vector channel may say, by the share of unknown tokens in the query."""
    return min(1.0, max(0.0, 1.0 - unknown_share / ALL_UNKNOWN))


def fuse(
    vector: Sequence[RankedChunk],
    keyword: Sequence[RankedChunk],
    *,
    vector_weight: float,
    keyword_weight: float,
    limit: int,
) -> list[FusedChunk]:
    """Returns the best `limit` chunks of both rankings, each chunk once; equal scores in order of key.

    A channel of weight 0 fills up behind the other, so that it never costs a hit.
    """
    by_vector = {chunk.key: chunk for chunk in vector}
    by_keyword = {chunk.key: chunk for chunk in keyword}
    order = []
    for key in by_vector.keys() | by_keyword.keys():
        near, matching = by_vector.get(key), by_keyword.get(key)
        ranks = [ranked.rank for ranked in (near, matching) if ranked is not None]
        score = _share(near, vector_weight) + _share(matching, keyword_weight)
        order.append((-score, min(ranks), key))
    order.sort()
    return [
        FusedChunk(key, -negative_score, vector=by_vector.get(key), keyword=by_keyword.get(key))
        for negative_score, _, key in order[:limit]
    ]


def _share(chunk: RankedChunk | None, weight: float) -> float:
    return 0.0 if chunk is None else weight / (RANK_OFFSET + chunk.rank)
