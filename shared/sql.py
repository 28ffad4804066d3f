"""Loads named statements from .sql files.

A statement begins at a line `-- name: claim_ingestion_job` and ends where the next one
begins. `{{CONSTANT}}` is replaced once, at import, by a literal that the caller's table
provides; values never come this way, they are named parameters. Statements are bytes,
which psycopg takes as they are: text made at run time still stands out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_NAME = re.compile(r"^-- name: (\w+)[ \t]*$", re.MULTILINE)
_CONSTANT = re.compile(r"\{\{([\w.]+)\}\}")


class Statements:
    """The statements of one file as attributes; a missing name fails at the first use."""

    def __init__(self, path: Path, constants: Mapping[str, str] | None = None) -> None:
        table = constants or {}
        text = _CONSTANT.sub(lambda match: table[match.group(1)], path.read_text(encoding="utf-8"))
        parts = _NAME.split(text)[1:]
        if len(set(parts[::2])) < len(parts[::2]):
            raise ValueError(f"{path.name}: a name is given twice: {', '.join(sorted(parts[::2]))}")
        self._statements = {
            name: body.strip().rstrip(";").encode()
            for name, body in zip(parts[::2], parts[1::2], strict=True)
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._statements)

    def __getattr__(self, name: str) -> bytes:
        try:
            return self._statements[name]
        except KeyError:
            raise AttributeError(f"no statement named {name}") from None


def load(python_file: str, constants: Mapping[str, str] | None = None) -> Statements:
    """Returns the statements of the .sql file that lies beside `python_file` under the same name."""
    return Statements(Path(python_file).with_suffix(".sql"), constants)
