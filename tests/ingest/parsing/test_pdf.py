"""PDF: layout, scans, passwords, fonts, pictures."""

import zlib

import pytest

from services.ingest.model import BlockKind
from services.ingest.parsing import pdf_fonts
from services.ingest.parsing.limits import ParseLimits
from shared.errors import DependencyUnavailableError, InvalidDocumentError
from tests.support import files
from tests.support.parsing import parse_bytes


def test_lines_become_paragraphs_and_large_ones_headings() -> None:
    page = files.lines(
        [
            ("Big Title", 24),
            "First line of the paragraph that goes to the edge of the co-",
            "lumn and goes on and on until the very end of this.",
            "A new one.",
            ("Section", 16),
            "- item one",
            "- item two",
        ]
    )
    parsed = parse_bytes(files.pdf([page, files.lines(["Page two has its own text."])]))
    assert parsed.blocks == [
        (BlockKind.HEADING, "Big Title"),
        (
            BlockKind.PARAGRAPH,
            "First line of the paragraph that goes to the edge of the column and goes on and on "
            "until the very end of this.",
        ),
        (BlockKind.PARAGRAPH, "A new one."),
        (BlockKind.HEADING, "Section"),
        (BlockKind.LIST_ITEM, "- item one"),
        (BlockKind.LIST_ITEM, "- item two"),
        (BlockKind.PARAGRAPH, "Page two has its own text."),
    ]
    assert [block.locator.page for block in parsed.document.blocks] == [1, 1, 1, 1, 1, 1, 2]
    assert parsed.document.page_count == 2


def test_ragged_lines_and_hanging_list_items_are_joined() -> None:
    page = files.lines(
        [
            "This line of a paragraph is as long as any line of this page",
            "and this one is short because of the next",
            "incomprehensibilities that follow it here.",
            "- a list item as long as any other line that stands on the page",
        ]
    )
    hanging = files.lines(["which goes on behind its bullet."], left=52, top=540 - 4 * 15)
    texts = [text for _, text in parse_bytes(files.pdf([page + b"\n" + hanging])).blocks]
    assert len(texts) == 2
    assert "short because of the next incomprehensibilities that" in texts[0]
    assert texts[1].endswith("on the page which goes on behind its bullet.")


def test_a_pdf_without_a_title_is_called_by_its_largest_line() -> None:
    head = files.lines(["Some Company"]) + b"\n" + files.lines([("The Annual Report", 30)], top=480)
    page = head + b"\n" + files.lines(["Words of the report.", "More words."], top=400)
    assert parse_bytes(files.pdf([page])).document.title == "The Annual Report"
    assert parse_bytes(files.pdf([files.lines(["Words alone.", "More words."])])).document.title is None


def test_bookmarks_are_the_headings_where_there_are_any() -> None:
    data = files.pdf(
        [files.lines([("Huge but no heading", 30), "1.2 Intro", "Words of the introduction."])],
        outline=[("Intro", 0)],
        title="The Handbook",
    )
    parsed = parse_bytes(data)
    headings = [text for kind, text in parsed.blocks if kind is BlockKind.HEADING]
    assert headings == ["1.2 Intro"]
    assert parsed.document.title == "The Handbook"


def test_running_headers_and_page_numbers_are_left_out() -> None:
    header = files.lines(["Company confidential"], top=580)
    pages = [
        header + b"\n" + files.lines([f"Body of page {n} here."]) + b"\n" + files.lines([f"{n} / 9"], top=20)
        for n in range(1, 10)
    ]
    text = parse_bytes(files.pdf(pages)).document.text
    assert "confidential" not in text and "/ 9" not in text
    assert text.count("Body of page") == 9


def test_a_scan_is_refused_for_its_missing_text_layer() -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        parse_bytes(files.scanned_pdf([None, None]))
    assert (caught.value.reason, caught.value.parameters["pages"]) == ("NO_TEXT_LAYER", "2")


def test_a_partly_scanned_document_is_read_with_a_warning_for_each_page() -> None:
    parsed = parse_bytes(files.scanned_pdf([None, files.lines(["This page has real text."]), None]))
    assert [(w.reason, w.page) for w in parsed.document.warnings] == [
        ("PAGE_WITHOUT_TEXT", 1),
        ("PAGE_WITHOUT_TEXT", 3),
    ]
    assert "real text" in parsed.document.text


