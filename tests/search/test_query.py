"""What is a valid question."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from services.search import query
from services.search.query import SearchMode, SearchQuery, checked_query
from shared.errors import InvalidArgumentError

DOCUMENT = uuid.UUID("0190b2b4-7c3e-7d00-8000-000000000001")
VALID: dict[str, Any] = {
    "parent": "collections/docs",
    "text": "a question",
    "mode": SearchMode.HYBRID,
    "top_k": 0,
    "documents": [],
    "explain": False,
    "max_characters": 100,
}


def test_a_plain_question_gets_the_defaults() -> None:
    assert checked_query(**VALID) == SearchQuery(collection="docs", text="a question", top_k=10)


def test_documents_are_named_in_full_and_counted_once() -> None:
    names = [f"collections/docs/documents/{DOCUMENT}", f"collections/-/documents/{str(DOCUMENT).upper()}"]
    assert checked_query(**VALID | {"documents": names}).document_ids == (DOCUMENT,)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("parent", {"parent": ""}),
        ("parent", {"parent": "docs"}),
        ("parent", {"parent": "collections/"}),
        ("parent", {"parent": "collections/-"}),
        ("parent", {"parent": "collections/a/documents/b"}),
        ("query", {"text": ""}),
        ("query", {"text": " \n\u3000"}),
        ("query", {"text": "x" * 101}),
        ("query", {"text": "a\0b"}),
        ("top_k", {"top_k": -1}),
        ("top_k", {"top_k": 201}),
        ("documents[0]", {"documents": ["nonsense"]}),
        ("documents[0]", {"documents": [f"collections/other/documents/{DOCUMENT}"]}),
        ("documents[0]", {"documents": ["collections/docs/documents/" + "-" * 36]}),
        ("documents[1]", {"documents": [f"collections/docs/documents/{DOCUMENT}", "x"]}),
        ("documents", {"documents": ["x"] * (query.MAX_DOCUMENTS + 1)}),
    ],
)
def test_a_wrong_field_is_named(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        checked_query(**VALID | change)
    assert caught.value.reason == "FIELD_INVALID"
    assert caught.value.parameters["field"] == field
    assert caught.value.parameters["problem"]


@pytest.mark.parametrize("top_k", [1, 200])
def test_the_bounds_of_top_k_are_allowed(top_k: int) -> None:
    assert checked_query(**VALID | {"top_k": top_k}).top_k == top_k
