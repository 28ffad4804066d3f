"""Terms of a text for keyword search, and their BM25 weights; one version for both sides.

Ingest calls `document_weights` for each chunk, search calls `query_terms` for each query, so
both cut text alike. Owns no document frequencies: those belong to whoever has the rows.

What becomes a term, after NFKC and case folding:
- a word, in any script that puts spaces between words;
- a compound (`e404-b`, `user_id`, `v2.3.1`) whole, and each of its parts;
- of scripts written without spaces (Chinese, Japanese, Korean, Thai, ...) each pair of
  neighbours, which needs no dictionary and so cuts new words right as well;
- of the same scripts each single character, in documents only, so that a query of one
  character hits. A longer query leaves them out: they would outweigh its pairs.
There are no stop words: a rare title may consist of nothing else.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

# A collection keeps the version that made its terms. Change the number with any change of the cut.
TOKENIZER_VERSION = 1

# The dimension of the sparse vectors; term ids lie below it.
TERM_SPACE = 1_000_000_000
# pgvector refuses a sparse vector with more entries than this.
MAX_TERMS = 16_000

K1 = 1.2
B = 0.75
# Fixed, so that a growing collection need not rewrite its weights: chunks are cut to near-equal
# length, about 350 model tokens, which are about 250 words.
AVERAGE_LENGTH = 250.0

# Scripts written without spaces. Hangul is among them: its words take endings, pairs see past them.
_UNSPACED = (
    "\u0e00-\u0e7f\u0e80-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Myanmar, Khmer
    "\u1100-\u11ff\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3040-\u30ff"  # Jamo, radicals, kana
    "\u3100-\u312f\u3130-\u318f\u31a0-\u31bf\u31f0-\u31ff"  # Bopomofo, small kana
    "\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff"  # Han, Hangul
    "\U0001aff0-\U0001b16f\U00020000-\U0003ffff"  # more kana, the later Han planes
)
# Marks of reading order inside those ranges that are no letters: they end a run.
_NOT_A_LETTER = frozenset("\u30a0\u30fb\u0e3f\u0e4f\u0e5a\u0e5b\u104a\u104b\u17d4\u17d5")


def _word_characters() -> str:
    """Returns the inside of a character class: letters, digits and combining marks of spaced scripts.

    `\\w` will not do: it leaves out combining marks and so cuts Hindi and pointed Arabic to pieces.
    """
    unspaced = re.compile(f"[{_UNSPACED}]")
    ranges: list[list[int]] = []
    for code in range(0x20000):
        character = chr(code)
        if unicodedata.category(character)[0] not in "LNM" or unspaced.match(character):
            continue
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)


_WORD = f"[{_word_characters()}]+"
_RUN = f"[{_UNSPACED}]+"
# A run goes on over one line break: PDF pages break Chinese sentences anywhere.
# The signs after a word keep C++ and C# apart from C.
_TOKEN = re.compile(
    rf"(?P<run>{_RUN}(?:\r?\n{_RUN})*)|(?P<word>{_WORD}(?:[-_.'@]+{_WORD})*(?:\+\+|#(?!\w))?)"
)
_PARTS = re.compile(r"[^-_.'@+#]+")
_LINE_BREAK = re.compile(r"\r?\n")
_RUN_BREAK = re.compile("[" + "".join(sorted(_NOT_A_LETTER)) + "]+")

# Signs that look alike or cannot be seen, and would cut or glue words.
_SAME = str.maketrans(
    {
        "\u2010": "-",
        "\u2212": "-",
        "\u2019": "'",
        "\u00ad": None,
        "\u200b": None,
        "\u200c": None,
        "\u200d": None,
        "\u2060": None,
        "\ufeff": None,
    }
)


def terms_of(text: str) -> list[str]:
    """Returns the terms of a document's text, repeats included."""
    carrying, singles = _cut(text)
    return carrying + singles


def term_id(term: str, collection_id: int) -> int:
    """Returns the number 1 to 999,999,999 that stands for `term` in one collection.

    The collection is part of it, so that the rows which an index finds for a term are the
    collection's own. Two terms share a number about once in a thousand million pairs.
    """
    return _number(term, _salt(collection_id))


def document_weights(text: str, collection_id: int) -> dict[int, float]:
    """Returns the document side of BM25 by term id: all of the score but the query's idf."""
    carrying, singles = _cut(text)
    salt = _salt(collection_id)
    frequencies: Counter[int] = Counter()
    for term, count in Counter(carrying + singles).items():
        frequencies[_number(term, salt)] += count
    # Single characters are not counted: they would make Chinese text look twice as long.
    length_share = K1 * (1 - B + B * len(carrying) / AVERAGE_LENGTH)
    return {
        number: count * (K1 + 1) / (count + length_share)
        for number, count in _most_frequent(frequencies, MAX_TERMS)
    }


def query_terms(text: str, collection_id: int) -> dict[int, int]:
    """Returns how often the query says each term, by term id."""
    carrying, _ = _cut(text)
    salt = _salt(collection_id)
    return dict(Counter(_number(term, salt) for term in carrying))


def _cut(text: str) -> tuple[list[str], list[str]]:
    """Returns the terms that carry a meaning, and the single characters of longer runs."""
    folded = text if text.isascii() else unicodedata.normalize("NFKC", text).translate(_SAME)
    # Case folding can undo NFKC for a few letters; a second pass settles them.
    folded = folded.casefold()
    if not folded.isascii() and not unicodedata.is_normalized("NFKC", folded):
        folded = unicodedata.normalize("NFKC", folded)
    carrying: list[str] = []
    singles: list[str] = []
    for match in _TOKEN.finditer(folded):
        token = match.group()
        if match.lastgroup == "run":
            for run in _runs(token):
                if len(run) == 1:
                    carrying.append(run)
                else:
                    carrying.extend(map("".join, pairwise(run)))
                    singles.extend(run)
        elif token.isalnum():
            carrying.append(token)
        else:
            carrying.extend(_compound(token))
    return carrying, singles


def _runs(token: str) -> Iterator[str]:
    for run in _RUN_BREAK.split(_LINE_BREAK.sub("", token)):
        if run:
            yield run


def _compound(token: str) -> Iterator[str]:
    yield token
    parts = _PARTS.findall(token)
    if parts != [token]:
        yield from parts


def _salt(collection_id: int) -> bytes:
    return collection_id.to_bytes(8, "little", signed=True)


def _number(term: str, salt: bytes) -> int:
    digest = hashlib.blake2b(term.encode("utf-8", "surrogatepass"), digest_size=8, salt=salt).digest()
    return int.from_bytes(digest, "little") % (TERM_SPACE - 1) + 1


def _most_frequent(frequencies: Counter[int], limit: int) -> Iterable[tuple[int, int]]:
    return frequencies.items() if len(frequencies) <= limit else frequencies.most_common(limit)
