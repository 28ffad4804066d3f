"""Text without the characters that break what comes after it.

Owns which characters go and counts them. NUL cannot be stored by PostgreSQL, lone
surrogates cannot be encoded, the others hide text from the people who read it. Never
changes meaning: NFC, not NFKC, which would turn ① into 1 and ㎡ into m2.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata

# A flag such as England's is a black flag with tag characters, and a joined emoji needs its
# joiners (U+200C, U+200D), so both stay.
_FLAG = "\U0001f3f4[\U000e0020-\U000e007e]+\U000e007f"
_CONTROL = "\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff"
_HIDDEN = "\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff\U000e0000-\U000e007f"
_SOFT_HYPHEN = "\u00ad"
_ODD = re.compile(
    f"(?P<flag>{_FLAG})|(?P<control>[{_CONTROL}])|(?P<hidden>[{_HIDDEN}])|(?P<soft>{_SOFT_HYPHEN})"
)
_NEW_LINES = re.compile("\r\n?|\x85|\u2028|\u2029")
_FEEDS = re.compile("[\x0b\x0c]")


@dataclasses.dataclass(frozen=True, slots=True)
class Cleaned:
    text: str
    control_count: int
    hidden_count: int


def clean(text: str) -> Cleaned:
    """Returns the text in NFC with `\\n` as its only line end, and how much was removed."""
    text = normalize_line_ends(text)
    control = hidden = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal control, hidden
        if match.lastgroup == "flag":
            return match.group()
        if match.lastgroup == "control":
            control += 1
        elif match.lastgroup == "hidden":
            hidden += 1
        return ""

    if not text.isascii() or _ODD.search(text):
        text = _ODD.sub(replace, text)
        # After the removal: a removed character between base and accent would hide the pair.
        text = unicodedata.normalize("NFC", text)
    return Cleaned(text, control, hidden)


def normalize_line_ends(text: str) -> str:
    """Returns the text with every kind of line end as `\\n`. Feeds become spaces: lines keep their count."""
    return _FEEDS.sub(" ", _NEW_LINES.sub("\n", text))


def control_share(text: str) -> tuple[int, float]:
    """Returns how many control characters text has, white space and escapes apart, and their share."""
    count = sum(1 for match in _ODD.finditer(text) if match.lastgroup == "control")
    return count, count / max(1, len(text))