def test_a_picture_is_kept_once_with_its_bytes_and_first_page() -> None:
    parsed = parse_bytes(files.scanned_pdf([None, files.lines(["This page has real text."]), None]))
    (asset,) = parsed.document.assets
    assert (asset.page, asset.width, asset.height, asset.media_type) == (1, 64, 64, "image/png")
    png = parsed.assets[asset.sha256]
    assert png.startswith(b"\x89PNG") and len(png) == asset.size_bytes
    start = png.index(b"IDAT") + 4
    rows = zlib.decompressobj().decompress(png[start:])
    assert rows[:4] == bytes([0, 128, 129, 130])
    shown = [block for block in parsed.document.blocks if block.asset_sha256]
    assert [(block.kind, block.asset_sha256) for block in shown] == [(BlockKind.IMAGE, asset.sha256)]


def test_a_page_without_anything_has_no_text() -> None:
    with pytest.raises(InvalidDocumentError, match="No text"):
        parse_bytes(files.pdf([b""]))


def test_a_password_is_named_at_once() -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        parse_bytes(files.encrypted_pdf("secret"))
    assert caught.value.reason == "PASSWORD_PROTECTED"


def test_a_pdf_with_an_empty_user_password_is_read() -> None:
    assert "Locked away" in parse_bytes(files.encrypted_pdf("")).document.text


def test_a_torn_file_is_corrupt() -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        parse_bytes(files.pdf([files.lines(["Some words stand here."])])[:200])
    assert caught.value.reason == "CORRUPT_FILE"


def test_too_many_pages_are_refused_before_any_is_read() -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        parse_bytes(files.pdf([files.lines(["x"])] * 4), limits=ParseLimits(max_pages=3))
    assert caught.value.reason == "TOO_MANY_PAGES"
    assert caught.value.parameters == {"actual": "4", "limit": "3"}


def test_a_font_that_maps_to_nul_leaves_none_in_the_text() -> None:
    parsed = parse_bytes(files.nul_mapped_pdf())
    assert "\0" not in parsed.document.text
    assert parsed.blocks[0][1].startswith("ac and some more words")


def test_chinese_without_an_embedded_font_is_read_or_the_missing_font_is_named() -> None:
    data = pdf_fonts.self_test_pdf("数据备份")
    if pdf_fonts.has_cjk_font():
        assert parse_bytes(data).document.text == "数据备份"
    else:
        with pytest.raises(DependencyUnavailableError) as caught:
            parse_bytes(data)
        assert caught.value.reason == "CJK_FONT_MISSING"


def test_a_missing_chinese_font_does_not_matter_to_an_english_document() -> None:
    assert "CJK_FONT_MISSING" not in parse_bytes(files.pdf([files.lines(["Plain words."])])).reasons


@pytest.mark.parametrize(
    "objects",
    [
        [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[2 0 R 2 0 R]/Count 1000000>>"],
        [b"<</Type/Catalog/Pages 2 0 R/X " + b"[" * 50_000 + b"]" * 50_000 + b">>", b"<</Type/Pages>>"],
        [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[]/Count 2000000000>>"],
    ],
)
def test_a_page_tree_that_lies_ends_with_a_named_reason(objects: list[bytes]) -> None:
    with pytest.raises(InvalidDocumentError) as caught:
        parse_bytes(files.assemble(objects))
    assert caught.value.reason in {"CORRUPT_FILE", "TOO_MANY_PAGES", "NO_TEXT"}


def test_the_dots_of_a_table_of_contents_are_no_text() -> None:
    page = files.lines(
        [
            "1 Getting started . . . . . . . . . . . . . . 7",
            "2 Going on ................ 12",
            ". . . . . . . . . . . . .",
            "It ends here...",
        ]
    )
    text = parse_bytes(files.pdf([page])).document.text
    assert "Getting started 7" in text
    assert "Going on 12" in text
    assert ". ." not in text
    assert "It ends here..." in text
