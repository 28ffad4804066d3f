"""What the parsers are, in one hash. Loads none of them."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import unicodedata

# Counted up with every change of what comes out of the parsers; old snapshots are rebuilt then.
PARSER_VERSION = 2
_LIBRARIES = ("pypdfium2", "html-to-markdown", "markdown-it-py")


@functools.cache
def parser_fingerprint() -> str:
    """Returns a hash that changes when the same bytes may parse to something else."""
    versions = [f"{name}={importlib.metadata.version(name)}" for name in _LIBRARIES]
    parts = (f"parser={PARSER_VERSION}", *versions, f"unicode={unicodedata.unidata_version}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
