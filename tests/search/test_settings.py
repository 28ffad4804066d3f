"""The settings of search from the environment."""

from __future__ import annotations

import pytest

from services.search.settings import PREFIX, SearchSettings
from shared.settings import SettingsError, describe, from_environment

URL = {"READYMARK_SEARCH_DATABASE_URL": "postgresql://readymark_searcher:hush@db/readymark"}


def test_only_the_database_has_to_be_named_and_it_is_never_logged() -> None:
    settings = from_environment(SearchSettings, PREFIX, URL)
    assert settings.listen == "127.0.0.1:7403"
    assert "hush" not in str(describe(settings))


def test_the_embedder_address_is_shared_with_ingest() -> None:
    settings = from_environment(SearchSettings, PREFIX, URL | {"READYMARK_EMBEDDER_ADDRESS": "e:1"})
    assert settings.embedder_address == "e:1"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"READYMARK_SEARCH_DATABASE_URL": ""}, "READYMARK_SEARCH_DATABASE_URL"),
        ({"READYMARK_SEARCH_POOL_SIZE": "0"}, "READYMARK_SEARCH_POOL_SIZE"),
        ({"READYMARK_SEARCH_EXACT_MAX_CANDIDATES": "-1"}, "EXACT_MAX_CANDIDATES"),
        ({"READYMARK_SEARCH_POOLSIZE": "3"}, "READYMARK_SEARCH_POOLSIZE"),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        from_environment(SearchSettings, PREFIX, URL | change)
