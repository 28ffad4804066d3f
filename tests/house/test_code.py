"""The code about itself: what a linter cannot say but a reader relies on."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
from pathlib import Path

import pytest

from services.embedder.settings import EmbedderSettings
from services.ingest.settings import ServeSettings
from services.ingest.work_settings import WorkSettings
from services.search.settings import SearchSettings
from shared import messages
from shared.settings import variable_name

ROOT = Path(__file__).parents[2]
CODE = sorted(
    path
    for folder in ("services", "shared", "client", "deploy")
    for path in (ROOT / folder).rglob("*.py")
    if path.stat().st_size
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SQL = sorted((ROOT / "services").rglob("repository/*.sql"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CODE, ids=name)
def test_a_file_fits_a_head_and_says_what_it_owns(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    assert ast.get_docstring(ast.parse(text)), "no docstring"


@pytest.mark.parametrize("path", CODE, ids=name)
def test_a_function_fits_a_screen(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


def test_sql_stands_in_repositories_only() -> None:
    statement = re.compile(r"\b(SELECT .+ FROM|INSERT INTO|UPDATE \w+ SET|DELETE FROM)\b")
    for path in CODE:
        if "repository" in path.parts or path.parent.name == "local" or path.name == "postgres.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                assert not statement.search(node.value), f"{name(path)}:{node.lineno}"


@pytest.mark.parametrize("path", SQL, ids=name)
def test_every_statement_has_a_user_and_no_star(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    users = "".join(other.read_text(encoding="utf-8") for other in path.parent.glob("*.py"))
    for statement in re.findall(r"^-- name: (\w+)", text, re.MULTILINE):
        assert re.search(rf"statements\.{statement}\b|\"{statement}\"", users), (
            f"{statement} is used by nobody"
        )


def test_every_reason_in_the_code_has_its_sentences() -> None:
    used = set()
    for path in CODE:
        text = path.read_text(encoding="utf-8")
        used |= set(re.findall(r"Error\(\s*\"([A-Z][A-Z_]+)\"", text))
        used |= set(re.findall(r"Warning\(\s*\"([A-Z][A-Z_]+)\"", text))
    missing = used - set(messages.SENTENCES) - {"INTERNAL"}
    assert not missing


def test_every_sentence_has_a_user() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in CODE if path.name != "messages.py")
    unused = [reason for reason in messages.SENTENCES if f'"{reason}"' not in text]
    assert not unused


@pytest.mark.parametrize(
    ("settings", "prefix"),
    [
        (ServeSettings, "READYMARK_INGEST_"),
        (WorkSettings, "READYMARK_INGEST_"),
        (EmbedderSettings, "READYMARK_EMBEDDER_"),
        (SearchSettings, "READYMARK_SEARCH_"),
    ],
)
def test_every_setting_is_documented(settings: type, prefix: str) -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    for field in dataclasses.fields(settings):
        assert f"`{variable_name(field, prefix)}`" in text


def test_nothing_names_this_machine_or_a_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    forbidden = re.compile(
        "|".join(["pypi" + r"\.org", "file" + "://" + "/opt", "/" + "work/", "--index" + "-url"])
    )
    for line in listed.stdout.splitlines():
        path = ROOT / line
        if path.suffix in {".pdf", ".png"} or not path.is_file():
            continue
        assert not forbidden.search(path.read_text(encoding="utf-8", errors="replace")), line


def test_no_test_sleeps_to_hope() -> None:
    """A sleep of more than half a second says why it is one: `# why: ...` on its line."""
    found = []
    for path in TESTS:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = re.search(r"(?<!pg_)sleep\(([\d.]+)\)", line)
            if match and float(match.group(1)) > 0.5 and "# why:" not in line:
                found.append(f"{name(path)}:{number}")
    assert not found
