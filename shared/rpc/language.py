"""The language of the sentences in this call's answer, from the metadata `accept-language`."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar

METADATA_KEY = "accept-language"
_current: ContextVar[str] = ContextVar("language", default="en")


def current_language() -> str:
    """Returns "zh" or "en"."""
    return _current.get()


def use_language(language: str) -> None:
    _current.set(language)


def language_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Returns the first language of the list that we speak; English when there is none."""
    for key, value in metadata or ():
        if key == METADATA_KEY and isinstance(value, str):
            for wanted in value.lower().split(","):
                tag = wanted.split(";")[0].split("-")[0].strip()
                if tag in ("zh", "en"):
                    return tag
    return "en"
