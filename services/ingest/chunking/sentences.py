"""Where a text may be cut, best places first. Owns the borders of sentences, clauses and graphemes.

Every function returns offsets that cover the span without a gap, so nothing can be lost.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

import regex  # type: ignore[import-untyped]

Span = tuple[int, int]

_CLOSING = "”’」』）)》〉】\\]\"'"
# A full stop ends a sentence only before white space; abbreviations are looked at below.
_SENTENCE_END = re.compile(
    rf"[。！？；!?…]+[{_CLOSING}]*[ \t]*\n*|\.[{_CLOSING}]*(?=\s)\s+|;(?=\s)\s+|\n[ \t]*\n\s*"
)
_CLAUSE_END = re.compile(r"[，、,;:：]+\s*|\s+|\|\s*")
_ABBREVIATION = re.compile(
    r"(?:\b(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|Inc|Ltd|Co|Corp|No|Nos|Fig|Figs|Eq|Sec|Ch|Vol|pp|p|"
    r"cf|al|approx|dept|est|e\.g|i\.e|a\.m|p\.m|U\.S|U\.K)|(?:^|\s)\d{1,3})\Z"
)
_ABBREVIATION_WINDOW = 12
_FIRST_MARK = "\u0300"
_JOINING = "\u200c\u200d\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"
_GRAPHEME = regex.compile(r"\X")


def sentences(text: str, start: int, end: int) -> Iterator[Span]:
    """Yields the sentences of `text[start:end]`, each with the white space that follows it."""
    begin = start
    for match in _SENTENCE_END.finditer(text, start, end):
        if text[match.start()] == "." and _ABBREVIATION.search(
            text, max(begin, match.start() - _ABBREVIATION_WINDOW), match.start()
        ):
            continue
        if not _is_continued(text, match.end(), end):
            yield begin, match.end()
            begin = match.end()
    if begin < end:
        yield begin, end


def lines(text: str, start: int, end: int) -> Iterator[Span]:
    """Yields the lines of `text[start:end]`, each with its line end."""
    begin = start
    while begin < end:
        position = text.find("\n", begin, end)
        stop = end if position < 0 else position + 1
        yield begin, stop
        begin = stop


def clauses(text: str, start: int, end: int) -> Iterator[Span]:
    """Yields pieces that end after a comma, a cell border or white space."""
    begin = start
    for match in _CLAUSE_END.finditer(text, start, end):
        if match.end() > begin and not _is_continued(text, match.end(), end):
            yield begin, match.end()
            begin = match.end()
    if begin < end:
        yield begin, end


def graphemes(text: str, start: int, end: int) -> list[int]:
    """Returns where what a reader takes for one character begins, and the end."""
    return [*(match.start() for match in _GRAPHEME.finditer(text, start, end)), end]


def _is_continued(text: str, position: int, end: int) -> bool:
    """True if an accent, joiner or skin tone at `position` belongs to the character before it."""
    if position >= end or text[position] < _FIRST_MARK:
        return False
    character = text[position]
    return character in _JOINING or unicodedata.category(character)[0] == "M"
