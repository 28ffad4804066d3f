from __future__ import annotations

import numpy as np
import pytest

from services.embedder.pooling import Pooling, normalise, pool, usable_rows


@pytest.mark.parametrize("pooling", list(Pooling))
def test_padding_never_reaches_a_vector(pooling: Pooling) -> None:
    hidden = np.random.default_rng(1).standard_normal((3, 7, 16)).astype(np.float32)
    lengths = [7, 3, 1]
    padded = np.concatenate([hidden, np.full((3, 5, 16), np.nan, np.float32)], axis=1)
    assert np.array_equal(pool(padded, lengths, pooling), pool(hidden, lengths, pooling))
    for index, length in enumerate(lengths):
        alone = pool(hidden[index : index + 1, :length], [length], pooling)
        assert np.array_equal(alone[0], pool(hidden, lengths, pooling)[index])


def test_each_pooling_reads_its_tokens() -> None:
    hidden = np.array([[[1, 0], [3, 0], [0, 9]]], np.float32)
    assert pool(hidden, [2], Pooling.MEAN).tolist() == [[2, 0]]
    assert pool(hidden, [2], Pooling.CLS).tolist() == [[1, 0]]
    assert pool(hidden, [2], Pooling.LAST_TOKEN).tolist() == [[3, 0]]


def test_unusable_rows_are_told_from_usable_ones() -> None:
    rows = np.array([[3, 4], [0, 0], [np.nan, 1], [np.inf, 1]], np.float32)
    assert usable_rows(normalise(rows)).tolist() == [True, False, False, False]
    assert usable_rows(np.array([[0.9, 0]], np.float32)).tolist() == [False]
