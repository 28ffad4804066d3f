"""What is embedded in front of a chunk: where it stands in the document. Owns wording and share of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.ingest.chunking.tokens import TokenCounter

Prefix = tuple[str, int]
"""Text and its tokens."""

NO_PREFIX: Prefix = ("", 0)
_SEPARATOR = " > "
_CUT = "… > "
_END = "\n\n"


class HeadingPrefixes:
    """Heading paths as text, each made once. One too long loses its outermost titles first."""

    def __init__(self, counter: TokenCounter, max_tokens: int) -> None:
        self._counter = counter
        self._max_tokens = max_tokens
        self._known: dict[tuple[str, ...], Prefix] = {(): NO_PREFIX}

    def prepare(self, paths: Iterable[tuple[str, ...]]) -> None:
        """Makes many at once: one by one, the calls would cost more than the counting."""
        new = [path for path in dict.fromkeys(paths) if path not in self._known]
        texts = [_SEPARATOR.join(path) + _END for path in new]
        for path, text, tokens in zip(new, texts, self._counter.count(texts), strict=True):
            if tokens <= self._max_tokens:
                self._known[path] = text, tokens

    def of(self, path: tuple[str, ...]) -> Prefix:
        if path not in self._known:
            self._known[path] = self._make(path)
        return self._known[path]

    def _make(self, path: tuple[str, ...]) -> Prefix:
        for first in range(len(path)):
            text = (_CUT if first else "") + _SEPARATOR.join(path[first:]) + _END
            tokens = self._tokens(text)
            if tokens <= self._max_tokens:
                return text, tokens
        title = path[-1]
        while len(title) > 1:
            title = title[: len(title) // 2]
            text = title.rstrip() + "…" + _END
            tokens = self._tokens(text)
            if tokens <= self._max_tokens:
                return text, tokens
        return NO_PREFIX

    def _tokens(self, text: str) -> int:
        return self._counter.count([text])[0]


def table_prefix(
    heading: Prefix, caption: str, header: str, max_tokens: int, count: Callable[[str], int]
) -> Prefix:
    """Returns what stands in front of the later parts of a table: path, caption and header rows.

    A caption and then a header that would take too much of the chunk are left out. The header
    ends with its own line end, so that the rows that follow make one valid table with it.
    """
    with_caption = f"{caption}\n\n{header}" if caption and header else header
    for repeated in (with_caption, header):
        if repeated:
            tokens = count(repeated)
            if tokens <= max_tokens:
                return heading[0] + repeated, heading[1] + tokens
    return heading
