"""Markdown becomes blocks that read as text."""

from services.ingest.model import BlockKind
from tests.support.parsing import parse_bytes

SAMPLE = """---
title: "手册"
---
# 安装 *指南*

第一段，
换行继续 [链接](http://example.com) `code`。

- one
  continued
  1. inner
- two

| a | b\\|c |
|---|:--|
| 1 | 2 |
| 3 | 4 |

```python
def f():
    return 1
```

> quoted

![图片说明](x.png)

## 下一节
尾
"""


def test_each_kind_of_block_is_known() -> None:
    parsed = parse_bytes(SAMPLE.encode(), "a.md")
    assert parsed.blocks == [
        (BlockKind.HEADING, "安装 指南"),
        (BlockKind.PARAGRAPH, "第一段，换行继续 链接 code。"),
        (BlockKind.LIST_ITEM, "- one continued"),
        (BlockKind.LIST_ITEM, "1. inner"),
        (BlockKind.LIST_ITEM, "- two"),
        (BlockKind.TABLE, "| a | b\\|c |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |"),
        (BlockKind.CODE, "def f():\n    return 1"),
        (BlockKind.QUOTE, "quoted"),
        (BlockKind.IMAGE, "图片说明"),
        (BlockKind.HEADING, "下一节"),
        (BlockKind.PARAGRAPH, "尾"),
    ]
    assert parsed.document.title == "手册"


def test_places_lead_back_to_the_lines_of_the_file() -> None:
    parsed = parse_bytes(SAMPLE.encode(), "a.md")
    source = SAMPLE.split("\n")
    by_kind = {block.kind: block for block in parsed.document.blocks}
    table, code = by_kind[BlockKind.TABLE], by_kind[BlockKind.CODE]
    assert source[table.locator.start_line - 1].startswith("| a")
    assert source[table.locator.end_line - 1].startswith("| 3")
    assert source[code.locator.start_line - 1] == "def f():"
    assert source[code.locator.end_line - 1] == "    return 1"
    assert (table.header_rows, code.language) == (2, "python")


def test_paths_hold_the_titles_above() -> None:
    parsed = parse_bytes(b"# A\n## B\nx\n## C\ny\n# D\nz\n", "a.md")
    paths = [b.locator.heading_path for b in parsed.document.blocks if b.kind is BlockKind.PARAGRAPH]
    assert paths == [("A", "B"), ("A", "C"), ("D",)]


def test_raw_html_leaves_its_words_only() -> None:
    parsed = parse_bytes(b"<div>\n<script>bad()</script>Hello <b>you</b></div>\n\na <i>b</i> &amp; c", "a.md")
    text = parsed.document.text
    assert "Hello" in text and "bad()" not in text and "<" not in text
    assert text.endswith("a b & c")


def test_deep_nesting_ends_quickly() -> None:
    parsed = parse_bytes(b">" * 20_000 + b" x\n\n" + b"[" * 20_000 + b"\n\nend", "a.md")
    assert parsed.document.text.endswith("end")
