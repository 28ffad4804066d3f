"""The sentences: both languages, the same facts, and a text in every case."""

from __future__ import annotations

import ast
import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import messages
from shared.rpc.status import CODE_KEY

REPOSITORY = Path(__file__).parents[2]
ERROR_CLASS = re.compile(r"^[A-Z]\w+Error$")


def facts_of(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


@pytest.mark.parametrize("reason", sorted(messages.SENTENCES))
def test_a_reason_has_both_languages_with_the_same_facts(reason):
    english, chinese = messages.SENTENCES[reason]
    assert facts_of(english) == facts_of(chinese)
    assert re.search(r"[\u4e00-\u9fff]", chinese)
    assert not re.search(r"[\u4e00-\u9fff]", english)
    assert re.fullmatch(r"[A-Z][A-Z0-9_]*", reason)
    # These names are taken on the way to the client.
    assert not facts_of(english) & {CODE_KEY, "retry_after_seconds", "reason"}


@pytest.mark.parametrize("reason", sorted(messages.SENTENCES))
@pytest.mark.parametrize("language", ["en", "zh", "fr"])
def test_a_sentence_renders_even_when_all_its_facts_are_missing(reason, language):
    assert messages.render(reason, {}, language)


@given(
    reason=st.one_of(st.sampled_from(sorted(messages.SENTENCES)), st.text()),
    parameters=st.dictionaries(st.text(), st.text()),
    language=st.one_of(st.sampled_from(messages.LANGUAGES), st.text()),
)
def test_rendering_never_fails(reason, parameters, language):
    assert isinstance(messages.render(reason, parameters, language), str)


def test_braces_in_a_fact_stay_what_they_are():
    assert "{actual.__class__}" in messages.render("TOO_LARGE", {"limit": "{actual.__class__}"})


def test_a_reason_of_a_newer_release_is_shown_with_its_facts():
    assert messages.render("NEW_REASON", {"b": "2", "a": "1"}) == "NEW_REASON (a=1, b=2)"
    assert messages.render("NEW_REASON", {}) == "NEW_REASON"


def raised_reasons() -> list[tuple[str, str, frozenset[str]]]:
    """Every error of ours that the code makes with a literal reason: place, reason, facts."""
    found = []
    for folder in ("services", "shared"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and ERROR_CLASS.match(node.func.id)
                    and node.args
                    and isinstance(node.args[0], ast.Constant)
                    and isinstance(node.args[0].value, str)
                    and re.fullmatch(r"[A-Z][A-Z0-9_]+", node.args[0].value)
                ):
                    names = frozenset(keyword.arg or "**" for keyword in node.keywords)
                    place = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                    found.append((place, node.args[0].value, names - {"retry_after_seconds"}))
    return found


def test_every_reason_that_the_code_raises_has_its_sentence_and_gets_its_facts():
    raised = raised_reasons()
    assert len(raised) > 30
    faults = []
    for place, reason, names in raised:
        if reason not in messages.SENTENCES:
            faults.append(f"{place}: no sentence for {reason}")
        elif "**" not in names and (missing := facts_of(messages.SENTENCES[reason][0]) - names):
            faults.append(f"{place}: {reason} lacks {sorted(missing)}")
    assert faults == []


@pytest.mark.parametrize("problem", sorted(messages.PROBLEMS))
def test_what_is_wrong_with_a_field_is_told_in_both_languages(problem):
    english, chinese = messages.PROBLEMS[problem]
    assert facts_of(english) == facts_of(chinese)
    parameters = {"field": "x", "problem": problem}
    assert messages.render("FIELD_INVALID", parameters, "zh").endswith("。")
    assert re.search(r"[\u4e00-\u9fff]", chinese)
    assert not re.search(
        r"[a-z]{4,}",
        messages.render("FIELD_INVALID", parameters, "zh")
        .replace("collections", "")
        .replace("documents", ""),
    )


def test_every_problem_in_the_code_is_one_of_these():
    used = set()
    for folder in ("services", "shared"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            used |= set(re.findall(r"problem=\"([^\"]+)\"", text)) | set(
                re.findall(r"_invalid\([^,]+, \"([^\"]+)\"", text)
            )
    assert used == set(messages.PROBLEMS)
