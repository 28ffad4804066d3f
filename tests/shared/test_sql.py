"""Statements from .sql files."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.sql import Statements, load

TEXT = """-- What this file owns.

-- name: find_it
-- A comment that stays.
SELECT id FROM things WHERE status = {{READY}} AND id = %(id)s;

-- name: remove_it
DELETE FROM things;
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "things.sql"
    file.write_text(TEXT, encoding="utf-8")
    return file


def test_statements_are_found_by_name_without_their_semicolon(path):
    statements = Statements(path, {"READY": "'READY'"})
    assert statements.names == ("find_it", "remove_it")
    assert statements.remove_it == b"DELETE FROM things"
    assert statements.find_it.endswith(b"status = 'READY' AND id = %(id)s")


def test_the_file_lies_beside_the_module(path):
    assert load(str(path.with_suffix(".py")), {"READY": "1"}).names == ("find_it", "remove_it")


def test_an_unknown_name_fails_with_the_name(path):
    with pytest.raises(AttributeError, match="no statement named find_them"):
        _ = Statements(path, {"READY": "1"}).find_them


def test_a_constant_that_nobody_gave_fails_at_once(path):
    with pytest.raises(KeyError, match="READY"):
        Statements(path)


def test_a_name_given_twice_is_refused(path):
    path.write_text(TEXT + "\n-- name: find_it\nSELECT 1;\n", encoding="utf-8")
    with pytest.raises(ValueError, match="find_it"):
        Statements(path, {"READY": "1"})
