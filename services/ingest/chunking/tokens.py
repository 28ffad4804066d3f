"""Counts tokens as the embedding model does. Owns the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

# Encodings of a batch are in memory together: about 100 bytes a token.
_BATCH = 2_048


class TokenCounter:
    """Thread-safe; releases the interpreter lock while it counts."""

    def __init__(self, tokenizer_json: bytes, unknown_token_id: int | None) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        # A file may ask for truncation; then every text would seem to fit.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._unknown_token_id = unknown_token_id

    def count(self, texts: Sequence[str]) -> list[int]:
        """Returns the tokens of each text, special tokens not counted."""
        counts: list[int] = []
        for start in range(0, len(texts), _BATCH):
            encodings = self._tokenizer.encode_batch_fast(
                texts[start : start + _BATCH], add_special_tokens=False
            )
            counts.extend(map(len, encodings))
        return counts

    def count_with_unknown(self, texts: Sequence[str]) -> list[tuple[int, int]]:
        """Returns tokens and unknown tokens of each text."""
        unknown = self._unknown_token_id
        counts: list[tuple[int, int]] = []
        for start in range(0, len(texts), _BATCH):
            encodings = self._tokenizer.encode_batch_fast(
                texts[start : start + _BATCH], add_special_tokens=False
            )
            counts.extend(
                (len(item), 0 if unknown is None else item.ids.count(unknown)) for item in encodings
            )
        return counts
