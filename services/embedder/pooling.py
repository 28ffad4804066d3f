"""From token vectors to one vector a text: mean, first or last token, then length 1.

Owns the arithmetic alone. Every row is reduced over its own tokens only, in one fixed order,
so that a text's vector does not depend on how far its batch was padded.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]

MAX_NORM_ERROR = 1e-3
"""A float32 row that was divided by its own length is within 1e-6 of length 1."""


class Pooling(enum.StrEnum):
    MEAN = "mean"
    CLS = "cls"
    LAST_TOKEN = "lasttoken"


def pool(hidden: Vectors, lengths: Sequence[int], pooling: Pooling) -> Vectors:
    """Returns one row a text of `hidden` [texts, tokens, dimension].

    Row i reads its first `lengths[i]` tokens; what stands after them is padding.
    """
    rows = np.empty((hidden.shape[0], hidden.shape[2]), np.float32)
    for index, length in enumerate(lengths):
        if pooling is Pooling.MEAN:
            # Divided by the count only for the scale's sake: normalising follows.
            rows[index] = hidden[index, :length].sum(axis=0) / np.float32(length)
        elif pooling is Pooling.CLS:
            rows[index] = hidden[index, 0]
        else:
            rows[index] = hidden[index, length - 1]
    return rows


def normalise(rows: Vectors) -> Vectors:
    """Returns the rows with length 1. A zero row becomes NaN, which `usable_rows` reports."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        lengths = np.sqrt(np.square(rows).sum(axis=1, keepdims=True))
        unit: Vectors = rows / lengths
        return unit


def usable_rows(rows: Vectors) -> npt.NDArray[np.bool_]:
    """Returns for each row whether it is finite and of length 1."""
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = np.sqrt(np.square(rows).sum(axis=1))
        usable: npt.NDArray[np.bool_] = np.isfinite(rows).all(axis=1) & (np.abs(lengths - 1) < MAX_NORM_ERROR)
        return usable
