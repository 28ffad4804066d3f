"""Which language a caller reads."""

from __future__ import annotations

import pytest

from shared.rpc.language import language_of


@pytest.mark.parametrize(
    ("header", "language"),
    [
        ("zh", "zh"),
        ("zh-CN,zh;q=0.9,en;q=0.8", "zh"),
        ("ZH-Hant", "zh"),
        ("en-US,zh", "en"),
        ("fr, zh;q=0.5", "zh"),
        ("fr", "en"),
        ("", "en"),
        (" , ;;, ", "en"),
    ],
)
def test_the_first_language_of_the_list_that_we_speak_is_used(header, language):
    assert language_of([("accept-language", header)]) == language


def test_without_the_header_it_is_english():
    assert language_of(None) == "en"
    assert language_of([("accept-language", b"zh"), ("other", "zh")]) == "en"


def test_a_language_that_only_begins_like_one_of_ours_is_not_ours():
    assert language_of([("accept-language", "zha, enm, zh")]) == "zh"
    assert language_of([("accept-language", "enm, zh")]) == "zh"
