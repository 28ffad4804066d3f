"""Plain text becomes paragraphs with their lines."""

from services.ingest.model import BlockKind
from tests.support.parsing import parse_bytes


def test_a_nul_is_removed_and_offsets_agree() -> None:
    parsed = parse_bytes(b"a\0b")
    assert parsed.blocks == [(BlockKind.PARAGRAPH, "ab")]
    assert parsed.reasons == ["CONTROL_CHARACTERS_REMOVED"]


def test_blank_lines_part_paragraphs_and_lines_are_kept() -> None:
    parsed = parse_bytes("第一行\r\n第二行\r\n\r\n  \r\n新的段落\r\n".encode())
    assert parsed.blocks == [(BlockKind.PARAGRAPH, "第一行\n第二行"), (BlockKind.PARAGRAPH, "新的段落")]
    places = [(b.locator.start_line, b.locator.end_line) for b in parsed.document.blocks]
    assert places == [(1, 2), (5, 5)]


def test_only_marked_lines_are_headings() -> None:
    parsed = parse_bytes(b"# One\ntext\n## Two ##\nmore\n#hashtag\n1.2 Not a heading\n")
    kinds = [(kind, text) for kind, text in parsed.blocks if kind is BlockKind.HEADING]
    assert kinds == [(BlockKind.HEADING, "One"), (BlockKind.HEADING, "Two")]
    assert parsed.document.blocks[-1].locator.heading_path == ("One", "Two")
    assert parsed.document.title == "One"


def test_a_format_without_pages_invents_none() -> None:
    parsed = parse_bytes(b"words")
    assert parsed.document.page_count is None
    assert parsed.document.blocks[0].locator.page is None
