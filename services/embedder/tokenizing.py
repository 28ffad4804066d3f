"""From text to token ids, by the model's own tokenizer.

Owns the one tokenizer of the process: it is loaded through `transformers`, configured once and
never changed again, since a fast tokenizer whose truncation is changed while another thread
encodes fails with "Already borrowed". Truncation is therefore done here, on the ids. Knows no
queue and no network.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from services.embedder.model_files import ModelFiles, ModelFilesError
from shared.errors import InvalidArgumentError

TokenIds = npt.NDArray[np.int64]

CHARACTERS_PER_TOKEN = 32
"""Text is cut at this many characters a token before it is tokenised: a megabyte costs over a second."""
CUT_MARGIN_TOKENS = 16
"""Tokens near a cut may differ from those of the whole text; they must lie beyond the limit by this."""
PROBES = ("How many days?", "年假有几天？", "  Mixed 中英 text,\twith 12.5 % & émigré 😀\n", "x" * 300)


class InputKind(enum.Enum):
    """What a text is for; decides its prefix."""

    QUERY = "query"
    DOCUMENT = "document"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text as the model reads it, prefix and special tokens included."""

    ids: TokenIds
    unknown_token_count: int
    truncated: bool


class TextTokenizer:
    """Safe for use by several threads at once."""

    def __init__(self, files: ModelFiles) -> None:
        """Raises ModelFilesError when `transformers` reads another tokenizer than tokenizer.json."""
        # Others count tokens with tokenizer.json, so it has to give the ids that are used here.
        # Encoded and dropped first: two XLM-R tokenizers at once would take 600 MB.
        expected = _probe(_configured(Tokenizer.from_file(str(files.tokenizer))))
        self._tokenizer = _load(files)
        if _probe(self._tokenizer) != expected:
            raise ModelFilesError(f"{files.folder}: tokenizer.json differs from tokenizer_config.json.")
        self._prefixes = {
            InputKind.QUERY: files.query_prefix,
            InputKind.DOCUMENT: files.document_prefix,
        }
        self.max_input_tokens = files.max_input_tokens
        self._max_characters = files.max_input_tokens * CHARACTERS_PER_TOKEN
        self.unknown_token_id = _unknown_token_id(self._tokenizer)

    def overhead_tokens(self, kind: InputKind) -> int:
        """Returns how many tokens prefix and special tokens take, at most."""
        plain = [
            len(encoding.ids)
            for encoding in self._tokenizer.encode_batch(list(PROBES), add_special_tokens=False)
        ]
        full = [len(self._encode(text, kind).ids) for text in PROBES]
        return max(whole - bare for whole, bare in zip(full, plain, strict=True))

    def tokenize(self, texts: Sequence[str], kind: InputKind, *, truncate: bool) -> list[TokenizedText]:
        """Returns one entry a text; raises INPUT_TOO_LONG for one over the limit unless `truncate`."""
        return [
            self._tokenize(text, kind, index=index, truncate=truncate) for index, text in enumerate(texts)
        ]

    def _tokenize(self, text: str, kind: InputKind, *, index: int, truncate: bool) -> TokenizedText:
        limit = self.max_input_tokens
        cut = len(text) > self._max_characters
        encoding = self._encode(text[: self._max_characters] if cut else text, kind)
        if cut and len(encoding.ids) <= limit + CUT_MARGIN_TOKENS:
            # Hardly any tokens in very many characters: only the whole text tells how many.
            cut = False
            encoding = self._encode(text, kind)
        ids = np.array(encoding.ids, np.int64)
        too_long = len(ids) > limit
        if too_long and not truncate:
            counted = f">{len(ids)}" if cut else str(len(ids))
            raise InvalidArgumentError(
                "INPUT_TOO_LONG", field=f"inputs[{index}]", index=index, tokens=counted, limit=limit
            )
        if too_long:
            closing = _closing_tokens(encoding)
            ids = np.concatenate([ids[: limit - closing], ids[len(ids) - closing :]])
        unknown = 0 if self.unknown_token_id is None else int((ids == self.unknown_token_id).sum())
        return TokenizedText(ids, unknown, too_long)

    def _encode(self, text: str, kind: InputKind) -> Encoding:
        return self._tokenizer.encode(self._prefixes[kind] + text)


def _load(files: ModelFiles) -> Tokenizer:
    # Imported here: it takes two seconds, which no other use of this file should pay for.
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(
        str(files.folder), local_files_only=True, trust_remote_code=False, use_fast=True
    )
    if not getattr(loaded, "is_fast", False):
        raise ModelFilesError(f"{files.folder} has no fast tokenizer, which is needed to count tokens.")
    return _configured(loaded.backend_tokenizer)


def _configured(tokenizer: Tokenizer) -> Tokenizer:
    # tokenizer.json may carry padding to a fixed length and a truncation of its own.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _probe(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text).ids for text in PROBES]


def _closing_tokens(encoding: Encoding) -> int:
    """Returns how many special tokens stand at the end; truncation keeps them."""
    mask = encoding.special_tokens_mask
    count = 0
    while count < len(mask) and mask[-1 - count]:
        count += 1
    return count


def _unknown_token_id(tokenizer: Tokenizer) -> int | None:
    model = tokenizer.model
    token = getattr(model, "unk_token", None)
    if token is not None:
        found: int | None = tokenizer.token_to_id(token)
        return found
    identity: int | None = getattr(model, "unk_id", None)
    if identity is not None:
        return identity
    return next(
        (found for name in ("<unk>", "[UNK]") if (found := tokenizer.token_to_id(name)) is not None), None
    )
