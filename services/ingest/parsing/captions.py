"""What reads as the caption of a table or figure."""

from __future__ import annotations

import re

_CAPTION = re.compile(r"(图表?|表|Figure|Fig\.|Table|Chart)\s*\d", re.I)
_FIGURE = re.compile(r"(图表?|Figure|Fig\.|Chart)\s*\d", re.I)
_MAX_CHARACTERS = 200


def is_caption(text: str) -> bool:
    return len(text) <= _MAX_CHARACTERS and _CAPTION.match(text) is not None


def is_figure_caption(text: str) -> bool:
    return is_caption(text) and _FIGURE.match(text) is not None
