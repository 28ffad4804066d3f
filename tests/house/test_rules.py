"""Every rule of the state machines has tests that name it, and docs/rules-and-tests.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "rules-and-tests.md"
RULES = [*(f"D{number}" for number in range(1, 6)), *(f"J{number}" for number in range(1, 19))]
DEFINED = {
    (str(path.relative_to(ROOT / "tests")), test)
    for path in (ROOT / "tests").rglob("test_*.py")
    for test in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_named_by_a_test(rule: str) -> None:
    assert [test for _, test in DEFINED if f"_{rule.lower()}_" in test]


def test_every_test_that_the_page_names_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)::(?:`\n  `)?(test_\w+)`", text))
    assert len(named) > len(RULES)
    assert named <= DEFINED, named - DEFINED


def test_the_page_lists_every_rule() -> None:
    assert re.findall(r"^## (\w+):", PAGE.read_text(encoding="utf-8"), re.MULTILINE) == RULES
